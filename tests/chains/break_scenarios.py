"""Faults of an administrator, a full disk or a hasty user; all chains share one node."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

from slipway.common.node.marks import ChainEnd, end_chain
from tests.chains.chain_runs import CHAIN, PREFIX, ChainRuns
from tests.fakes.programs import write_programs
from tests.jobs.on_slurm.sandbox_runs import Done

# The user who ends the chain of `unbegun`.
SOMEBODY = "somebody"
# The payload of a link that runs until a file allows it to fail.
FAILS_ON_REQUEST = "ready; until [[ -e $work/go ]]; do sleep 0.2; done; exit 1"


def requeued(runs: ChainRuns, run: str) -> None:
    """Requeue, as an administrator, a link whose job was submitted with --no-requeue."""
    body = "((${SLURM_RESTART_COUNT:-0})) || wait_to_save 1\nsave 3\n"
    job = _running_chain(runs, run, body)
    _requeue(runs, run, job)
    runs.answers[run] = runs.slipway("status", run, "--json")
    # Slurm would wait for two minutes; and slurmd takes no job in the second in which it was killed.
    time.sleep(1.1)
    runs.slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    runs.until_over(run)


def cancelled_with_requeue(runs: ChainRuns, run: str) -> None:
    """Cancel with `scancel` a job that Slurm may requeue: the job cannot tell it from a requeue."""
    job = _running_chain(runs, run, "wait_to_save 1\n")
    runs.slurm("scontrol", "update", f"JobId={job}", "Requeue=1")
    runs.slurm("scancel", job)
    runs.until_over(run)


def cancelled_while_requeued(runs: ChainRuns, run: str) -> None:
    """Cancel with `slipway cancel` a chain whose current link waits to begin again."""
    job = _running_chain(runs, run, "wait_to_save 1\n")
    _requeue(runs, run, job)
    runs.answers[run] = runs.slipway("cancel", run)
    runs.until_over(run)


def unbegun(runs: ChainRuns, run: str) -> None:
    """End a chain before its first link begins: the job leaves."""
    runs.chain(run, "save 1\n", "resilience.links=3", "cluster.sbatch={hold: True}", nodes="n1")
    end_chain(runs.launch_directory(run), ChainEnd(SOMEBODY, f"cancelled by {SOMEBODY}"))
    runs.slurm("scontrol", "release", runs.jobs[run])
    runs.until_over(run)


def deleted(runs: ChainRuns, run: str) -> None:
    """Remove a run whose chain is queued with `rm -rf`, and launch it again."""
    body = f"case $link in 1) {FAILS_ON_REQUEST} ;; *) save 3 ;; esac\n"
    overrides = ["resilience.links=6"]
    first = _running_chain(runs, run, body, *overrides)
    (second,) = {*runs.queued(run)} - {first}
    shutil.rmtree(runs.directory / "results" / run)
    chosen = [*CHAIN, f"training.run.name={run}", f"cluster.python={runs.directory / run}.sh"]
    done = runs.begin(*chosen, *overrides, nodes="n1")
    assert done.returncode == 0, done
    runs.jobs[run] = json.loads(done.stdout)["job_id"]
    runs.answers[run] = runs.slipway("cancel", second)
    (runs.work(run) / "go").touch()
    runs.until_gone(run, first)
    runs.until_over(run)


def full_disk(runs: ChainRuns, run: str) -> None:
    """Remove claims, as on a full disk: of a link that ended, then of those that run and wait as well."""
    body = "((link > 2)) || { save $link; exit 1; }\nbe_deaf\n"
    runs.chain(run, body, "resilience.links=9", nodes="n1")
    runs.until_ready(run, 3)
    runs.until("the fourth link waits", lambda: len(runs.links(run)) == 4, run)
    marks = runs.launch_directory(run) / "marks"
    answers = []
    for missing in ((2,), (3, 4)):
        for link in missing:
            (marks / f"job.{link}").unlink()
        answers += runs.ask_json("status", run)
    # Now nothing at all could be written since the first link.
    for path in marks.iterdir():
        if path.name != "job" and not path.name.startswith(runs.jobs[run]):
            path.unlink()
    answers += runs.ask_json("status", run)
    runs.answers[f"{run}_status"] = Done("status", 0, json.dumps(answers), "")
    runs.answers[run] = runs.slipway("cancel", "--wait", run)
    runs.answers[f"{run}_left"] = Done("squeue", 0, " ".join(runs.queued(run)), "")
    runs.command("scancel", f"--name={PREFIX}{run}")
    runs.until_over(run)


def injected(runs: ChainRuns, run: str) -> None:
    """Replace the numbers of a mark by commands."""
    job = _running_chain(runs, run, "case $link in 1) wait_to_save 3 ;; *) save 5 ;; esac\n")
    marks = runs.launch_directory(run) / "marks"
    started = marks / f"{job}.0.started.json"
    content = json.loads(started.read_text())
    for name in ("checkpoint", "failures", "link", "started", "serial"):
        content[name] = f"BASH_VERSINFO[$(touch {runs.work(run)}/PWNED-{name})]"
    started.write_text(json.dumps(content) + "\n")
    runs.slurm("scancel", "--batch", "--signal=USR1", job)
    runs.until_over(run)


def suspended(runs: ChainRuns, run: str) -> None:
    """Try `slipway cancel --save` while the job is suspended and nothing could save, then again after it."""
    job = _running_chain(runs, run, "wait_to_save 3\n")
    runs.slurm("scontrol", "suspend", job)
    runs.until(f"{job} is stopped", lambda: _process_states(runs, job) == {"T"}, run)
    runs.answers[run] = runs.slipway("cancel", "--save", run)
    runs.answers[f"{run}_queue"] = runs.command(
        "squeue", "--noheader", "--format=%i %T", f"--name={PREFIX}{run}"
    )
    runs.answers[f"{run}_end"] = Done("end", 0, str(runs.end(run)), "")
    runs.slurm("scontrol", "resume", job)
    # A signal that comes before the node has resumed the job is lost, though Slurm says that it runs.
    runs.until(f"{job} is resumed", lambda: "T" not in _process_states(runs, job), run)
    runs.answers[f"{run}_again"] = runs.slipway("cancel", "--save", run)
    runs.until_over(run)


def begun_early(runs: ChainRuns, run: str) -> None:
    """Remove the dependency of the second link while the first one runs."""
    first = _running_chain(runs, run, "case $link in 1) wait_to_save 3 ;; *) save 5 ;; esac\n")
    (second,) = {*runs.queued(run)} - {first}
    runs.slurm("scontrol", "update", f"JobId={second}", "Dependency=")
    runs.until("the second link has begun", lambda: "waits for the end of job" in runs.log(run), run)
    runs.slurm("scancel", "--batch", "--signal=USR1", first)
    runs.until_over(run)


def cut_short(runs: ChainRuns, run: str) -> None:
    """Grant the first link a minute of the hour that it asks for, as a site's filter does."""
    body = "case $link in 1) wait_to_save 3 ;; *) save 5 ;; esac\n"
    asked = ["training.run.time_limit=1:00:00", "cluster.begin=now+1hour", "resilience.links=4"]
    runs.chain(run, body, *asked, nodes="n1")
    runs.slurm("scontrol", "update", f"JobId={runs.jobs[run]}", "TimeLimit=1", "StartTime=now")
    runs.until_ready(run, 1)
    runs.answers[run] = runs.slipway("status", run)
    runs.until_over(run)


