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

from launcher.sandbox.lifecycle import Sandbox
from slipway.common.node.checkpoints import step_of
from slipway.common.node.marks import link_jobs
from tests.chains.recorded_directories import entries, write_recording
from tests.nemo.conftest import SLIPWAY, Nemo, Submit, Train
from tests.nemo.shrinking import GPT
from tests.nemo.test_nemo_trains import newest_checkpoint, progress, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

_PROGRESS = re.compile(r"global_step=(\d+)\.0*, consumed_samples=(\d+)\.0*,")
_SAVED = re.compile(r"step=(\d+)-consumed_samples=(\d+)\.0-last$")


def logged_steps(launch: Path, job: str) -> list[tuple[int, int]]:
    """Return the steps, counted by NeMo from 0, and the consumed samples in a link's own log."""
    logs = list(launch.glob(f"log-*_{job}.out"))
    return (
        [(int(step), int(samples)) for step, samples in _PROGRESS.findall(logs[0].read_text())]
        if logs
        else []
    )


def end_mark(launch: Path, job: str) -> dict[str, Any]:
    path = launch / "marks" / f"{job}.0.ended.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def saved_step(run: Path) -> tuple[int, int]:
    """Return the step and the consumed samples of the checkpoint from which NeMo continues."""
    match = _SAVED.search(newest_checkpoint(run))
    assert match
    return int(match.group(1)), int(match.group(2))


@pytest.fixture
def slurm(sandbox: Sandbox) -> Iterator[Any]:
    """Return a function that runs one of Slurm's commands."""

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
        wait_until(lambda: end_mark(launch, first), seconds=400)
        step, samples = saved_step(run)
        assert step > logged_steps(launch, first)[0][0]
        assert samples == 2 * step

        # A job killed while it writes leaves the first; a job killed before it removes leaves the second.
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
        wait_until(lambda: len(logged_steps(launch, second)) >= 3)
        slurm("scancel", "--signal=USR1", "--batch", second)
        wait_until(lambda: end_mark(launch, second))
    finally:
        subprocess.run([SLIPWAY, "cancel", run], env=sandbox.environment(), check=False, timeout=60)

    first_step = logged_steps(launch, second)[0]
    assert first_step == (step, samples + 2), (
        "the first step of the second link follows the last that was saved"
    )
    assert all(
        samples == 2 * (step + 1) for job in (first, second) for step, samples in logged_steps(launch, job)
    )
    assert saved_step(run)[0] > step
    for job, link in ((first, 1), (second, 2)):
        end = end_mark(launch, job)
        assert (end["exit_code"], end["verdict"]) == (75, "continue"), end
        assert json.loads((launch / "marks" / f"{job}.0.started.json").read_text())["link"] == link
    assert json.loads((launch / "marks" / f"{second}.0.started.json").read_text())["checkpoint"] == step
    aside = run / "checkpoints-set-aside" / f"{second}.0"
    assert {path.name for path in aside.iterdir()} == {half.name, mark.name, surplus.name}
    assert not list(run.rglob("hpc_ckpt*"))


def test_chain_continues_from_newest_whole_checkpoint(train: Train) -> None:
    """NeMo alone refuses to start if the job was killed while it wrote the copy, `-last`."""
    small = [*GPT, "training.trainer.devices=1"]
    run = train(*small, "training.trainer.max_steps=4")
    (last,) = (run / "checkpoints").glob("*-last")
    last.with_name(f"{last.name}-unfinished").touch()

    train(*small, "training.trainer.max_steps=6")
    assert progress(run / "launches" / "2")[0] == (4, 10), "the four steps are not made again"
    assert newest_checkpoint(run) == "megatron_gpt--step=6-consumed_samples=12.0-last"
    (aside,) = (run / "checkpoints-set-aside").iterdir()
    # Also the one that was made of the newest, which NeMo does not take for its own.
    names = {last.name, f"{last.name}-unfinished", f"{last.name}.again"}
    assert {path.name for path in aside.iterdir()} == names


def test_nemo_gets_its_number_of_nodes_from_a_range(train: Train) -> None:
    """NeMo gets the number of nodes on its command line: one, then as many as there are."""
    small = [*GPT, "training.trainer.devices=2", "training.model.global_batch_size=4"]
    run = train(*small, "training.trainer.max_steps=2")
    assert train(*small, "training.trainer.max_steps=4", "resilience.nodes={min: 1, max: 2}") == run
    (started,) = (run / "launches" / "2" / "marks").glob("*.started.json")
    assert len(json.loads(started.read_text())["nodes"].split(",")) == 2
    assert progress(run / "launches" / "2")[-1] == (3, 16)
    assert newest_checkpoint(run) == "megatron_gpt--step=4-consumed_samples=16.0-last"


def test_chain_continues_after_going_back(
    train: Train, submit: Submit, sandbox: Sandbox, slurm: Any, nemo: Nemo, request: pytest.FixtureRequest
) -> None:
    """Links that save lower steps than the first launch left do not fail.

    With ``--write-golden`` the directory of its checkpoints is recorded, for the chains of every `make test`.
    """
    steps = ["training.trainer.max_steps=400", "training.trainer.val_check_interval=50"]
    small = [*GPT, "training.trainer.devices=1", *steps]
    run = train(*small)
    checkpoints = run / "checkpoints"
    moments = {"launch 1, 400 steps": entries(checkpoints)}
    (early,) = checkpoints.glob("*-step=100-*")
    (last,) = checkpoints.glob("*-last")
    last.rename(run / last.name)
    # As documented, the copy gets the current time: the tidying would take a higher step for newer.
    subprocess.run(["cp", "-r", early, f"{early}-last"], check=True)
    moments["back to step 100"] = entries(checkpoints)

    submit(*small, "resilience.links=4", "resilience.max_failures=1")
    launch = run / "launches" / "2"
    saves = []
    try:
        # A signal has each link save and end: after few steps, and after a save of NeMo's own.
        for number, until in enumerate((103, 160, 205), start=1):
            wait_until(lambda number=number: len(link_jobs(launch)) > number)
            job, successor = link_jobs(launch)[number - 1 : number + 1]
            slurm("scontrol", "hold", successor)
            wait_until(
                lambda job=job, until=until: (
                    [step for step, _ in logged_steps(launch, job) if step >= until] or end_mark(launch, job)
                )
            )
            slurm("scancel", "--signal=USR1", "--batch", job)
            wait_until(lambda job=job: end_mark(launch, job).get("verdict"))
            end = end_mark(launch, job)
            assert (end["verdict"], end["failures"], end["exit_code"]) == ("continue", 0, 75), end
            # NeMo leaves the `-last` that it began with too; the next link sets that aside.
            newest = max(checkpoints.glob("*-last"), key=lambda path: path.stat().st_mtime_ns)
            saves.append(step_of(str(newest)))
            moments[f"launch 2, link {number}, ended at step {saves[-1]}"] = entries(checkpoints)
            slurm("scontrol", "release", successor)
    finally:
        subprocess.run([SLIPWAY, "cancel", run], env=sandbox.environment(), check=False, timeout=60)
    assert 100 < saves[0] < saves[1] < saves[2] < 400
    assert list(checkpoints.glob("*-step=400-*")), "the highest step is not that of the newest checkpoint"
    if request.config.getoption("--write-golden"):
        write_recording("nemo", nemo.versions(), " ".join(small), moments)
