"""Outcomes for jobs whose scheduler refuses, does not answer, or contradicts itself."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from control_project import write_launch

from launcher.cli.app import main
from launcher.errors import UserError
from launcher.jobs import acting
from launcher.runs.known_trees import remember_trees
from launcher.schedulers.base import ChainJobs, JobRef, JobStatus, NoAnswer
from launcher.slurm.states import Action, State
from slipway.supervisor.dependent_stages import NAME, Stage, Stages, to_json

Capsys = pytest.CaptureFixture[str]

RUNNING = JobStatus(State.RUNNING, nodes="n[1-2]", elapsed="00:10:00")
PENDING = JobStatus(State.PENDING, "Priority: other jobs come first")


@dataclass
class FakeScheduler:
    """A scheduler that reports the statuses of each job, one after the other; the last one stays."""

    table: dict[str, list[JobStatus]] = field(default_factory=dict)
    errors: dict[str, UserError] = field(default_factory=dict)
    acts: list[tuple[str, str]] = field(default_factory=list)
    silent: str | None = None

    def statuses(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        if self.silent:
            raise NoAnswer(self.silent)
        rows = [self.table[ref.job_id] for ref in refs]
        return [row.pop(0) if len(row) > 1 else row[0] for row in rows]

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        self.acts += [(action.name.lower(), job_id) for job_id in job_ids]
        return {job_id: self.errors[job_id] for job_id in job_ids if job_id in self.errors}


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeScheduler:
    fake = FakeScheduler()
    monkeypatch.setattr("launcher.schedulers.scheduler_for", lambda *_: fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return fake


def test_waiting_jobs_are_cancelled_first_the_newest_before_the_others(
    scheduler: FakeScheduler, capsys: Capsys
) -> None:
    for number, status in enumerate((RUNNING, PENDING, PENDING), 1):
        write_launch("a", number)
        scheduler.table[str(number)] = [status]
    write_launch("b", 4)
    scheduler.table["4"] = [PENDING]
    assert main(["cancel", "a", "b"]) == 0
    assert [job for _, job in scheduler.acts] == ["4", "3", "2", "1"]


def test_a_run_of_a_directory_that_was_seen_earlier_is_named(
    scheduler: FakeScheduler, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_CACHE_DIR", str(tmp_path / "seen"))
    write_launch("a", 1)
    scheduler.table["1"] = [RUNNING]
    remember_trees([tmp_path / "results"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["cancel", "a"]) == 0
    assert f"a is not in results: it is {tmp_path}/results/a" in capsys.readouterr().err


def test_no_failure_stops_the_rest(scheduler: FakeScheduler, capsys: Capsys) -> None:
    for number, name in enumerate("abc", 1):
        write_launch(name, number)
        scheduler.table[str(number)] = [RUNNING]
    scheduler.errors["3"] = UserError("job 3 was not cancelled: Access/permission denied", hint="it is u's")
    scheduler.errors["2"] = NoAnswer("Slurm did not answer: timed out")
    assert main(["cancel", "c", "b", "a"]) == 1, "a refusal counts more than silence"
    output = capsys.readouterr()
    assert [job for _, job in scheduler.acts] == ["3", "2", "1"]
    assert output.out == "cancelled job 1 of a (launch 1): it was RUNNING on n[1-2] for 00:10:00\n"
    assert output.err.splitlines() == [
        "slipway: job 3 of c (launch 3) was not cancelled: Access/permission denied",
        "  it is u's",
        "slipway: job 2 of b (launch 2): whether it could be cancelled is not known",
        "  Slurm did not answer: timed out",
    ]
    assert main(["cancel", "b", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)[0]["done"] == "unknown"


def test_a_scheduler_that_does_not_answer_is_reported(scheduler: FakeScheduler, capsys: Capsys) -> None:
    write_launch("a", 1)
    scheduler.silent = "squeue failed: Unable to contact slurm controller"
    for verb in ("cancel", "hold", "release"):
        assert main([verb, "a"]) == 3
        assert "Unable to contact slurm controller" in capsys.readouterr().err
    assert main(["attach", "a", "--print"]) == 3
    assert not scheduler.acts


def test_a_job_that_moved_on_before_the_action_is_reported(scheduler: FakeScheduler, capsys: Capsys) -> None:
    write_launch("a", 1)
    scheduler.errors["1"] = UserError("job 1 has begun")
    scheduler.table["1"] = [RUNNING, JobStatus(State.COMPLETED, elapsed="00:10:01")]
    assert main(["cancel", "a"]) == 0
    assert "it is over: COMPLETED after 00:10:01" in capsys.readouterr().out
    scheduler.table["1"] = [PENDING, RUNNING]
    assert main(["hold", "a"]) == 2
    assert "cannot be held: it is RUNNING" in capsys.readouterr().err


def test_waiting_ends_if_the_scheduler_is_silent(
    scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_launch("a", 1)
    monkeypatch.setattr(acting, "_PATIENCE_SECONDS", 0.2)
    scheduler.table["1"] = [RUNNING]
    monkeypatch.setattr(FakeScheduler, "act", lambda self, *_: setattr(self, "silent", "gone") or {})
    assert main(["cancel", "a", "--wait"]) == 3
    assert "whether it has ended is not known" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "acts"), [("y\n", ["1"]), ("\n", []), ("", [])])
def test_interactive_cancel_asks_first(
    scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, answer: str, acts: list[str]
) -> None:
    write_launch("a", 1)
    scheduler.table["1"] = [RUNNING]
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["cancel", "-i", "a"]) == 0
    assert "cancel job 1 of a (launch 1), RUNNING on n[1-2] for 00:10:00? [y/N]" in capsys.readouterr().err
    assert [job for _, job in scheduler.acts] == acts


@pytest.mark.parametrize("words", [["cancel", "a"], ["cancel", "-i", "a"]])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_stage_that_waits_for_a_chain_is_cancelled_with_it(
    scheduler: FakeScheduler,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    is_repeated: bool,
) -> None:
    """A stage that reads a checkpoint just now is cancelled, too: its first job waits for the chain."""
    chain, stage = write_launch("a", 1), write_launch("after", 2)
    (chain / NAME).write_text(to_json(Stages(after=(Stage("after", str(stage), "tag"),))))
    (stage / NAME).write_text(to_json(Stages(before=Stage("a", str(chain), "a-1"))))
    chain_status = replace(RUNNING, chain=ChainJobs(1, 1, {"1": RUNNING}, [1]))
    jobs = {"2": PENDING, "3": RUNNING}
    stage_status = replace(RUNNING, chain=ChainJobs(2, 2, jobs, (1, 2), is_repeated=True))
    scheduler.table = {"1": [chain_status], "2": [stage_status if is_repeated else PENDING]}
    terminal = io.StringIO("y\ny\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(words) == 0
    acts = [job for _, job in scheduler.acts]
    assert sorted(acts) == (["1", "2", "3"] if is_repeated else ["1", "2"])
