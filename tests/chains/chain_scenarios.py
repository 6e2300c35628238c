"""Scenarios of chains, each on nodes of its own: n1 is shared, the others are named in the scenarios."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.chains import break_scenarios
from tests.chains.chain_runs import CHAIN, HEADER, ChainRuns
from tests.chains.chain_training import interrupted, rewound
from tests.chains.elastic_scenarios import FEWER, elastic
from tests.chains.following_scenarios import FOLLOWING
from tests.chains.restart_scenarios import RESTARTED
from tests.chains.rewound_directories import REWOUND
from tests.chains.spoilt_training import SPOILT, spoilt
from tests.fakes.programs import write_programs

Scenario = Callable[[ChainRuns, str], object]


def limited(runs: ChainRuns, run: str) -> None:
    """Let the time limit end a link that saves when it is told to, and one that ignores the signal."""
    body = "case $link in 1) wait_to_save 3 ;; 2) save 5; be_deaf ;; 3) save 6 ;; *) save 9 ;; esac\n"
    runs.chain(run, body, "resilience.links=6", nodes="n1")
    for link in (1, 2):
        runs.until_ready(run, link)
        runs.near_its_limit(runs.job(run, link))
    runs.until_over(run)


def preempted(runs: ChainRuns, run: str) -> None:
    """Preempt, by a higher partition, a link that saves, and one that ignores the signal."""
    body = "case $link in 1) wait_to_save 3 ;; 2) be_deaf ;; *) exit 0 ;; esac\n"
    settings = ["resilience.links=6", "resilience.max_failures=1", "cluster.partition=low"]
    runs.chain(run, body, *settings, nodes="n2")
    for link in (1, 2):
        runs.until_ready(run, link)
        job = runs.job(run, link)
        preemptor = runs.preempt(job)
        runs.until_gone(run, job)
        runs.slurm("scancel", preemptor)
    runs.until_over(run)


def bereft(runs: ChainRuns, run: str) -> None:
    """Kill one of two slurmds, not that of the script's node: a third node is there to go on with."""
    body = "case $link in 1) save 3; be_deaf ;; *) exit 0 ;; esac\n"
    two = ["training.trainer.num_nodes=2", "training.model.global_batch_size=32"]
    runs.chain(run, body, "resilience.links=4", *two, nodes="n3,n4,n5")
    runs.until_ready(run, 1)
    assert runs.nodes_of(runs.job(run, 1)) == "n[3-4]"
    runs.kill_daemon("n4")
    runs.until_over(run)


def orphaned(runs: ChainRuns, run: str) -> None:
    """Kill the node of the script: only the next link can tell what became of this one."""
    body = "case $link in 1) save 3; be_deaf ;; *) exit 0 ;; esac\n"
    runs.chain(run, body, "resilience.links=4", nodes="n6,n7")
    runs.until_ready(run, 1)
    assert runs.nodes_of(runs.job(run, 1)) == "n6"
    runs.kill_node("n6")
    runs.until_over(run)


def crashing(runs: ChainRuns, run: str) -> None:
    """Let three links make progress, two of them after the training went back; the others fail at once."""
    saves = "1) save 1000 ;; 2 | 3) save $((link * 200)) ;;"
    body = f"case $link in {saves} esac\necho it is broken >&2\nexit 1\n"
    runs.chain(run, body, "resilience.links=20", "resilience.max_failures=3", nodes="n1")
    runs.until_over(run)


def mistaken(runs: ChainRuns, run: str) -> None:
    """End with exit code 2, a mistake of the user's: the next link would make it again."""
    runs.chain(run, "exit 2\n", "resilience.links=20", nodes="n1")
    runs.until_over(run)


def finished(runs: ChainRuns, run: str) -> None:
    """End the chain in its first link."""
    runs.chain(run, "save 4\n", "resilience.links=20", nodes="n1")
    runs.until_over(run)


def cancelled(runs: ChainRuns, run: str) -> None:
    """Run `slipway cancel` while the second link of a chain runs and a third waits."""
    runs.chain(run, "((link > 1)) || { save 1; exit 1; }\nbe_deaf\n", "resilience.links=9", nodes="n1")
    runs.until_ready(run, 2)
    runs.until("the third link waits", lambda: len(runs.links(run)) == 3, run)
    runs.answers[run] = runs.slipway("cancel", run)
    runs.until_over(run)


def cut_off(runs: ChainRuns, run: str) -> None:
    """Cancel the running link with `scancel`: whoever did it meant the run."""
    runs.chain(run, "wait_to_save 1\n", "resilience.links=9", nodes="n1")
    runs.until_ready(run, 1)
    runs.until("the second link waits", lambda: len(runs.links(run)) == 2, run)
    runs.slurm("scancel", runs.job(run, 1))
    runs.until_over(run)


