"""Faults of an administrator, a full disk or a hasty user; all chains share one node."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

from supervisor.marks import ChainEnd, end_chain
from tests.chains.chain_yard import CHAIN, PREFIX, Yard
from tests.fakes.programs import write_programs
from tests.jobs.on_slurm.zoo import Done

# Who ends the chain of `unbegun`.
SOMEBODY = "somebody"
# The payload of a link that runs until a file allows it to fail.
FAILS_WHEN_TOLD = "ready; until [[ -e $work/go ]]; do sleep 0.2; done; exit 1"


def requeued(yard: Yard, run: str) -> None:
    """An administrator's requeue of a link whose job was submitted with --no-requeue."""
    body = "((${SLURM_RESTART_COUNT:-0})) || wait_to_save 1\nsave 3\n"
    job = _running_chain(yard, run, body)
    _requeue(yard, run, job)
    yard.said[run] = yard.slipway("status", run, "--json")
    # Slurm would wait for two minutes; and slurmd takes no job in the second in which it was killed.
    time.sleep(1.1)
    yard.slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    yard.until_over(run)


def cancelled_with_requeue(yard: Yard, run: str) -> None:
    """A `scancel` of a job that Slurm may requeue: nothing tells the job that it is no requeue."""
    job = _running_chain(yard, run, "wait_to_save 1\n")
    yard.slurm("scontrol", "update", f"JobId={job}", "Requeue=1")
    yard.slurm("scancel", job)
    yard.until_over(run)


def cancelled_while_requeued(yard: Yard, run: str) -> None:
    """`slipway cancel` of a chain whose current link waits to begin again."""
    job = _running_chain(yard, run, "wait_to_save 1\n")
    _requeue(yard, run, job)
    yard.said[run] = yard.slipway("cancel", run)
    yard.until_over(run)


def unbegun(yard: Yard, run: str) -> None:
    """A chain that was ended before its first link began: the job leaves."""
    yard.chain(run, "save 1\n", "resilience.links=3", "cluster.sbatch={hold: True}", nodes="n1")
    end_chain(yard.launch_directory(run), ChainEnd(SOMEBODY, f"cancelled by {SOMEBODY}"))
    yard.slurm("scontrol", "release", yard.jobs[run])
    yard.until_over(run)


def deleted(yard: Yard, run: str) -> None:
    """`rm -rf` of a run whose chain is queued, and the same launch again."""
    body = f"case $link in 1) {FAILS_WHEN_TOLD} ;; *) save 3 ;; esac\n"
    overrides = ["resilience.links=6"]
    first = _running_chain(yard, run, body, *overrides)
    (second,) = {*yard.queued(run)} - {first}
    shutil.rmtree(yard.directory / "results" / run)
    chosen = [*CHAIN, f"training.run.name={run}", f"cluster.python={yard.directory / run}.sh"]
    done = yard.begin(*chosen, *overrides, nodes="n1")
    assert done.returncode == 0, done
    yard.jobs[run] = json.loads(done.stdout)["job_id"]
    yard.said[run] = yard.slipway("cancel", second)
    (yard.work(run) / "go").touch()
    yard.until_gone(run, first)
    yard.until_over(run)


def full_disk(yard: Yard, run: str) -> None:
    """Claims that could not be written: of a link that ended, then of those that run and wait as well."""
    body = "((link > 2)) || { save $link; exit 1; }\nbe_deaf\n"
    yard.chain(run, body, "resilience.links=9", nodes="n1")
    yard.until_ready(run, 3)
    yard.until("the fourth link waits", lambda: len(yard.links(run)) == 4, run)
    marks = yard.launch_directory(run) / "marks"
    told = []
    for missing in ((2,), (3, 4)):
        for link in missing:
            (marks / f"job.{link}").unlink()
        told += yard.told_by("status", run)
    # As where nothing at all could be written since the first link.
    for path in marks.iterdir():
        if path.name != "job" and not path.name.startswith(yard.jobs[run]):
            path.unlink()
    told += yard.told_by("status", run)
    yard.said[f"{run}_status"] = Done("status", 0, json.dumps(told), "")
    yard.said[run] = yard.slipway("cancel", "--wait", run)
    yard.said[f"{run}_left"] = Done("squeue", 0, " ".join(yard.queued(run)), "")
    yard.command("scancel", f"--name={PREFIX}{run}")
    yard.until_over(run)


