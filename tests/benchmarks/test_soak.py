"""The soak: 25 faults, each followed by the oracle's verdict, and the violations that the oracle sees."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak import oracle
from benchmarks.soak.faults import FAULTS
from benchmarks.soak.trial import STEPS, Trial
from slipway.watch.alerts import OPENED, RESOLVED, Alert, Message
from tests.sandbox.fixtures import skip_without_slurm

COUNT = 25


@pytest.mark.slurm
@pytest.mark.trainer
@pytest.mark.timeout(1800)
def test_runs_survive_each_kind_of_fault(tmp_path: Path) -> None:
    skip_without_slurm()
    record = tmp_path / "soak.jsonl"
    command = [sys.executable, "-m", "benchmarks.soak", "--faults", str(COUNT), "--record", str(record)]
    result = subprocess.run(
        [*command, "--lanes", "1"], cwd=soak.ROOT, capture_output=True, text=True, timeout=1700
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert {row["seed"] for row in rows} == set(range(COUNT))
    assert {row["fault"] for row in rows} == set(FAULTS)
    if skipped := [f"{row['fault']}: {row['skipped']}" for row in rows if "skipped" in row]:
        pytest.skip(f"all others held; skipped: {'; '.join(skipped)}")


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """Write by hand the files of a run without a cluster, and the notes about its ranks."""
    cluster: Any = SimpleNamespace(directory=tmp_path / "c0", results=tmp_path / "results", size=3)
    cluster.directory.mkdir()
    return Trial(7, "rank_killed", "1x1", cluster, ["n1"], random.Random(7))


def _write_events(trial: Trial, *events: tuple[str, int], loss: float = 2.0) -> oracle.Losses:
    """Write a launch's events as the trainer does; return the numbers of an undisturbed training."""
    path = trial.run_dir / "launches" / "1" / "results" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    numbers = {"loss": loss, "grad_norm": 1.0, "lr": 0.1, "consumed_samples": 4}
    lines = [{"kind": kind, "step": step, **numbers} for kind, step in events]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return dict.fromkeys(range(1, STEPS + 1), (2.0, 1.0, 0.1, 4))


def _steps(first: int, last: int) -> list[tuple[str, int]]:
    return [("train", step) for step in range(first, last + 1)]


def test_oracle_accepts_link_that_begins_at_newest_checkpoint(trial: Trial) -> None:
    events = [("start", 0), *_steps(1, 5), ("checkpoint", 3), ("start", 3), *_steps(4, STEPS)]
    undisturbed = _write_events(trial, *events)
    assert oracle.report_violations(trial, undisturbed) == []


def test_oracle_sees_step_with_another_loss(trial: Trial) -> None:
    undisturbed = _write_events(trial, ("start", 0), *_steps(1, STEPS), loss=2.0000000000000004)
    assert len(oracle.report_violations(trial, undisturbed)) == STEPS


def test_oracle_sees_missing_step(trial: Trial) -> None:
    undisturbed = _write_events(trial, ("start", 0), *_steps(1, STEPS - 1))
    assert oracle.report_violations(trial, undisturbed) == [f"steps [{STEPS}] were never told of"]


@pytest.mark.parametrize("torn", [set(), {6}])
def test_oracle_sees_lost_checkpoint_unless_it_was_torn(trial: Trial, torn: set[int]) -> None:
    checkpoints = [("checkpoint", 3), ("checkpoint", 6)]
    undisturbed = _write_events(
        trial, ("start", 0), *_steps(1, 7), *checkpoints, ("start", 3), *_steps(4, STEPS)
    )
    trial.torn = torn
    violations = ["a link began at step 3: the checkpoint of step 6 was whole"]
    assert oracle.report_violations(trial, undisturbed) == ([] if torn else violations)


@pytest.mark.parametrize("are_apart", [True, False])
def test_oracle_sees_trainings_side_by_side(trial: Trial, are_apart: bool) -> None:
    undisturbed = _write_events(trial, ("start", 0), *_steps(1, STEPS))
    events = [("begin", 1, "17"), ("end", 1, "17"), ("begin", 2, "18"), ("end", 2, "18")]
    if not are_apart:
        events[1:3] = events[2], events[1]
    control = str(trial.cluster.directory / "control" / trial.run)
    names = ("event", "pid", "job")
    lines = [dict(zip(names, event, strict=True)) | {"rank": "0", "control": control} for event in events]
    journal = trial.cluster.directory.parent / "ranks.jsonl"
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert oracle.overlapping_trainings(trial) == ([] if are_apart else ["job 18 trains beside job 17"])
    assert oracle.report_violations(trial, undisturbed) == []


def _alert(detector: str, *events: str) -> Alert:
    messages = [Message(f"{detector}-1", event, 1, 10.0, detector, "why") for event in events]
    return Alert(messages[0], messages[-1])


@pytest.mark.parametrize(
    ("alerts", "right", "violations"),
    [
        ([], ((),), []),
        ([("no_step", OPENED, RESOLVED)], (("no_step",),), []),
        ([("job", OPENED, RESOLVED)], (("ended",), ("job",)), []),
        ([], (("ended",), ("job",)), ["alerts: none; right: ended or job"]),
        ([("no_step", OPENED, RESOLVED)], ((),), ["alerts: no_step-1: why; right: none"]),
        ([("no_step", OPENED)], (("no_step",),), ["no_step-1 is open after the end"]),
        (
            [("job", OPENED, RESOLVED), ("ended", OPENED, RESOLVED)],
            (("ended",), ("job",)),
            ["alerts: job-1: why; ended-1: why; right: ended or job"],
        ),
    ],
)
def test_oracle_wants_the_right_alerts_and_no_other(
    alerts: list[tuple[str, ...]], right: tuple[tuple[str, ...], ...], violations: list[str]
) -> None:
    assert oracle.wrong_alerts([_alert(*alert) for alert in alerts], right) == violations


def test_a_chain_that_stopped_needs_an_alert_of_its_own(trial: Trial) -> None:
    fault = FAULTS["disk_full"]
    trial.right_alerts = (("disk",),)
    assert soak.right_alerts(trial, fault) == (("disk",),)
    trial.has_stopped = True
    assert ("disk", "job") in soak.right_alerts(trial, fault)
    assert ("disk",) not in soak.right_alerts(trial, fault)


def test_each_fault_comes_within_25_seeds_and_is_drawn_from_its_seed_alone() -> None:
    assert {soak.kind_of(seed) for seed in range(COUNT)} == set(FAULTS)
    chances = [soak.chance_of(5) for _ in range(2)]
    assert len({(chance.random(), shape) for chance, shape in chances}) == 1


def test_record_and_table_leave_out_a_cut_off_line(tmp_path: Path) -> None:
    row = {"seed": 13, "fault": "rank_killed", "violations": ["x"], "links": 2, "launches": 1, "seconds": 6.0}
    row["alerts"] = [{"detector": "ended"}]
    path = tmp_path / "soak.jsonl"
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row)[:-9]}")
    rows = soak.read_record(path)
    assert rows == [row]
    assert (
        soak.table(rows)
        .splitlines()[-1]
        .startswith("| rank killed | Kill a rank with SIGKILL | 1 | 1 | 1 ended | 2.0 |")
    )
    assert soak.table(rows).endswith("| 13 |")
