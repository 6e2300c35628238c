"""Stages after a chain: each runs once, after the success of the chain, whatever becomes of a link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.chains.chain_runs import ChainRuns
from tests.fakes.programs import write_programs

# The name of the stage's run.
AFTER = "{}_after"
PROGRAM = """#!/bin/bash
echo "$SLURM_JOB_ID $(squeue --noheader --states=RUNNING --format=%j | grep -cx 'chain-{run}')" >>{work}/after
"""


def follow(
    runs: ChainRuns,
    run: str,
    body: str,
    *overrides: str,
    program: str = PROGRAM,
    programs: Path | None = None,
    nodes: str = "n1",
) -> None:
    """Launch a chain, and after it a program that records its job and how many links still run."""
    path = runs.directory / f"{run}-program"
    path.write_text(program.format(run=run, work=runs.work(run)))
    path.chmod(0o755)
    runs.chain(
        run,
        body,
        "stages=[training,command]",
        f"command.run.name={AFTER.format(run)}",
        f"command.argv=[{path}]",
        "command.run.time_limit=10",
        *overrides,
        nodes=nodes,
        programs=programs,
    )


def until_both_are_over(runs: ChainRuns, run: str) -> None:
    runs.until_over(run)
    runs.until_over(AFTER.format(run))


def continued(runs: ChainRuns, run: str) -> None:
    """Launch three links, of which two fail: the stage waits for the third."""
    body = "wait=$work/go.$link\nready\nuntil [[ -e $wait ]]; do sleep 0.1; done\nsave $link\n((link > 2))\n"
    follow(runs, run, body, "resilience.links=9")
    for link in (1, 2, 3):
        runs.until_ready(run, link)
        if link == 2:
            runs.answers[run] = runs.slipway("status", AFTER.format(run))
        (runs.work(run) / f"go.{link}").touch()
    until_both_are_over(runs, run)


def given_up(runs: ChainRuns, run: str) -> None:
    """Launch a chain that makes no progress: the stage has nothing to do."""
    follow(runs, run, "exit 1\n", "resilience.links=9", "resilience.max_failures=2")
    until_both_are_over(runs, run)


def used_up(runs: ChainRuns, run: str) -> None:
    """Use up all links before the work is done."""
    follow(runs, run, "save $link\nexit 1\n", "resilience.links=2")
    until_both_are_over(runs, run)


def called_off(runs: ChainRuns, run: str) -> None:
    """Run `slipway cancel` of the chain, while its second link runs."""
    follow(runs, run, "((link > 1)) || { save 1; exit 1; }\nbe_deaf\n", "resilience.links=9")
    runs.until_ready(run, 2)
    runs.until("the third link waits", lambda: len(runs.links(run)) == 3, run)
    runs.slipway("cancel", run)
    until_both_are_over(runs, run)


def called_off_waiting(runs: ChainRuns, run: str) -> None:
    """Cancel all links with `scancel` while none runs: no supervisor is there to tell the stage."""
    follow(runs, run, "exit 0\n", "resilience.links=9", "cluster.begin=now+1hour")
    runs.slurm("scancel", *runs.queued(run))
    runs.slurm("scontrol", "update", f"JobId={runs.queued(AFTER.format(run))[0]}", "StartTime=now")
    until_both_are_over(runs, run)


# Kills the supervisor, which has left its mark and is about to cancel the next link.
MURDEROUS = """if [[ $(uname -n) == n[0-9]* ]]; then
    kill -9 $PPID
    exit 1