def injected(yard: Yard, run: str) -> None:
    """A mark whose numbers are commands."""
    job = _running_chain(yard, run, "case $link in 1) wait_to_save 3 ;; *) save 5 ;; esac\n")
    marks = yard.launch_directory(run) / "marks"
    started = marks / f"{job}.0.started.json"
    content = json.loads(started.read_text())
    for name in ("checkpoint", "failures", "link", "started", "serial"):
        content[name] = f"BASH_VERSINFO[$(touch {yard.work(run)}/PWNED-{name})]"
    started.write_text(json.dumps(content) + "\n")
    yard.slurm("scancel", "--batch", "--signal=USR1", job)
    yard.until_over(run)


def suspended(yard: Yard, run: str) -> None:
    """`slipway cancel --save` is refused while nothing runs that could save, and later it is not."""
    job = _running_chain(yard, run, "wait_to_save 3\n")
    yard.slurm("scontrol", "suspend", job)
    yard.until(f"{job} is stopped", lambda: _process_states(job) == {"T"}, run)
    yard.said[run] = yard.slipway("cancel", "--save", run)
    yard.said[f"{run}_queue"] = yard.command(
        "squeue", "--noheader", "--format=%i %T", f"--name={PREFIX}{run}"
    )
    yard.said[f"{run}_end"] = Done("end", 0, str(yard.end(run)), "")
    yard.slurm("scontrol", "resume", job)
    # A signal that comes before the node has resumed the job is lost, though Slurm says that it runs.
    yard.until(f"{job} is resumed", lambda: "T" not in _process_states(job), run)
    yard.said[f"{run}_again"] = yard.slipway("cancel", "--save", run)
    yard.until_over(run)


# On a node: Slurm takes the job, and its answer comes when the test says so; or all of it comes late.
SLOW = """wait_for() { until [[ -e ${0%/*}/$1 ]]; do sleep 0.2; done; }
if [[ $(uname -n) != n[0-9]* || " $* " == *" --test-only "* ]]; then exec $real "$@"; fi
touch "${0%/*}/asked"
if [[ ! -e ${0%/*}/answers-late ]]; then wait_for go; fi
answer=$($real "$@") code=$?
touch "${0%/*}/taken"
wait_for go
echo "$answer"
exit $code
"""


def cancelled_before_submission(yard: Yard, run: str) -> None:
    """`slipway cancel` while the next link is being submitted: Slurm takes it after that."""
    _cancelled_in_submission(yard, run, "asked")


def cancelled_before_answer(yard: Yard, run: str) -> None:
    """The same, but Slurm has taken the link, and only the job does not know yet."""
    _cancelled_in_submission(yard, run, "taken")


def _cancelled_in_submission(yard: Yard, run: str, moment: str) -> None:
    folder = write_programs(yard.directory / f"{run}-programs", {"sbatch": SLOW})
    if moment == "taken":
        (folder / "answers-late").touch()
    yard.chain(run, "wait_to_save 1\n", "resilience.links=4", nodes="n1", programs=folder)
    yard.until(f"sbatch is {moment}", (folder / moment).exists, run)
    yard.said[run] = yard.slipway("cancel", run)
    (folder / "go").touch()
    yard.until_over(run)


def _running_chain(yard: Yard, run: str, body: str, *overrides: str) -> str:
    """Launch a chain; return the job of its first link when that runs and the second one waits."""
    yard.chain(run, body, *(overrides or ["resilience.links=4"]), nodes="n1")
    yard.until_ready(run, 1)
    yard.until("the second link waits", lambda: len(yard.queued(run)) == 2, run)
    return yard.jobs[run]


def _requeue(yard: Yard, run: str, job: str) -> None:
    yard.slurm("scontrol", "update", f"JobId={job}", "Requeue=1")
    yard.slurm("scontrol", "requeue", job)

    def waits() -> bool:
        return yard.slurm("squeue", "--noheader", "--format=%T", f"--jobs={job}").split() == ["PENDING"]

    yard.until(f"{job} waits to begin again", waits, run)


def _process_states(job: str) -> set[str]:
    """Return the states of a job's processes on this machine, where all nodes are: ``T`` of a stopped one."""
    states = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"SLURM_JOB_ID={job}".encode() in (process / "environ").read_bytes().split(b"\0"):
                states.add((process / "stat").read_text().rpartition(")")[2].split()[0])
    return states
