"""A chain of NeMo's jobs over a time limit, and over what killed jobs leave of their checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox import Sandbox
from supervisor.marks import link_jobs
from tests.nemo.conftest import SLIPWAY, Submit, Train
from tests.nemo.shrinking import GPT
from tests.nemo.test_nemo_trains import newest_checkpoint, progress, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

_TOLD = re.compile(r"global_step=(\d+)\.0*, consumed_samples=(\d+)\.0*,")
_SAVED = re.compile(r"step=(\d+)-consumed_samples=(\d+)\.0-last$")


def told(launch: Path, job: str) -> list[tuple[int, int]]:
    """The steps, counted by NeMo from 0, and the consumed samples in a link's own log."""
    logs = list(launch.glob(f"log-*_{job}.out"))
    return [(int(step), int(samples)) for step, samples in _TOLD.findall(logs[0].read_text())] if logs else []


def ended(launch: Path, job: str) -> dict[str, Any]:
    path = launch / "marks" / f"{job}.0.ended.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def saved(run: Path) -> tuple[int, int]:
    """The step and the consumed samples of the checkpoint from which NeMo continues."""
    found = _SAVED.search(newest_checkpoint(run))
    assert found
    return int(found.group(1)), int(found.group(2))


@pytest.fixture
def slurm(sandbox: Sandbox) -> Iterator[Any]:
    """Runs one of Slurm's commands."""

    def call(*command: str) -> str:
        return subprocess.run(
            command, env=sandbox.environment(), capture_output=True, text=True, check=True, timeout=60
        ).stdout

    yield call


def test_a_chain_of_two_links_goes_over_its_time_limit(submit: Submit, sandbox: Sandbox, slurm: Any) -> None:
    run = submit(
        *GPT,
        "training.trainer.devices=2",
        "training.trainer.max_steps=100000",
        "training.trainer.val_check_interval=10",
        "training.run.time_limit=4:00",
        "resilience.links=2",
    )
    launch = run / "launches" / "1"
    try:
        wait_until(lambda: len(link_jobs(launch)) == 2)
        first, second = link_jobs(launch)
        slurm("scontrol", "hold", second)
        # Slurm's warning of the time limit, in its own time.
        wait_until(lambda: ended(launch, first), seconds=400)
        step, samples = saved(run)
        assert step > told(launch, first)[0][0]
        assert samples == 2 * step

        # What a job leaves that is killed while it writes, and one that was killed before it removed.
        (last,) = (run / "checkpoints").glob("*-last")
        half = last.with_name(
            f"megatron_gpt--val_loss=1.00-step={step + 5}-consumed_samples={samples + 10}.0-last"
        )
        surplus = last.with_name("megatron_gpt--val_loss=1.00-step=1-consumed_samples=2.0-last")
        mark = half.with_name(f"{half.name}-unfinished")
        mark.touch()
        for name in (half, surplus):
            shutil.copytree(last, name)

        slurm("scontrol", "release", second)
        wait_until(lambda: len(told(launch, second)) >= 3)
        slurm("scancel", "--signal=USR1", "--batch", second)
        wait_until(lambda: ended(launch, second))
    finally:
        subprocess.run([SLIPWAY, "cancel", run], env=sandbox.environment(), check=False, timeout=60)

    begun = told(launch, second)[0]
    assert begun == (step, samples + 2), "the first step of the second link follows the last that was saved"
    assert all(samples == 2 * (step + 1) for job in (first, second) for step, samples in told(launch, job))
    assert saved(run)[0] > step
    for job, link in ((first, 1), (second, 2)):
        end = ended(launch, job)
        assert (end["exit_code"], end["verdict"]) == (75, "continue"), end
        assert json.loads((launch / "marks" / f"{job}.0.started.json").read_text())["link"] == link
    assert json.loads((launch / "marks" / f"{second}.0.started.json").read_text())["checkpoint"] == step
    aside = run / "checkpoints-set-aside" / f"{second}.0"
    assert {path.name for path in aside.iterdir()} == {half.name, mark.name, surplus.name}
    assert not list(run.rglob("hpc_ckpt*"))


def test_the_newest_whole_checkpoint_is_continued_from(train: Train) -> None:
    """Its copy, `-last`, was being written when the job was killed; NeMo alone refuses to start."""
    small = [*GPT, "training.trainer.devices=1"]
    run = train(*small, "training.trainer.max_steps=4")
    (last,) = (run / "checkpoints").glob("*-last")
    last.with_name(f"{last.name}-unfinished").touch()

    train(*small, "training.trainer.max_steps=6")
    assert progress(run / "launches" / "2")[0] == (4, 10), "the four steps are not made again"
    assert newest_checkpoint(run) == "megatron_gpt--step=6-consumed_samples=12.0-last"
    (aside,) = (run / "checkpoints-set-aside").iterdir()
    # Also the one that was made of the newest, which NeMo does not take for its own.
    kept = {last.name, f"{last.name}-unfinished", f"{last.name}.again"}
    assert {path.name for path in aside.iterdir()} == kept


def test_a_range_of_nodes_is_what_nemo_gets(train: Train) -> None:
    """One node, then as many as there are: NeMo is told how many on its command line."""
    small = [*GPT, "training.trainer.devices=2", "training.model.global_batch_size=4"]
    run = train(*small, "training.trainer.max_steps=2")
    assert train(*small, "training.trainer.max_steps=4", "resilience.nodes={min: 1, max: 2}") == run
    (started,) = (run / "launches" / "2" / "marks").glob("*.started.json")
    assert len(json.loads(started.read_text())["nodes"].split(",")) == 2
    assert progress(run / "launches" / "2")[-1] == (3, 16)
    assert newest_checkpoint(run) == "megatron_gpt--step=4-consumed_samples=16.0-last"
