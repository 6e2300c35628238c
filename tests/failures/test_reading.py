"""The reason for an attempt's end, from its marks or, without a verdict there, from its logs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.monitor.history import Diagnosis, diagnose
from slipway.common.node.evidence import quote_error
from slipway.common.node.marks import JobAttempt
from tests.failures.failure_samples import RECORDED

JUDGED_ATTEMPT = JobAttempt(
    "17", 0, "n1,n2", 1000.0, 1010.0, 1, rank=1, host="n2", rule="gpu_memory", verdict="exclude",
    excluded="n2", why="the memory of a GPU has an error that cannot be corrected (ECC)",
)  # fmt: skip


def leave_report(failures: Path, rank: int, time: float, error: str) -> None:
    failures.mkdir(exist_ok=True)
    report = {"time": time, "rank": rank, "host": f"n{rank + 1}", "error": error, "log": None}
    (failures / f"globalrank-{rank}.json").write_text(json.dumps(report) + "\n")


def test_verdict_of_the_job_is_reported_with_advice(tmp_path: Path) -> None:
    diagnosis = diagnose(JUDGED_ATTEMPT, failures=tmp_path / "failures")
    assert diagnosis is not None
    assert diagnosis.lines() == [
        "the memory of a GPU has an error that cannot be corrected (ECC) (at fault: n2)",
        "rank 1 on n2 failed first",
        "tell the administrators: the GPU has to be reset, and exchanged if it happens again",
    ]
    assert diagnosis.to_json() == {
        "rule": "gpu_memory",
        "verdict": "exclude",
        "why": "the memory of a GPU has an error that cannot be corrected (ECC)",
        "nodes_at_fault": ["n2"],
        "first_failure": "rank 1 on n2 failed first",
        "advice": "tell the administrators: the GPU has to be reset, and exchanged if it happens again",
    }


def test_reason_is_that_of_the_first_failed_rank(tmp_path: Path) -> None:
    leave_report(tmp_path, 0, 1005.0, "RuntimeError: Connection reset by peer")
    leave_report(tmp_path, 3, 1004.0, "AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    diagnosis = diagnose(JUDGED_ATTEMPT, failures=tmp_path)
    assert diagnosis is not None
    assert diagnosis.first == (
        "rank 3 on n4 failed first: AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    )


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "error: no key 'content'\n  it has id, text\nsrun: error: n1: task 0: Exited with code 2",
            "no key 'content'",
        ),
        (
            "Traceback\n  File x\nValueError: bad é\nJob 7: the tasks ended with exit code 1",
            "ValueError: bad é",
        ),
        ("3: RuntimeError: late\n3: UserWarning: an error that is none", "RuntimeError: late"),
        ("[rank3]: KeyError: 'x'", "KeyError: 'x'"),
        ("/r/launches/1/task.sh: line 14: /x: No such file or directory", "/x: No such file or directory"),
        (
            "srun: error: n1: task 0: Exited\nslurmstepd: error: execve(): 0xfe: No such file or directory",
            "srun could not start 0xfe on n1: No such file or directory",
        ),
        ("error: of the attempt before\nJob 7: run a, launch 1, on n1\nstep 1/2 | loss 3", None),
        ("step 1/2 | loss 3", None),
        ('{"time": 1.0, "rank": 0, "error": "OSError: a\\nb"}\nValueError: later', "OSError: a"),
        ('{"time": 1.0, "rank": 0, "error": "cut', None),
        (
            f'{{"time": 1, "rank": 0, "error": {"[" * 2000}\nValueError: {"x" * 5000}',
            f"ValueError: {'x' * 188}",
        ),
    ],
)
def test_the_reason_is_what_the_program_said_last(log: str, words: str | None) -> None:
    assert quote_error(log.encode().decode("latin-1").split("\n"), "n1") == words  # as a log is read


@pytest.mark.parametrize("time", [999.0, 1012.0])
def test_reports_of_ranks_of_another_link_are_left_out(time: float, tmp_path: Path) -> None:
    leave_report(tmp_path, 0, time, "RuntimeError: another link's")
    diagnosis = diagnose(JUDGED_ATTEMPT, failures=tmp_path)
    assert diagnosis is not None
    assert diagnosis.first == "rank 1 on n2 failed first"


def test_a_rank_is_not_blamed_for_what_slurm_did(tmp_path: Path) -> None:
    leave_report(tmp_path, 0, 1005.0, "RuntimeError: Connection reset by peer")
    preempted = JUDGED_ATTEMPT._replace(
        rule="preempted", verdict="continue", excluded=None, why="another job took its nodes"
    )
    diagnosis = diagnose(preempted, failures=tmp_path)
    assert diagnosis is not None
    assert diagnosis.lines() == ["another job took its nodes"]


def test_stopped_chain_has_the_reason_of_its_job() -> None:
    why = "3 links in a row ended without a new checkpoint: its tasks failed"
    diagnosis = diagnose(JUDGED_ATTEMPT._replace(rule="failed", verdict="stop", excluded=None, why=why))
    assert diagnosis is not None
    assert (diagnosis.verdict, diagnosis.why, diagnosis.advice) == (
        "stop",
        why,
        "the end of the log says why: `slipway logs RUN`",
    )


def test_unknown_rule_is_reported_without_advice() -> None:
    diagnosis = diagnose(
        JUDGED_ATTEMPT._replace(rule="of_the_future", verdict="of_the_future", why="it fell")
    )
    assert diagnosis == Diagnosis(
        "of_the_future", "continue", "it fell", ("n2",), "rank 1 on n2 failed first"
    )


def test_attempt_without_a_verdict_is_judged_by_its_log(tmp_path: Path) -> None:
    attempt = JobAttempt("17", 0, "n3,n4", 1000.0)
    log = RECORDED / "node_failed.log"
    assert diagnose(attempt, [log]) is None  # it may live
    diagnosis = diagnose(attempt, [log, tmp_path / "none.err"], tmp_path, state="NODE_FAIL")
    assert diagnosis is not None
    assert (diagnosis.rule, diagnosis.verdict, diagnosis.nodes) == ("node_failed", "exclude", ("n4",))
    assert diagnosis.lines() == ["a node of it failed (at fault: n4)"]


@pytest.mark.parametrize(("save", "rule"), [("USR1", "diverged"), ("TERM", "failed"), (None, "failed")])
def test_exit_code_3_means_divergence_for_our_trainer_alone(save: str | None, rule: str) -> None:
    diagnosis = diagnose(JobAttempt("17", 0, "n1", 1000.0, 1010.0, 3), state="FAILED", save=save)
    assert diagnosis is not None
    assert diagnosis.rule == rule


def test_unreadable_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "globalrank-0.json").write_text('{"time": 1005.0, "rank"')
    (tmp_path / "globalrank-1.json").write_text('["time"]\n')
    (tmp_path / "globalrank-2.json").mkdir()
    log = tmp_path / "job.out"
    log.write_bytes(b"\xff\xfe\0 \x80 no text at all\n" + os.urandom(2000))
    diagnosis = diagnose(JobAttempt("17", 0, "n1", 1000.0, 1010.0, 1), [log, tmp_path], tmp_path)
    assert diagnosis is not None
    assert (diagnosis.rule, diagnosis.first) == ("failed", None)