# On a node Slurm takes the job and answers when the test allows it; or it takes the job late, too.
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


def cancelled_before_submission(runs: ChainRuns, run: str) -> None:
    """Run `slipway cancel` while the next link is being submitted: Slurm takes it after that."""
    _cancelled_in_submission(runs, run, "asked")


def cancelled_before_answer(runs: ChainRuns, run: str) -> None:
    """Run `slipway cancel` when Slurm has taken the next link, but the job does not know yet."""
    _cancelled_in_submission(runs, run, "taken")


def _cancelled_in_submission(runs: ChainRuns, run: str, moment: str) -> None:
    folder = write_programs(runs.directory / f"{run}-programs", {"sbatch": SLOW})
    if moment == "taken":
        (folder / "answers-late").touch()
    runs.chain(run, "wait_to_save 1\n", "resilience.links=4", nodes="n1", programs=folder)
    runs.until(f"sbatch is {moment}", (folder / moment).exists, run)
    runs.answers[run] = runs.slipway("cancel", run)
    (folder / "go").touch()
    runs.until_over(run)


def _running_chain(runs: ChainRuns, run: str, body: str, *overrides: str) -> str:
    """Launch a chain; return the job of its first link when that runs and the second one waits."""
    runs.chain(run, body, *(overrides or ["resilience.links=4"]), nodes="n1")
    runs.until_ready(run, 1)
    runs.until("the second link waits", lambda: len(runs.queued(run)) == 2, run)
    return runs.jobs[run]


def _requeue(runs: ChainRuns, run: str, job: str) -> None:
    runs.slurm("scontrol", "update", f"JobId={job}", "Requeue=1")
    runs.slurm("scontrol", "requeue", job)

    def waits() -> bool:
        return runs.slurm("squeue", "--noheader", "--format=%T", f"--jobs={job}").split() == ["PENDING"]

    runs.until(f"{job} waits to begin again", waits, run)


def _process_states(runs: ChainRuns, job: str) -> set[str]:
    """Return the states of a job's processes on this machine, where all nodes are: ``T`` of a stopped one."""
    states = set()
    # Another sandbox of this machine may have a job of this number.
    variables = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={runs.environment['SLURM_CONF']}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variables <= set((process / "environ").read_bytes().split(b"\0")):
                states.add((process / "stat").read_text().rpartition(")")[2].split()[0])
    return states
