"""Finding a run on a real Slurm: without remembered trees, in a moved tree, and from another directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.forked_slipway import run_forked

STAGE = ["stages=[data_preparation]", "data_preparation.inputs=[/etc/hostname]", "cluster=sandbox"]


class Shell:
    """A user's shell, with its working directory and the trees that it remembers."""

    def __init__(self, directory: Path, conf: str, cache: Path, **environment: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.cache = cache
        self._env = {**os.environ, "SLURM_CONF": conf, "SLIPWAY_CACHE_DIR": str(cache), **environment}

    def slipway(self, *words: object, code: int = 0) -> str:
        done = run_forked(words, cwd=self.directory, env=self._env, timeout=100)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def launch(self, *overrides: str) -> tuple[Path, str]:
        """Launch a run; return its directory, and the id of its job."""
        launch = json.loads(self.slipway("launch", *STAGE, "cluster.python=/bin/true", "--json", *overrides))
        return Path(launch["run_dir"]), launch["job_id"]

    def origin(self, word: object) -> dict[str, Any]:
        """Return the launch that a word names, as `history` reports it."""
        return json.loads(self.slipway("history", word, "--json"))

    def launches(self, word: object) -> list[dict[str, Any]]:
        return json.loads(self.slipway("history", word, "--json"))


@pytest.mark.slurm
def test_a_run_is_found_without_remembered_trees_and_in_a_moved_tree(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    conf = sandbox.environment()["SLURM_CONF"]
    user = Shell(tmp_path / "project", conf, tmp_path / "cache")
    run_dir, job = user.launch("data_preparation.run.name=found_again")
    _, second = user.launch("data_preparation.run.name=found_again", "cluster.partition=cloud")
    try:
        elsewhere = Shell(tmp_path / "elsewhere", conf, user.cache)
        colleague = Shell(tmp_path / "colleague", conf, tmp_path / "another cache")
        rows = json.loads(elsewhere.slipway("list", "--all", "--json"))
        assert [(row["run_dir"], row["launches"]) for row in rows] == [(str(run_dir), 2)]

        # In the remembered trees; then, without them, by what Slurm knows of the jobs.
        for shell in (elsewhere, colleague):
            assert shell.origin(job)["directory"] == f"{run_dir}/launches/1"
            assert shell.origin(second)["directory"] == f"{run_dir}/launches/2"
            shutil.rmtree(shell.cache)
            states = [row["state"] for row in _settled_launches(shell, "found_again")]
            assert states == ["COMPLETED", "PENDING"]

        moved = tmp_path / "archive" / "of the project"
        moved.parent.mkdir()
        (tmp_path / "project").rename(moved)
        for shell in (elsewhere, colleague):
            assert "no run 'found_again'" in shell.slipway("history", "found_again", code=2)
            shutil.rmtree(shell.cache)
            moved_run = moved / "results" / "found_again"
            log = moved_run / "launches" / "1" / f"log-nemo-megatron-found_again_{job}.out"
            assert shell.origin(log)["run_dir"] == str(moved_run)
            # Seen once, it is known: by its name and its jobs' ids, from any directory.
            assert shell.origin(job)["directory"] == f"{moved_run}/launches/1"
            assert shell.origin(second)["directory"] == f"{moved_run}/launches/2"
            assert [row["job_id"] for row in shell.launches("found_again")] == [job, second]

        fresh = Shell(
            tmp_path / "fresh", conf, tmp_path / "third", SLIPWAY_RESULTS_DIR=str(moved / "results")
        )
        assert fresh.origin(job)["run_dir"] == str(moved_run)
        assert fresh.launches("found_again")[0]["tag"] == fresh.origin(job)["tag"]
    finally:
        subprocess.run(["scancel", second], env={**os.environ, "SLURM_CONF": conf}, check=False)


def _settled_launches(shell: Shell, word: str) -> list[dict[str, Any]]:
    """Return the launches of a run, once the first is over."""
    for _ in range(100):
        rows = shell.launches(word)
        if rows[0]["state"] not in ("PENDING", "RUNNING", "COMPLETING"):
            break
        time.sleep(0.1)
    return rows
