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

# Without Pyxis srun has no such options: this one notes them, and goes on without.
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
class Yard:
    """A directory for launches, with a record of the images that their tasks started in."""

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
        found: dict[str, Any] = json.loads((self.root / "results" / run_name / "launcher.json").read_text())
        return found

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

    def started_in(self) -> list[str]:
        return [line.partition("=")[2] for line in (self.root / "record").read_text().splitlines()]


@pytest.fixture
def yard(plain_sandbox: Sandbox, tmp_path: Path) -> Yard:
    need("skopeo", "umoci", "mksquashfs", "unsquashfs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    return Yard(tmp_path, plain_sandbox.environment()["SLURM_CONF"])


def test_two_launches_at_once_build_the_recipe_once(
    yard: Yard, tiny_layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("buildah")
    trees = [f"--config-dir={yard.root}/conf", f"--template-dir={yard.root}/templates"]
    (yard.root / "conf/image").mkdir(parents=True)
    (yard.root / "templates").mkdir()
    recipe = "defaults: [_base, _self_]\ntemplate: small\nbase: localhost/tiny:1\nbuilder: buildah\n"
    (yard.root / "conf/image/small.yaml").write_text(recipe)
    template = '{% extends "_base.Dockerfile.j2" %}{% block body %}ENV MADE=yes\n{% endblock %}'
    (yard.root / "templates/small.Dockerfile.j2").write_text(template)
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{yard.root}/graph"\nrunroot = "{yard.root}/run"\n'
    (yard.root / "storage.conf").write_text(storage)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(yard.root / "storage.conf"))
    run("skopeo", "copy", "-q", f"oci:{tiny_layout}:1", "containers-storage:localhost/tiny:1")

    names = ["one", "two"]
    both = [
        yard.start("small", "--build", *trees, f"data_preparation.run.name={name}", "env_vars.A=1")
        for name in names
    ]
    output = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert sum(": made\n" in one for one in output) == 1, output
    (image,) = (yard.root / "images").glob("*.sqsh")
    recorded = read_sidecar(image)
    assert recorded is not None and recorded.recipe is not None
    assert (recorded.recipe.name, recorded.recipe.flavor) == ("small", "run")
    assert [yard.end(name) for name in names] == [State.COMPLETED] * 2
    assert yard.started_in() == [str(image)] * 2
    for name in names:
        manifest = yard.manifest(name)
        assert (manifest["image"], manifest["image_digest"]) == (str(image), recorded.digest)
    # It is there: nothing is built again.
    _, message = yard.launch("small", "--build", *trees, "data_preparation.run.name=three")
    assert "building" not in message and ": made\n" not in message


def test_a_job_makes_the_image_and_the_launch_waits_for_it(
    yard: Yard, tiny_layout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    container = f"oci:{os.path.relpath(tiny_layout, yard.root)}:1"
    more = [
        "--build=job",
        "image_job.cpus_per_task=1",
        "image_job.mem=null",
        "resilience.after_stage=afterany",
    ]
    out, _ = yard.launch(container, *more)
    made = yard.manifest("image_tiny+1")
    assert yard.manifest("tokenize_text")["after"] == f"afterok:{made['job_id']}"
    assert f"waits for afterok:{made['job_id']}" in out
    assert yard.end("image_tiny+1") is State.COMPLETED
    image = yard.root / "images/tiny+1.sqsh"
    assert read_sidecar(image) is not None
    assert yard.end("tokenize_text") is State.COMPLETED
    assert yard.started_in() == [str(image)]
    monkeypatch.chdir(yard.root)
    # Each script again, byte for byte, from the command that its launch keeps.
    for name in ("image_tiny+1", "tokenize_text"):
        directory = yard.root / "results" / name / "launches/1"
        words = shlex.split((directory / "launcher_cmd.log").read_text().splitlines()[-1].removeprefix("# "))
        again = words[words.index("launch") + 1 :]
        assert main(["launch", *again]) == 0
        (script,) = directory.glob("*_submission.sh")
        assert capsys.readouterr().out == script.read_text()


def test_a_failed_image_job_cancels_the_launch(yard: Yard) -> None:
    out, _ = yard.launch("oci:nowhere:1", "--build=job", "image_job.cpus_per_task=1", "image_job.mem=null")
    assert "waits for afterok:" in out
    assert yard.end("image_nowhere+1") is State.FAILED
    assert yard.end("tokenize_text") is State.CANCELLED
    assert not list((yard.root / "images").glob("*.sqsh"))
    log = next((yard.root / "results/image_nowhere+1").glob("log-*.out")).read_text()
    assert f"{yard.root}/nowhere" in log
    assert "Traceback" not in log