def termed(runs: ChainRuns, run: str) -> None:
    """Send TERM to the script alone: srun, if it got it too, would kill the tasks, which can still save."""
    body = "case $link in 1) wait_to_save 3 ;; *) exit 0 ;; esac\n"
    runs.chain(run, body, "resilience.links=3", nodes="n1")
    runs.until_ready(run, 1)
    for name in ("TERM", "USR1"):
        runs.slurm("scancel", "--batch", f"--signal={name}", runs.job(run, 1))
        time.sleep(1)  # bash takes those that came meanwhile by their numbers
    runs.until_over(run)


# The commands are missing on a node, and not where the launcher runs: a submission has none of a job's
# variables.
NO_SLURM = """if [[ $(uname -n) == n[0-9]* ]]; then
    echo "${0##*/} $*" >>"${0%/*}/called"
    echo "${0##*/}: command not found" >&2
    exit 127
fi
exec $real "$@"
"""


def bare(runs: ChainRuns, run: str) -> None:
    """Run on nodes that have no `sbatch` and no `scancel`: all links are submitted at launch."""
    folder = runs.directory / "bare-programs"
    for name in ("sbatch", "scancel"):
        write_programs(folder, {name: NO_SLURM})
    body = "case $link in 1) save 3; exit 1 ;; *) exit 0 ;; esac\n"
    runs.chain(run, body, "resilience.links=4", "resilience.submit=launch", nodes="n1", programs=folder)
    runs.until_over(run)


# Takes the job, and loses the answer the first time.
FORGETFUL = """if [[ $(uname -n) == n[0-9]* && ! -e ${0%/*}/forgot && " $* " != *" --test-only "* ]]; then
    touch "${0%/*}/forgot"
    $real "$@" >"${0%/*}/lost"
    exit 1
fi
exec $real "$@"
"""


def unanswered(runs: ChainRuns, run: str) -> None:
    """Lose Slurm's answer to the submission of the second link."""
    folder = write_programs(runs.directory / "forgetful-programs", {"sbatch": FORGETFUL})
    body = "case $link in 1) save 3; exit 1 ;; *) sleep 2 ;; esac\n"
    runs.chain(run, body, "resilience.links=4", nodes="n1", programs=folder)
    runs.until_over(run)


def twins(runs: ChainRuns, run: str) -> None:
    """Lose the answer where squeue is missing too: two jobs could be the second link."""
    folder = write_programs(runs.directory / "twin-programs", {"sbatch": FORGETFUL})
    write_programs(folder, {"squeue": NO_SLURM})
    body = "case $link in 1) save 3; exit 1 ;; *) sleep 2 ;; esac\n"
    runs.chain(run, body, "resilience.links=4", nodes="n1", programs=folder)
    runs.until_over(run)


def fatherless(runs: ChainRuns, run: str) -> None:
    """Launch a training whose data cannot be prepared."""
    payload = runs.directory / f"{run}.sh"
    runs.work(run).mkdir()
    payload.write_text(HEADER + 'case " $* " in *pretrain*) exit 0 ;; esac\nexit 3\n')
    payload.chmod(0o755)
    stages = [
        "stages=[data_preparation,training]",
        "data_preparation.inputs=[/etc/hostname]",
        f"data_preparation.run.name={run}_data",
        f"training.run.name={run}",
        f"cluster.python={payload}",
        "resilience.links=3",
    ]
    runs.answers[run] = runs.begin(*CHAIN, *stages, nodes="n1")
    runs.until_over(f"{run}_data")
    runs.until_over(run)


SCENARIOS: dict[str, Scenario] = {
    # Those that take longest come first.
    "tried": interrupted,
    FEWER: elastic,
    SPOILT: spoilt,
    **RESTARTED,
    "rewound": rewound,
    **REWOUND,
    "bereft": bereft,
    "orphaned": orphaned,
    "limited": limited,
    "preempted": preempted,
    "crashing": crashing,
    "cancelled": cancelled,
    "cut_off": cut_off,
    "termed": termed,
    "bare": bare,
    "unanswered": unanswered,
    "twins": twins,
    "fatherless": fatherless,
    "mistaken": mistaken,
    "finished": finished,
    "requeued": break_scenarios.requeued,
    "cancelled_with_requeue": break_scenarios.cancelled_with_requeue,
    "cancelled_while_requeued": break_scenarios.cancelled_while_requeued,
    "unbegun": break_scenarios.unbegun,
    "deleted": break_scenarios.deleted,
    "full_disk": break_scenarios.full_disk,
    "injected": break_scenarios.injected,
    "suspended": break_scenarios.suspended,
    "begun_early": break_scenarios.begun_early,
    "cut_short": break_scenarios.cut_short,
    "cancelled_before_submission": break_scenarios.cancelled_before_submission,
    "cancelled_before_answer": break_scenarios.cancelled_before_answer,
    **FOLLOWING,
}
