"""The script of a chain decides after each link whether the chain goes on."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from slipway.common.node.marks import chain_end, note_cancelled, read_attempts
from tests.launch_files import write_files
from tests.resilience.scripted_chain import COMMANDS, TAG, write_chain


@pytest.mark.parametrize(
    ("code", "verdict", "ends"),
    [
        (0, "done", True),
        (75, "continue", False),
        (1, "continue", False),
        (2, "stop", True),
        (3, "stop", True),
    ],
)
def test_exit_code_decides_whether_chain_goes_on(tmp_path: Path, code: int, verdict: str, ends: bool) -> None:
    chain = write_chain(tmp_path)
    chain.tasks(f"exit {code}")
    assert chain.run()[0] == code
    assert chain.end_mark()["verdict"] == verdict
    assert (chain_end(chain.directory) is not None) == ends
    assert chain.calls_of("scancel") == (["scancel 18"] if ends else [])
    (attempt,) = read_attempts(chain.directory)
    assert (attempt.exit_code, attempt.link, attempt.verdict) == (code, 1, verdict)
    assert attempt.why


def test_exit_code_3_of_other_stage_is_no_divergence(tmp_path: Path) -> None:
    stage = ["stages=[data_preparation]", "data_preparation.inputs=[/x]"]
    chain = write_chain(tmp_path, *stage, "resilience.links=1")
    chain.tasks("exit 3")
    chain.run()
    assert chain.end_mark()["rule"] == "failed"


def test_links_without_new_checkpoint_end_chain(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, "resilience.links=9", "resilience.max_failures=3")
    chain.tasks("exit 1")
    failures = []
    for link in (1, 2, 3):
        chain.run(*([TAG] if link == 1 else [str(link), TAG]), job=str(16 + link), ANSWER=str(17 + link))
        failures.append(chain.end_mark(str(16 + link))["failures"])
    assert failures == [0, 1, 2]
    assert chain.end_mark("19")["verdict"] == "stop"
    end = chain_end(chain.directory)
    assert end is not None and end.by == "job 19"
    assert end.why.startswith("3 links in a row ended without a new checkpoint: ")
    assert chain.calls_of("scancel") == ["scancel 20"]


def test_new_checkpoint_resets_failures(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, "resilience.links=9", "resilience.max_failures=2")
    chain.tasks("exit 1")
    chain.run()
    into = chain.plan.paths.checkpoints / "step=20"
    chain.tasks(f"""mkdir -p {into}; echo '{{"step": 20, "serial": 1}}' >{into}/complete.json; exit 1""")
    chain.run("2", TAG, job="18", ANSWER="19")
    assert chain.end_mark("18")["verdict"] == "continue"
    chain.tasks("exit 75")
    chain.run("3", TAG, job="19", ANSWER="20")
    started = json.loads((chain.plan.paths.marks / "19.0.started.json").read_text())
    assert (started["failures"], started["checkpoint"], started["link"]) == (0, 20, 3)
    # A job that saves nothing new before it leaves gets nowhere either.
    chain.run("4", TAG, job="20", ANSWER="21")
    assert chain_end(chain.directory) is not None


def test_preempted_link_is_no_failure(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, "resilience.links=9", "resilience.max_failures=1")
    chain.tasks("exit 143")
    chain.run(STATE="JobState=RUNNING Reason=None PreemptTime=2026-01-01T00:00:00")
    assert (chain.end_mark()["state"], chain.end_mark()["verdict"]) == ("PREEMPTED", "continue")
    chain.tasks("exit 1")
    chain.run("2", TAG, job="18")
    assert (chain.end_mark("18")["failures"], chain.end_mark("18")["verdict"]) == (0, "stop")


@pytest.mark.parametrize("by_slipway", [True, False])
def test_cancelled_link_ends_chain(tmp_path: Path, by_slipway: bool) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 143")
    if by_slipway:
        (chain.plan.paths.marks).mkdir()
        note_cancelled(chain.directory, "17", "me")
        chain.run()
    else:
        chain.run(STATE="JobState=COMPLETING Reason=None PreemptTime=None")
    assert chain.end_mark()["verdict"] == "stop"
    assert chain_end(chain.directory) is not None


def test_next_link_sees_that_link_before_was_cancelled(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 143")
    chain.run(job="16", ANSWER="17")
    assert chain_end(chain.directory) is None
    code, output = chain.run("2", TAG, BEFORE="CANCELLED")
    assert (code, chain.calls_of("srun")) == (1, []), output
    end = chain_end(chain.directory)
    assert end is not None and end.why == "job 16: it was cancelled"


def test_link_judges_link_before_whose_node_died(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, "resilience.max_failures=2", "resilience.links=9")
    chain.tasks("exit 75")
    chain.run(job="16", ANSWER="17")
    (chain.plan.paths.marks / "16.0.ended.json").unlink()
    chain.run("2", TAG, BEFORE="NODE_FAIL", ANSWER="18")
    end_mark = chain.end_mark("16")
    assert (end_mark["state"], end_mark["judged_by"], end_mark["link"]) == ("NODE_FAIL", "job 17", 1)
    assert "exit_code" not in end_mark and end_mark["why"]
    assert chain.end_mark("17")["failures"] == 1
    assert chain.end_mark("17")["verdict"] == "stop"


@pytest.mark.parametrize(
    "progress",
    [
        "step   26/3000 | loss 6.2637 | lr 5.0e-03\nstep    7/3000 | loss 6.2981 | lr 5.0e-03",
        "0: step    7/3000 | loss 6.2981 | lr 5.0e-03",
        " 40%|### | 7/9 [00:01<00:02, x]",
        " iteration        7/     500 | consumed samples:          56 |",
    ],
)
def test_first_failed_rank_and_last_step_are_recorded(tmp_path: Path, progress: str) -> None:
    chain = write_chain(tmp_path)
    lines = [progress, "srun: error: n2: tasks 3: Exited with exit code 1"]
    chain.tasks(f"printf '%s\\n' {shlex.join(lines)}; exit 1")
    chain.run()
    end_mark = chain.end_mark()
    assert (end_mark["rank"], end_mark["host"], end_mark["step"]) == (3, "n2", 7)


@pytest.mark.parametrize(
    ("line", "signal", "expected"),
    [
        ("`Trainer.fit` stopped: `max_steps=5` reached.", "", 0),
        ("`Trainer.fit` stopped: `max_steps=5` reached.", "USR1", 0),
        ("Time limit reached. Elapsed time is 0:00:01. Signaling Trainer to stop.", "", 75),
        ("saving", "USR1", 75),
        ("saving", "", 0),
    ],
)
def test_nemo_that_saved_and_left_is_not_done(tmp_path: Path, line: str, signal: str, expected: int) -> None:
    chain = write_chain(tmp_path)
    payload = chain.plan.job.payload._replace(save_signal="TERM")
    plan = dataclasses.replace(
        chain.plan, job=dataclasses.replace(chain.plan.job, payload=payload, engine="nemo")
    )
    write_files(plan)
    tell = f"kill -s {signal} $(ps -o ppid= -p $PPID); sleep 1; " if signal else ""
    chain.tasks(f"{tell}echo {shlex.quote(line)}; exit 0")
    chain.replace_command("srun", "trap '' USR1; " + COMMANDS["srun"])
    code, output = chain.run()
    assert code == expected, output
    assert chain.end_mark()["verdict"] == ("continue" if expected else "done")


def test_training_that_went_back_goes_on_link_by_link(tmp_path: Path) -> None:
    """After the way back from step 1000 to 200, links that save 400, 600 and 800 get on; others do not."""
    chain = write_chain(tmp_path, "resilience.links=20", "resilience.max_failures=2")
    for serial, step in enumerate((200, 1000), start=1):
        chain.checkpoint(step, serial)
    steps = iter((400, 600, 800, 1000))
    for link, step in enumerate(steps, start=1):
        chain.tasks("exit 1")
        into = chain.plan.paths.checkpoints / f"step={step}-again"
        chain.tasks(f"""mkdir {into}
            echo '{{"step": {step}, "serial": {link + 2}}}' >{into}/complete.json; exit 1""")
        chain.run(*([TAG] if link == 1 else [str(link), TAG]), job=str(16 + link), ANSWER=str(17 + link))
        assert chain.end_mark(str(16 + link))["verdict"] == "continue"
    assert [attempt.checkpoint for attempt in read_attempts(chain.directory)] == [1000, 400, 600, 800]
    chain.tasks("exit 1")
    for link in (5, 6):
        assert chain_end(chain.directory) is None
        chain.run(str(link), TAG, job=str(16 + link), ANSWER=str(17 + link))
    assert chain_end(chain.directory) is not None


@pytest.mark.parametrize(
    ("restarts", "why"), [("0", "somebody cancelled or requeued it"), ("1", "somebody requeued it")]
)
def test_link_that_may_have_been_requeued_does_not_end_chain(tmp_path: Path, restarts: str, why: str) -> None:
    """Slurm calls it COMPLETING for no reason, as one that was cancelled, until it has ended."""
    chain = write_chain(tmp_path, "resilience.max_failures=1")
    chain.tasks("exit 143")
    state = f"JobState=COMPLETING Reason=None Requeue=1 Restarts={restarts} PreemptTime=None"
    assert chain.run(STATE=state)[0] == 143
    assert (chain.end_mark()["verdict"], chain.end_mark()["why"]) == ("continue", why)
    assert chain_end(chain.directory) is None and chain.calls_of("scancel") == []
    chain.tasks("exit 0")
    code, output = chain.run(SLURM_RESTART_COUNT="1")
    assert code == 0, output
    assert chain.submissions() == [], "the next link is there already"
    assert [(attempt.number, attempt.verdict) for attempt in read_attempts(chain.directory)] == [
        (0, "continue"),
        (1, "done"),
    ]
    assert chain.calls_of("scancel") == ["scancel 18"]


def test_text_of_mark_is_neither_code_nor_number(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    chain.run(job="16", ANSWER="17")
    mark = chain.plan.paths.marks / "16.0.started.json"
    hostile = {"job_id": "16", "checkpoint": "BASH_VERSINFO[$(touch canary)]", "failures": "$(touch canary)"}
    mark.write_text(json.dumps({**hostile, "checkpoint_order": [1], "nodes": "$(touch canary)"}))
    (chain.plan.paths.marks / "16.0.ended.json").unlink()
    chain.run("2", TAG, BEFORE="NODE_FAIL", ANSWER="18")
    assert chain.calls_of("srun")
    assert not list(tmp_path.rglob("canary")) and not Path("canary").exists()


def test_link_that_left_and_saved_nothing_counts_and_is_not_said_to_have_saved(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, "resilience.links=9", "resilience.max_failures=2")
    chain.tasks("exit 75")
    _, output = chain.run()
    mark = chain.end_mark()
    assert (mark["rule"], mark["verdict"]) == ("left", "continue"), output
    assert mark["why"] == "it left, as it was asked to, and had saved nothing new"
    _, output = chain.run("2", TAG, job="18", ANSWER="19")
    assert chain.end_mark("18")["verdict"] == "stop", output
    end = chain_end(chain.directory)
    assert end is not None
    assert end.why == f"2 links in a row ended without a new checkpoint: {mark['why']}"


def test_granted_limit_is_on_record(tmp_path: Path) -> None:
    """The site cut it; Slurm is asked once before the tasks, in Unix time."""
    chain = write_chain(tmp_path, "training.run.time_limit=1:00:00")
    _, output = chain.run(STATE="JobState=RUNNING Reason=None TimeLimit=00:02:00 EndTime=4102444800")
    started = json.loads((chain.plan.paths.marks / "17.0.started.json").read_text())
    assert started["time_limit"] == 120, output
    settings = json.loads((chain.directory / "supervisor.json").read_text())
    assert (settings["time_limit"], settings["save_before_end"]) == (3600, 300)
