"""The script of a job starts its tasks again inside its allocation, or says why not."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from slipway.common.node.marks import JobAttempt, read_attempts
from tests.resilience.scripted_chain import COMMANDS, ScriptedChain, write_chain

# Each start of the tasks adds a line, with the port at which they meet.
COUNTED = 'echo "$MASTER_PORT" >>%s/starts; start=$(wc -l <%s/starts)\n'


def restarting_chain(tmp_path: Path, tasks: str, *overrides: str) -> ScriptedChain:
    chain = write_chain(tmp_path, "resilience.restarts=2", *overrides)
    chain.tasks(COUNTED % (tmp_path, tmp_path) + tasks)
    return chain


def starts(chain: ScriptedChain) -> list[str]:
    return (chain.root / "starts").read_text().split()


def each_start(chain: ScriptedChain) -> list[JobAttempt]:
    return read_attempts(chain.directory, each_start=True)


def test_tasks_that_crash_once_start_again_and_are_done(tmp_path: Path) -> None:
    chain = restarting_chain(tmp_path, "((start > 1)) || { echo CUDA out of memory; exit 1; }")
    code, output = chain.run()
    assert (code, chain.end_mark()["verdict"]) == (0, "done"), output
    assert len(set(starts(chain))) == 2, "they meet at another port"
    assert "a GPU had no memory left: starts its tasks again, 1 of at most 2 times" in output
    assert f"run gpt3_tiny, launch 1, restart 1, on n1, n2; rendezvous at n1:{starts(chain)[1]}" in output
    first, second = each_start(chain)
    assert (first.restarts, first.exit_code, first.rule) == (0, 1, "gpu_out_of_memory")
    assert (second.restarts, second.exit_code, second.verdict) == (1, 0, "done")
    assert first.ended is not None and second.started is not None and first.ended <= second.started
    (whole,) = read_attempts(chain.directory)
    assert (whole.started, whole.restarts, whole.verdict) == (first.started, 1, "done")
    assert len(chain.submissions()) == 1


LOCAL = ["cluster=local", "resilience.links=1", "training.trainer.devices=1", "training.trainer.num_nodes=1"]
COMMAND = ["stages=[command]", "command.argv=['true']", "resilience.links=1", "resilience.restarts=4"]
NO_REASON = "Reason=None PreemptTime=None"
# The tasks, overrides, and Slurm's words for the job; number of starts, the rule, the verdict, and the log's.
CASES = {
    "used up": (
        "exit 1", ["resilience.max_failures=9"], "",
        3, "failed", "continue", "does not start its tasks again: resilience.restarts=2 are used up",
    ),
    "no progress": (
        "exit 1", ["resilience.restarts=8"], "",
        3, "failed", "stop", "stop: 3 starts in a row ended without a new checkpoint: its tasks failed",
    ),
    "no progress of a single job": (
        "exit 1", ["resilience.links=1", "resilience.restarts=8", "resilience.max_failures=2"], "",
        2, "failed", "stop", "stop: 2 starts in a row ended without a new checkpoint: its tasks failed",
    ),
    "a mistake": ("exit 2", [], "", 1, "mistake", "stop", "stop: the payload refused what it was given"),
    "its own limit": ("exit 75", [], "", 1, "left", "continue", "it left, as it was asked to"),
    "the time is short": (
        "exit 1", [], f"JobState=RUNNING {NO_REASON} TimeLimit=01:00:00 EndTime={time.time() + 330:.0f}",
        1, "failed", "continue", "not start its tasks again: [0-9]+ seconds are left of its time limit",
    ),
    "Slurm ends it": (
        "exit 1", [], "JobState=COMPLETING Reason=TimeLimit PreemptTime=None",
        1, "time_limit", "continue", "does not start its tasks again: its time limit was reached",
    ),
    "Slurm does not answer": (
        "exit 1", [], "-",
        1, "failed", "continue", "does not start its tasks again: Slurm ends the job, or does not answer",
    ),
    "a broken node, and no spare": (
        "echo n2: GPU is lost; exit 1", [], "",
        1, "gpu_lost", "exclude", "does not start its tasks again: no other node is there in place of n2",
    ),
    "an old cause": (
        "((start > 1)) || echo CUDA out of memory; exit 1", [], "",
        3, "failed", "stop", "stop: 3 starts in a row ended without a new checkpoint: its tasks failed",
    ),
    "a command": ("exit 1", COMMAND, "", 5, "failed", "continue", "resilience.restarts=4 are used up"),
    "without Slurm": ("exit 1", LOCAL, "", 3, "failed", "stop", "3 starts in a row"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_starts_again_and_what_does_not(tmp_path: Path, case: str) -> None:
    tasks, overrides, state, count, rule, verdict, message = CASES[case]
    chain = restarting_chain(tmp_path, tasks, *overrides)
    code, output = chain.run(**({"STATE": state} if state else {}))
    assert len(starts(chain)) == count, output
    mark = json.loads(next(chain.plan.paths.marks.glob("*.0.ended.json")).read_text())
    assert (mark["rule"], mark["verdict"], mark["exit_code"]) == (rule, verdict, code), output
    assert re.search(message, output), output
    attempts = each_start(chain)
    assert [attempt.restarts for attempt in attempts] == list(range(count))
    assert all(attempt.verdict and attempt.nodes for attempt in attempts)


def test_a_signal_to_the_job_ends_it(tmp_path: Path) -> None:
    """A job that is signalled while it prepares a start ends, and no tasks run again."""
    chain = restarting_chain(tmp_path, "exit 1")
    chain.replace_command("squeue", '[[ $* != *--steps* ]] || kill -s TERM "$PPID"')
    code, output = chain.run()
    assert (code, len(starts(chain))) == (143, 1), output
    assert chain.end_mark()["signal"] == "TERM"


def test_nemo_finds_its_checkpoints_tidied_at_each_start(tmp_path: Path) -> None:
    """NeMo refuses to begin with a checkpoint that a killed start has left half written."""
    chain = restarting_chain(tmp_path, "", "engine=nemo", "container=null")
    saved = chain.plan.paths.checkpoints
    halves = f"mkdir -p {saved}/x--step=4/weights {saved}/x--step=4-last"
    halves += f"; touch {saved}/x--step=4-last-unfinished"
    seen = f"ls {saved} >{tmp_path}/seen; ((start > 1)) || {{ {halves}; exit 1; }}"
    chain.tasks(COUNTED % (tmp_path, tmp_path) + seen)
    code, output = chain.run()
    assert (code, len(starts(chain))) == (0, 2), output
    assert (tmp_path / "seen").read_text().split() == ["x--step=4", "x--step=4-last"], output
    assert not list(saved.glob("*-unfinished"))
    assert "set aside x--step=4-last" in output


def test_progress_of_megatron_lm_forgives_failures(tmp_path: Path) -> None:
    own = ["engine=megatron_lm", "container=null", "resilience.max_failures=2", "resilience.restarts=4"]
    chain = restarting_chain(tmp_path, "", *own)
    tracker = chain.plan.paths.checkpoints / "latest_checkpointed_iteration.txt"
    save = f"mkdir -p {tracker.parent}; ((start > 3)) || echo $((start * 5)) >{tracker}; exit 1"
    chain.tasks(COUNTED % (tmp_path, tmp_path) + save)
    _, output = chain.run()
    attempts = each_start(chain)
    assert [(each.checkpoint, each.failures) for each in attempts] == [
        (None, 0),
        (5, 0),
        (10, 0),
        (15, 0),
        (15, 1),
    ]
    assert "stop: 2 starts in a row ended without a new checkpoint" in output


ALLOCATION = [
    *("cluster=interactive", "cluster.scheduler=allocation", "resilience.links=1", "container=null"),
    *("training.trainer.devices=1", "training.trainer.num_nodes=2", "cluster.job_name_prefix=''"),
]


@pytest.mark.parametrize(
    ("overrides", "name", "of_steps"), [([], "a_job", "a_job"), (ALLOCATION, "interactive", "gpt3_tiny")]
)
def test_the_step_of_a_killed_srun_is_killed_and_no_other(
    tmp_path: Path, overrides: list[str], name: str, of_steps: str
) -> None:
    """srun may die without its tasks; beside these somebody may have a shell on the node."""
    tasks = f"((start > 1)) || exit 137; cat {tmp_path}/steps >{tmp_path}/left"
    chain = restarting_chain(tmp_path, tasks, *overrides)
    (tmp_path / "steps").write_text(f"17.0 {of_steps}\n17.1 interactive\n17.batch batch\n")
    steps = f"if [[ $* == *--steps* ]]; then cat {tmp_path}/steps; exit; fi\n"
    chain.replace_command("squeue", steps + COMMANDS["squeue"])
    chain.replace_command("scancel", f"[[ $* != *--signal=KILL* ]] || sed -i /17.0/d {tmp_path}/steps")
    code, output = chain.run(SLURM_JOB_NAME=name)
    assert (code, len(starts(chain))) == (0, 2), output
    assert "scancel --signal=KILL 17.0" in chain.calls_of("scancel")
    assert (tmp_path / "left").read_text() == "17.1 interactive\n17.batch batch\n"
    assert all(f"--job-name={of_steps}" in call for call in chain.calls_of("srun"))
