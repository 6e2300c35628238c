"""The reason for an attempt's end, from its marks or, without a verdict there, from its logs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.monitor.history import Diagnosis, diagnose
from supervisor.marks import JobAttempt
from tests.failures.failure_samples import RECORDED

JUDGED = JobAttempt(
    "17", 0, "n1,n2", 1000.0, 1010.0, 1, rank=1, host="n2", rule="gpu_memory", verdict="exclude",
    excluded="n2", why="the memory of a GPU has an error that cannot be corrected (ECC)",
)  # fmt: skip


def leave(failures: Path, rank: int, time: float, error: str) -> None:
    failures.mkdir(exist_ok=True)
    told = {"time": time, "rank": rank, "host": f"n{rank + 1}", "error": error, "log": None}
    (failures / f"globalrank-{rank}.json").write_text(json.dumps(told) + "\n")


def test_verdict_of_the_job_is_reported_with_advice(tmp_path: Path) -> None:
    found = diagnose(JUDGED, failures=tmp_path / "failures")
    assert found is not None
    assert found.lines() == [
        "the memory of a GPU has an error that cannot be corrected (ECC) (at fault: n2)",
        "rank 1 on n2 failed first",
        "tell the administrators: the GPU has to be reset, and exchanged if it happens again",
    ]
    assert found.to_json() == {
        "rule": "gpu_memory",
        "verdict": "exclude",
        "why": "the memory of a GPU has an error that cannot be corrected (ECC)",
        "nodes_at_fault": ["n2"],
        "first_failure": "rank 1 on n2 failed first",
        "advice": "tell the administrators: the GPU has to be reset, and exchanged if it happens again",
    }


def test_the_first_rank_tells_why_itself(tmp_path: Path) -> None:
    leave(tmp_path, 0, 1005.0, "RuntimeError: Connection reset by peer")
    leave(tmp_path, 3, 1004.0, "AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    found = diagnose(JUDGED, failures=tmp_path)
    assert found is not None
    assert found.first == (
        "rank 3 on n4 failed first: AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    )


@pytest.mark.parametrize("time", [999.0, 1012.0])
def test_reports_of_ranks_of_another_link_are_left_out(time: float, tmp_path: Path) -> None:
    leave(tmp_path, 0, time, "RuntimeError: another link's")
    found = diagnose(JUDGED, failures=tmp_path)
    assert found is not None
    assert found.first == "rank 1 on n2 failed first"


def test_a_rank_is_not_blamed_for_what_slurm_did(tmp_path: Path) -> None:
    leave(tmp_path, 0, 1005.0, "RuntimeError: Connection reset by peer")
    preempted = JUDGED._replace(
        rule="preempted", verdict="continue", excluded=None, why="another job took its nodes"
    )
    found = diagnose(preempted, failures=tmp_path)
    assert found is not None
    assert found.lines() == ["another job took its nodes"]


def test_a_chain_that_stopped_says_so_in_its_jobs_words() -> None:
    why = "3 links in a row ended without a new checkpoint: its tasks failed"
    found = diagnose(JUDGED._replace(rule="failed", verdict="stop", excluded=None, why=why))
    assert found is not None
    assert (found.verdict, found.why, found.advice) == (
        "stop",
        why,
        "the end of the log says why: `slipway logs RUN`",
    )


def test_a_rule_of_another_slipway_is_told_without_advice() -> None:
    found = diagnose(JUDGED._replace(rule="of_the_future", verdict="of_the_future", why="it fell"))
    assert found == Diagnosis("of_the_future", "continue", "it fell", ("n2",), "rank 1 on n2 failed first")


def test_a_life_that_did_not_judge_itself_is_judged_by_its_log(tmp_path: Path) -> None:
    attempt = JobAttempt("17", 0, "n3,n4", 1000.0)
    log = RECORDED / "node_failed.log"
    assert diagnose(attempt, [log]) is None  # it may live
    found = diagnose(attempt, [log, tmp_path / "none.err"], tmp_path, state="NODE_FAIL")
    assert found is not None
    assert (found.rule, found.verdict, found.nodes) == ("node_failed", "exclude", ("n4",))
    assert found.lines() == ["a node of it failed (at fault: n4)"]


@pytest.mark.parametrize(("save", "rule"), [("USR1", "diverged"), ("TERM", "failed"), (None, "failed")])
def test_exit_code_3_is_our_trainers_word_alone(save: str | None, rule: str) -> None:
    found = diagnose(JobAttempt("17", 0, "n1", 1000.0, 1010.0, 3), state="FAILED", save=save)
    assert found is not None
    assert found.rule == rule


def test_unreadable_files_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "globalrank-0.json").write_text('{"time": 1005.0, "rank"')
    (tmp_path / "globalrank-1.json").write_text('["time"]\n')
    (tmp_path / "globalrank-2.json").mkdir()
    log = tmp_path / "job.out"
    log.write_bytes(b"\xff\xfe\0 \x80 no text at all\n" + os.urandom(2000))
    found = diagnose(JobAttempt("17", 0, "n1", 1000.0, 1010.0, 1), [log, tmp_path], tmp_path)
    assert found is not None
    assert (found.rule, found.first) == ("failed", None)