fi
exec $real "$@"
"""


def killed_when_done(runs: ChainRuns, run: str) -> None:
    """Kill the link between the mark that all is done and the end of the chain."""
    folder = runs.directory / "murderous-programs"
    write_programs(folder, {"scancel": MURDEROUS})
    follow(runs, run, "save 4\n", "resilience.links=9", programs=folder)
    until_both_are_over(runs, run)


# Submits the stage only when the first link waits for that, or the second one runs.
LATE = """if [[ $(uname -n) == n[0-9]* || $* != *_after/* || " $* " == *" --test-only "* ]]; then
    exec $real "$@"
fi
for ((i = 0; i < 600; i++)); do
    [[ ! -e {work}/second ]] && ! grep -qs "waits for the submission" {logs} || break
    sleep 0.1
done
$real "$@"
code=$?
touch {work}/submitted
exit $code
"""
# The second link ends when the stage waits for it, or has begun and left.
SECOND = """((link > 1)) || exit 1
touch $work/second
for ((i = 0; i < 600; i++)); do
    reason=$(squeue --noheader --name={stage} --format=%r)
    [[ -e $work/submitted && $reason =~ ^(Dependency)?$ ]] && break
    sleep 0.1
done
save 1
"""


def submitted_late(runs: ChainRuns, run: str) -> None:
    """Fail the first link before the stage is submitted: the stage waits for the second one all the same."""
    folder, logs = runs.directory / "late-programs", f"{runs.directory}/results/{run}/log-*.out"
    late = LATE.replace("{work}", str(runs.work(run))).replace("{logs}", logs)
    write_programs(folder, {"sbatch": late})
    body = SECOND.replace("{stage}", f"chain-{AFTER.format(run)}")
    # Of two nodes one is free for the stage while the second link runs.
    follow(runs, run, body, "resilience.links=9", programs=folder, nodes="n1,n2")
    until_both_are_over(runs, run)


# The commands are missing on a node, and not where the launcher runs.
NO_COMMANDS = """if [[ $(uname -n) == n[0-9]* ]]; then
    echo "${0##*/}: command not found" >&2
    exit 127
fi
exec $real "$@"
"""


def without_commands(runs: ChainRuns, run: str) -> None:
    """Run on nodes without sbatch and scancel: all links are submitted at launch."""
    folder = runs.directory / "commandless-programs"
    for name in ("sbatch", "scancel"):
        write_programs(folder, {name: NO_COMMANDS})
    body = "case $link in 1) save 3; exit 1 ;; *) exit 0 ;; esac\n"
    follow(runs, run, body, "resilience.links=4", "resilience.submit=launch", programs=folder)
    until_both_are_over(runs, run)


# The program of a repeated stage: each of its jobs waits until it may go on.
SLOW = """#!/bin/bash
echo "begin $SLURM_JOB_ID" >>{work}/after
until [[ -e {work}/go.$SLURM_JOB_ID || -e {work}/go.all ]]; do sleep 0.1; done
echo "end $SLURM_JOB_ID $(ls {work}/../results/{run}/checkpoints | wc -l)" >>{work}/after
"""


def repeated(runs: ChainRuns, run: str) -> None:
    """Save five checkpoints in two links; the stage reads every second one, slower than they come."""
    body = """case $link in
    1) save 1; ready; until [[ -e $work/go.1 ]]; do sleep 0.1; done; save 2
       until [[ -e $work/go.2 ]]; do sleep 0.1; done; save 3; save 4
       until [[ -e $work/go.5 ]]; do sleep 0.1; done; exit 1 ;;
    *) ready; until [[ -e $work/go.3 ]]; do sleep 0.1; done; save 6; save 7
       until [[ -e $work/go.4 ]]; do sleep 0.1; done ;;
    esac
    """
    work = runs.work(run)
    follow(runs, run, body, "resilience.links=9", "command.every=2", program=SLOW)
    after = AFTER.format(run)
    runs.until_ready(run, 1)
    (work / "go.1").touch()
    runs.until("a job looks at two checkpoints", lambda: len(runs.queued(after)) == 2, run)
    runs.until("it runs", lambda: (work / "after").exists(), run)
    runs.answers[f"{run}_running"] = runs.slipway("status", after)
    (work / "go.2").touch()
    runs.until("the next one waits", lambda: len(runs.queued(after)) == 3, run)
    (work / "go.5").touch()
    runs.until_ready(run, 2)
    (work / "go.3").touch()
    runs.until(
        "two further ones are counted", lambda: '"checkpoint": 7' in counted_checkpoints(runs, after), run
    )
    (work / "go.all").touch()
    (work / "go.4").touch()
    until_both_are_over(runs, run)


def counted_checkpoints(runs: ChainRuns, run: str) -> str:
    path = runs.launch_directory(run) / "marks/checkpoints.json"
    return path.read_text() if path.exists() else ""


# Refuses the stage's jobs on a node.
REFUSING = """if [[ $(uname -n) == n[0-9]* && $* == *_after/* ]]; then
    echo "sbatch: error: Batch job submission failed: Access denied" >&2
    exit 1
fi
exec $real "$@"
"""


def refused(runs: ChainRuns, run: str) -> None:
    """Refuse the jobs of a repeated stage: the training goes on."""
    folder = runs.directory / "refusing-programs"
    write_programs(folder, {"sbatch": REFUSING})
    body = "save 1\nready\nuntil [[ -e $work/go ]]; do sleep 0.1; done\nsave 2\n"
    follow(runs, run, body, "command.every=1", programs=folder)
    runs.until("it is refused", lambda: "Access denied" in runs.log(run), run)
    (runs.work(run) / "go").touch()
    until_both_are_over(runs, run)


FOLLOWING: dict[str, Callable[[ChainRuns, str], object]] = {
    "continued": continued,
    "given_up": given_up,
    "used_up": used_up,
    "called_off": called_off,
    "called_off_waiting": called_off_waiting,
    "killed_when_done": killed_when_done,
    "submitted_late": submitted_late,
    "without_commands": without_commands,
    "repeated": repeated,
    "refused": refused,
}
