"""`slipway launch --build` on a real Slurm: real programs make the image, a stand-in srun starts in it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.images.store import read_sidecar
from launcher.sandbox.lifecycle import Sandbox
from launcher.schedulers.base import JobRef
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm.states import State
from tests.images.tiny import need, run

pytestmark = pytest.mark.slurm

# srun has no such options without Pyxis: this one records them, and runs without them.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" | grep ^--container-image= >>"$RECORD"
for word; do
    shift
    [[ $word == --*container* ]] || set -- "$@" "$word"
done
exec /usr/bin/srun "$@"
"""
_ENDED = (State.COMPLETED, State.FAILED, State.CANCELLED, State.TIMEOUT)


@dataclass
class Launches:
    """Launches below one directory, with a record of the images that their tasks started in."""

    root: Path
    conf: str

    @property
    def overrides(self) -> list[str]:
        (self.root / "text").mkdir(exist_ok=True)
        return [
            "stages=[data_preparation]",
            "cluster=sandbox",
            f"cluster.slurm_conf={self.conf}",
            "cluster.python=/usr/bin/true",
            "data_preparation.inputs=[text]",
            f"launcher_scripts_path={self.root}",
        ]

    def start(self, container: str, *more: str) -> subprocess.Popen[str]:
        command = ["-m", "launcher.cli.app", "launch", *self.overrides, f"container={container}", *more]
        environment = {
            **os.environ,
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "RECORD": str(self.root / "record"),
        }
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *command], cwd=self.root, env=environment, stdout=pipe, stderr=pipe, text=True
        )

    def launch(self, container: str, *more: str) -> tuple[str, str]:
        process = self.start(container, *more)
        message = process.communicate()
        assert process.returncode == 0, message
        return message

    def manifest(self, run_name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.root / "results" / run_name / "launcher.json").read_text())
        return content

    def end(self, run_name: str) -> State:
        """Wait until the job of a run ends, and return its state."""
        launch_dir = self.root / "results" / run_name / "launches/1"
        manifest = self.manifest(run_name)
        log = launch_dir / f"log-{manifest['job_name']}_{manifest['job_id']}.out"
        scheduler = SlurmScheduler(self.conf)
        ref = JobRef({1: manifest["job_id"]}, launch_dir, [manifest["tag"]], manifest["host"])
        for _ in range(1200):
            state = scheduler.statuses([ref])[0].state
            if state in _ENDED:
                return state
            time.sleep(0.1)
        pytest.fail(f"{run_name} is {state}: {log.read_text() if log.exists() else 'no log'}")

    def started_images(self) -> list[str]:
        return [line.partition("=")[2] for line in (self.root / "record").read_text().splitlines()]


@pytest.fixture
def launches(plain_sandbox: Sandbox, tmp_path: Path) -> Launches:
    need("skopeo", "umoci", "mksquashfs", "unsquashfs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    return Launches(tmp_path, plain_sandbox.environment()["SLURM_CONF"])


def test_two_launches_at_once_build_the_recipe_once(
    launches: Launches, tiny_layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("buildah")
    trees = [f"--config-dir={launches.root}/conf", f"--template-dir={launches.root}/templates"]
    (launches.root / "conf/image").mkdir(parents=True)
    (launches.root / "templates").mkdir()
    recipe = "defaults: [_base, _self_]\ntemplate: small\nbase: localhost/tiny:1\nbuilder: buildah\n"
    (launches.root / "conf/image/small.yaml").write_text(recipe)
    template = '{% extends "_base.Dockerfile.j2" %}{% block body %}ENV MADE=yes\n{% endblock %}'
    (launches.root / "templates/small.Dockerfile.j2").write_text(template)
    storage = (
        f'[storage]\ndriver = "vfs"\ngraphroot = "{launches.root}/graph"\nrunroot = "{launches.root}/run"\n'
    )
    (launches.root / "storage.conf").write_text(storage)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(launches.root / "storage.conf"))
    run("skopeo", "copy", "-q", f"oci:{tiny_layout}:1", "containers-storage:localhost/tiny:1")

    names = ["one", "two"]
    processes = [
        launches.start("small", "--build", *trees, f"data_preparation.run.name={name}", "env_vars.A=1")
        for name in names
    ]
    output = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], output
    assert sum(": made\n" in text for text in output) == 1, output
    (image,) = (launches.root / "images").glob("*.sqsh")
    record = read_sidecar(image)
    assert record is not None and record.recipe is not None
    assert (record.recipe.name, record.recipe.flavor) == ("small", "run")
    assert [launches.end(name) for name in names] == [State.COMPLETED] * 2
    assert launches.started_images() == [str(image)] * 2
    for name in names:
        manifest = launches.manifest(name)
        assert (manifest["image"], manifest["image_digest"]) == (str(image), record.digest)
    # The image exists: nothing is built again.
    _, message = launches.launch("small", "--build", *trees, "data_preparation.run.name=three")
    assert "building" not in message and ": made\n" not in message


def test_a_job_makes_the_image_and_the_launch_waits_for_it(
    launches: Launches, tiny_layout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    container = f"oci:{os.path.relpath(tiny_layout, launches.root)}:1"
    more = [
        "--build=job",
        "image_job.cpus_per_task=1",
        "image_job.mem=null",
        "resilience.after_stage=afterany",
    ]
    out, _ = launches.launch(container, *more)
    manifest = launches.manifest("image_tiny+1")
    assert launches.manifest("tokenize_text")["after"] == f"afterok:{manifest['job_id']}"
    assert f"waits for afterok:{manifest['job_id']}" in out
    assert launches.end("image_tiny+1") is State.COMPLETED
    image = launches.root / "images/tiny+1.sqsh"
    assert read_sidecar(image) is not None
    assert launches.end("tokenize_text") is State.COMPLETED
    assert launches.started_images() == [str(image)]
    monkeypatch.chdir(launches.root)
    # The command recorded by each launch renders its script again, byte for byte.
    for name in ("image_tiny+1", "tokenize_text"):
        directory = launches.root / "results" / name / "launches/1"
        words = shlex.split((directory / "launcher_cmd.log").read_text().splitlines()[-1].removeprefix("# "))
        arguments = words[words.index("launch") + 1 :]
        assert main(["launch", *arguments]) == 0
        (script,) = directory.glob("*_submission.sh")
        assert capsys.readouterr().out == script.read_text()


def test_a_failed_image_job_cancels_the_launch(launches: Launches) -> None:
    out, _ = launches.launch(
        "oci:nowhere:1", "--build=job", "image_job.cpus_per_task=1", "image_job.mem=null"
    )
    assert "waits for afterok:" in out
    assert launches.end("image_nowhere+1") is State.FAILED
    assert launches.end("tokenize_text") is State.CANCELLED
    assert not list((launches.root / "images").glob("*.sqsh"))
    log = next((launches.root / "results/image_nowhere+1").glob("log-*.out")).read_text()
    assert f"{launches.root}/nowhere" in log
    assert "Traceback" not in log
