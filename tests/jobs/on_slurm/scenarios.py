"""The runs of the sandbox: their scripts, and the actions on them.

Nodes: n1 is everybody's; n2 is taken away from the partition `low`; n3 is a stranger's alone; n4 fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.fakes.programs import write_programs
from tests.jobs.on_slurm.sandbox_runs import PATIENCE_SECONDS, SandboxRuns
from tests.sandbox.fixtures import slurm_is_at_least

ATTEMPT = 'echo "attempt ${SLURM_RESTART_COUNT:-0}"\n'
SLEEP = ATTEMPT + "exec sleep 3600\n"
SECOND_ATTEMPT_ENDS = "if ((${SLURM_RESTART_COUNT:-0})); then " + ATTEMPT.strip() + "; exit; fi\n"
# Since 24.05 a job that ends in its grace time was preempted.
GRACE_IS_PREEMPTION = slurm_is_at_least(24, 5)
# 24.11.5 requeues a job that was preempted once more when its second attempt has ended, 26.05.5 does not.
IS_REQUEUED_TWICE = GRACE_IS_PREEMPTION and not slurm_is_at_least(26, 5)
# Ignores SIGTERM, so that Slurm has to kill it.
STUBBORN = "trap '' TERM\n" + ATTEMPT + "while :; do sleep 1; done\n"
WAITS = "cluster.partition=cloud"
REQUEUE = "cluster.requeue=True"


@dataclass(frozen=True)
class Scenario:
    """A run: its payload, its overrides, and the state in which it stays."""

    run: str
    final_state: str
    body: str = "echo done\n"
    overrides: tuple[str, ...] = ("cluster.nodelist=n1",)


# The slowest come first.
SCENARIOS = [
    Scenario("timed_out", "TIMEOUT", SLEEP),
    Scenario(
        "preempted",
        "COMPLETED",
        SECOND_ATTEMPT_ENDS + STUBBORN,
        ("cluster.nodelist=n2", "cluster.partition=low", REQUEUE),
    ),
    Scenario(
        "preempted_for_good",
        "PREEMPTED",
        STUBBORN,
        ("cluster.nodelist=n2", "cluster.partition=low", "cluster.requeue=False"),
    ),
    Scenario(
        "preempted_politely",
        "PREEMPTED" if GRACE_IS_PREEMPTION else "FAILED",
        SLEEP,
        ("cluster.nodelist=n2", "cluster.partition=low"),
    ),
    Scenario("requeued", "COMPLETED", SECOND_ATTEMPT_ENDS + SLEEP, ("cluster.nodelist=n1", REQUEUE)),
    Scenario("node_failed", "NODE_FAIL", SLEEP, ("cluster.nodelist=n4", "cluster.requeue=False")),
    Scenario(
        "deadline",
        "DEADLINE",
        overrides=(
            "cluster.nodelist=n3",
            "data_preparation.run.time_limit=1",
            "cluster.deadline=now+2minutes",
        ),
    ),
    Scenario("completed", "COMPLETED", "echo hello\necho of rank 0 >&2\n"),
    Scenario("failed", "FAILED", "echo trying\nexit 3\n"),
    Scenario("killed", "FAILED", "kill -SEGV $$\n"),
    Scenario("interrupted", "INTERRUPTED", "exit 75\n"),
    Scenario("running", "RUNNING", SLEEP),
    Scenario("suspended", "SUSPENDED", SLEEP),
    Scenario("cancelled", "CANCELLED", SLEEP),
    Scenario("cancelled_waiting", "CANCELLED", overrides=(WAITS,)),
    Scenario("requeued_held", "PENDING", SLEEP, ("cluster.nodelist=n1", REQUEUE)),
    Scenario("held", "PENDING", overrides=(WAITS,)),
    Scenario("released", "COMPLETED", overrides=("cluster.nodelist=n1", "cluster.sbatch={hold: True}")),
    Scenario("lost_its_place", "FAILED", overrides=("cluster.nodelist=n1", "cluster.sbatch={hold: True}")),
    Scenario(
        "never",
        "PENDING",
        overrides=("cluster.nodelist=n1", "data_preparation.run.dependency='afterok:{failed}'"),
    ),
]
# The tasks of an array run one after another.
ARRAYS = [
    Scenario(
        "array",
        "FAILED",
        'echo "task $SLURM_ARRAY_TASK_ID"\nexit $((SLURM_ARRAY_TASK_ID == 1 ? 3 : 0))\n',
        ("cluster.nodelist=n1", "cluster.sbatch={array: 0-2%1}"),
    ),
    Scenario("array_held", "RUNNING", SLEEP, ("cluster.nodelist=n1", "cluster.sbatch={array: 0-3%1}")),
]
REFUSED = "refused"
STRANGER = "stranger"


WAITING, RUNNING = ("PENDING",), ("RUNNING",)


@dataclass(frozen=True)
class Provocation:
    """An action that is done once, as soon as a run is in one of the states.

    A run that has to be RUNNING must have printed so itself, and so must the `other_runs`: before that the
    payload has not begun.
    """

    run: str
    states: tuple[str, ...]
    action: Callable[[SandboxRuns], object]
    reason: str = ""
    other_runs: tuple[str, ...] = ()
    restarts: int | None = None

    def is_due(self, runs: SandboxRuns) -> bool:
        row = runs.rows.get(self.run)
        if not row or row["state"] not in self.states or not (row["reason"] or "").startswith(self.reason):
            return False
        if self.restarts not in (None, row["restarts"]):
            return False
        return self.states is not RUNNING or all(runs.has_begun(run) for run in (self.run, *self.other_runs))


def scontrol(*words: str) -> Callable[[SandboxRuns], object]:
    """Return an action that calls scontrol, as an administrator; `{run}` stands for the job of a run."""
    return lambda runs: runs.slurm("scontrol", *(word.format_map(runs.jobs) for word in words))


def slipway(verb: str, run: str) -> Callable[[SandboxRuns], object]:
    """Return an action that calls a verb about a run; its answer is kept in `SandboxRuns.answers`."""
    return lambda runs: runs.answers.update({run: runs.slipway(verb, run)})


def preempt(runs: SandboxRuns) -> None:
    runs.jobs["preemptor"] = runs.submit("--partition=high", "--nodelist=n2", "--exclusive")


def fail_node(runs: SandboxRuns) -> None:
    """Make a node fail as if its daemon no longer answered, without the half minute until then."""
    runs.slurm("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=test")


def move_away(runs: SandboxRuns) -> None:
    """Remove the directory of the log before the job starts; Slurm, since 23.02, cannot make it again."""
    run_dir = runs.directory / "results" / "lost_its_place"
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.touch()
    runs.slurm("scontrol", "release", runs.jobs["lost_its_place"])


def begin_again(runs: SandboxRuns, run: str) -> None:
    """Start a requeued job; slurmd takes no job in the second in which it was killed."""
    time.sleep(1.1)
    runs.slurm("scontrol", "update", f"JobId={runs.jobs[run]}", "StartTime=now")


PROVOCATIONS = [
    # A time limit is in whole minutes; the end that follows from it is not. Slurm looks every 30 seconds.
    Provocation("timed_out", RUNNING, scontrol("update", "JobId={timed_out}", "EndTime=now+1")),
    Provocation("preempted_politely", RUNNING, preempt, other_runs=("preempted", "preempted_for_good")),
    Provocation("requeued", RUNNING, scontrol("requeue", "{requeued}")),
    # A requeued job would wait for two minutes.
    Provocation("requeued", WAITING, lambda runs: begin_again(runs, "requeued"), reason="BeginTime"),
    Provocation(
        "preempted",
        WAITING,
        lambda runs: (
            runs.slurm("scancel", runs.jobs["preemptor"]),
            begin_again(runs, "preempted"),
        ),
        reason="BeginTime",
        restarts=1,
    ),
    *(
        [Provocation("preempted", WAITING, lambda runs: begin_again(runs, "preempted"), restarts=2)]
        if IS_REQUEUED_TWICE
        else []
    ),
    Provocation("node_failed", RUNNING, fail_node),
    Provocation(
        "deadline", WAITING, scontrol("update", "JobId={deadline}", "Deadline=now+1"), reason="Resources"
    ),
    Provocation("suspended", RUNNING, scontrol("suspend", "{suspended}")),
    Provocation("requeued_held", RUNNING, scontrol("requeuehold", "{requeued_held}")),
    Provocation("cancelled", RUNNING, slipway("cancel", "cancelled")),
    Provocation("cancelled_waiting", WAITING, slipway("cancel", "cancelled_waiting")),
    Provocation("held", WAITING, slipway("hold", "held"), reason="PartitionDown"),
    Provocation("released", WAITING, slipway("release", "released")),
    Provocation("lost_its_place", WAITING, move_away),
    Provocation("array_held", RUNNING, slipway("hold", "array_held")),
]


def populate(runs: SandboxRuns) -> None:
    """Launch all runs, act on them, and wait until each is in its final state.

    A run that does not come to its state in time is left as it is: its own test fails.
    """
    runs.jobs[STRANGER] = runs.submit("--nodelist=n3", "--exclusive")
    remaining = list(PROVOCATIONS)
    for number, scenario in enumerate([*SCENARIOS, *ARRAYS]):
        overrides = [word.replace("{failed}", runs.jobs.get("failed", "")) for word in scenario.overrides]
        done = runs.launch(scenario.run, scenario.body, *overrides)
        assert done.returncode == 0, f"{scenario.run}\n{done.stdout}{done.stderr}"
        if number % 4 == 3:
            remaining = list(_provoke(runs, remaining))
    no_such_partition = write_programs(runs.directory / "refusing", {"sbatch": REFUSING})
    runs.launch(REFUSED, "exit 0\n", programs=no_such_partition)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        remaining = list(_provoke(runs, remaining))
        if not remaining and all(
            runs.state(scenario.run) == scenario.final_state for scenario in [*SCENARIOS, *ARRAYS]
        ):
            return
        time.sleep(0.5)


# The test of a script succeeds; its submission fails.
REFUSING = 'case " $* " in *" --test-only "*) exec $real "$@" ;; esac\nexec $real --partition=nosuch "$@"'


def _provoke(runs: SandboxRuns, remaining: list[Provocation]) -> Iterator[Provocation]:
    """Do the provocations that are due, and yield the others."""
    runs.watch()
    for provocation in remaining:
        if provocation.is_due(runs):
            provocation.action(runs)
        else:
            yield provocation
