"""The verbs that act on jobs: `slipway cancel`, `hold`, `release` and `attach`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.cli.runs import RUN_HELP, add_base_results_dir, add_run, find_all, print_resumable, select_run
from launcher.errors import WATCHING_ENDED, UserError, escape
from launcher.jobs.acting import Effect, Outcome, act_on_waiting, exit_code, sort_targets, wait_for_ends
from launcher.jobs.attaching import AttachPoint, attach
from launcher.jobs.cancelling import add_followers, cancel
from launcher.jobs.lookup import RunRef
from launcher.jobs.status import LaunchStatus, named_statuses
from launcher.monitor.progress import Progress
from launcher.monitor.readers import newest_events
from launcher.monitor.run_status import links_to_json
from launcher.runs.paths import display_path
from launcher.slurm.commands import WITHOUT_SLURM
from launcher.slurm.states import Action, State
from launcher.ui import tables
from launcher.ui.terminal import agrees, print_json, print_message, print_stderr


def add_targets(parser: argparse.ArgumentParser) -> None:
    """Add the runs that a verb acts on."""
    text = f"{RUN_HELP}: then only that one; a sweep is all of its points"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    add_option(parser, "--launch N", "only this launch of the run (default: all)")
    add_base_results_dir(parser)
    add_option(parser, "--json", "print a list of objects, one for each job")


def chosen(args: argparse.Namespace) -> list[LaunchStatus]:
    """Return the named jobs in the order in which to act on them; raise UserError if one is not known."""
    refs = find_all(args.runs, args.base_results_dir)
    if args.launch is not None:
        if len(refs) > 1:
            raise UserError(f"--launch {args.launch}: name one run; {len(refs)} are named")
        refs = [RunRef(ref.run_dir, args.launch) for ref in refs]
    for ref in refs:
        name, base = ref.run_dir.name, args.base_results_dir.absolute()
        if name in args.runs and not ref.run_dir.is_relative_to(base):  # a directory seen earlier has it
            here = display_path(args.base_results_dir)
            print_message(
                f"{escape(name)} is not in {escape(here)}: it is {escape(display_path(ref.run_dir))}"
            )
    return sort_targets(named_statuses(refs))


def print_outcomes(args: argparse.Namespace, outcomes: Iterable[Outcome], verb: str) -> list[Outcome]:
    """Print each outcome as it comes, unless as JSON; `verb` is a participle, as in `was not cancelled`."""
    printed = []
    for outcome in outcomes:
        printed.append(outcome)
        if not args.json:
            print_outcome(outcome, verb)
    return printed


def finish(args: argparse.Namespace, outcomes: Sequence[Outcome]) -> int:
    """Print the objects if they were asked for; return the exit code."""
    if args.json:
        print_json([_to_json(outcome) for outcome in outcomes])
    return exit_code(outcomes)


def print_outcome(outcome: Outcome, verb: str) -> None:
    """Print one line: on stderr, if the request failed."""
    name, how, message = name_of(outcome.target), describe(outcome.target), outcome.message
    match outcome.effect:
        case Effect.HELD | Effect.RELEASED if outcome.target.chain and outcome.target.runs:
            waiting = outcome.target.waiting_id
            line = f"{outcome.effect.value} job {waiting}, the next link of {name}: it is {how}"
        case Effect.HELD | Effect.RELEASED if outcome.target.runs:
            line = f"{outcome.effect.value} the waiting tasks of {name}: it was {how}"
        case Effect.CANCELLED | Effect.HELD | Effect.RELEASED:
            line = f"{outcome.effect.value} {name}: it was {how}"
        case Effect.SAVING:
            line = f"asked {name} to save and exit: it is {how}"
        case Effect.AS_ASKED:
            line = f"{name}: {message}: {how}"
        case Effect.GIVEN_UP:
            line = f"gave up {name}: {message}"
        case Effect.LEFT:
            line = f"left {name} alone: it is {how}" + (f"; {message}" if message else "")
        case Effect.NOT_VALID:
            return _complain(f"{name} cannot be {verb}: it is {how}", message)
        case Effect.REFUSED:
            message = (message or "").removeprefix(f"job {outcome.target.job_id} was not {verb}: ")
            return _complain(f"{name} was not {verb}: {message}")
        case Effect.UNKNOWN:
            return _complain(f"{name}: whether it could be {verb} is not known", message)
    return print(line, flush=True)


def print_end(outcome: Outcome) -> None:
    """Print how a job ended, after waiting for it."""
    name = name_of(outcome.target)
    if outcome.end is None:
        return _complain(f"{name}: whether it has ended is not known", outcome.message)
    after = f" after {outcome.end.elapsed}" if outcome.end.elapsed and outcome.target.runs else ""
    reason = f" ({outcome.end.reason})" if outcome.end.reason else ""
    return print(f"{name} has ended: {outcome.end.state.value}{reason}{after}", flush=True)


def name_of(target: LaunchStatus) -> str:
    link = f", link {target.chain}" if target.chain else ""
    launch = f" (launch {target.number}{link})" if target.number else ""
    return f"job {target.job_id} of {target.run}{launch}" if target.job_id else f"{target.run}{launch}"


def describe(target: LaunchStatus) -> str:
    """Describe a job's status: ``RUNNING on n[1-2] for 00:01:30, step 120/300``."""
    parts = [target.state.value]
    if target.reason and not target.task:
        # Slurm's word is enough for why it waits, and the counts for the tasks of an array.
        end = ";" if target.tasks else ":"
        is_short = target.state is State.PENDING or (target.tasks and target.state.is_live)
        parts.append(f"({target.reason.partition(end)[0] if is_short else target.reason})")
    if target.nodes and target.runs:
        parts.append(f"on {target.nodes}")
    if target.elapsed and target.state is not State.PENDING:
        parts.append(f"{'for' if target.state.is_live else 'after'} {target.elapsed}")
    step = tables.steps(*_steps(target))
    return " ".join(parts) + ("" if step == tables.UNKNOWN else f", step {step}")


def _steps(target: LaunchStatus) -> tuple[int | None, int | None]:
    if target.launch is None or target.state in (State.PENDING, State.NOT_SUBMITTED):
        return None, None
    progress = Progress(newest_events(target.launch, restarted=target.has_restarted))
    return progress.step, progress.max_steps


def _complain(line: str, message: str | None = None) -> None:
    lines = [*line.splitlines(), *(message or "").splitlines()]
    print_message("\n  ".join(line.strip() for line in lines))


def _to_json(outcome: Outcome) -> dict[str, Any]:
    target, end = outcome.target, outcome.end
    step, max_steps = _steps(target)
    return {
        "run": target.run,
        "run_dir": str(target.run_dir),
        "launch": target.number,
        "job_id": target.job_id,
        "link": target.chain.current if target.chain else None,
        "links": links_to_json(target.chain),
        "done": outcome.effect.value,
        "words": outcome.message,
        "state": target.state.value,
        "reason": target.reason,
        "node_list": target.nodes,
        "elapsed": target.elapsed,
        "step": step,
        "max_steps": max_steps,
        "end": end and {"state": end.state.value, "reason": end.reason, "elapsed": end.elapsed},
    }


# --- hold and release

_EXIT_CODES = """
exit code:
  0  {done}
  1  the scheduler refused
  2  there is no such run, or none of its jobs is pending
  3  the state of some job is unknown, or the scheduler did not answer
  4  jobs were {done}, and the output could not be written: stderr names them"""

_HOLD = """\
Keep the pending jobs of runs, and pending tasks of arrays, from starting until `slipway release`. Running
jobs continue; `slipway cancel --save` lets them save and end. Holding a held job changes nothing.

examples:
  slipway hold gpt3_126m                all pending launches of the run
  slipway hold 4711                     only this job
  slipway release gpt3_126m
""" + _EXIT_CODES.format(done="held")

_RELEASE = """\
Let jobs of runs start that `slipway hold` held. Pending jobs that are not held stay as they are; only an
administrator can release a job that an administrator holds.

examples:
  slipway release gpt3_126m             all held launches of the run
  slipway release 4711                  only this job
""" + _EXIT_CODES.format(done="released")


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "cancel", run_cancel, text=_CANCEL)
    add_targets(parser)
    text = "let running jobs save and exit, as before a time limit; pending ones are cancelled"
    add_option(parser, "--save", text)
    add_option(parser, "--wait", "wait until the scheduler confirms the end")
    add_option(parser, "-i --interactive", "ask before each job")
    run_hold, run_release = partial(_act, Action.HOLD), partial(_act, Action.RELEASE)
    add_targets(add_verb(verbs, "hold", run_hold, text=_HOLD))
    add_targets(add_verb(verbs, "release", run_release, text=_RELEASE))
    parser = add_verb(verbs, "attach", run_attach, text=_ATTACH)
    parser.usage = "slipway attach [OPTION ...] RUN [-- COMMAND [ARGUMENT ...]]"
    add_run(parser)
    add_option(parser, "--rank N", "the node of global rank N (default: 0)")
    add_option(parser, "--node NAME", "on this node of the job")
    add_option(parser, "--outside", "on the node itself, not in the container")
    add_option(parser, "-t --tty", "give COMMAND a terminal too")
    add_option(parser, "--print", "print the command line to stdout, and run nothing")


def _act(action: Action, args: argparse.Namespace) -> int:
    return finish(args, print_outcomes(args, act_on_waiting(chosen(args), action), action.value))


# --- cancel

_CANCEL = """\
End the running and pending jobs of runs; pending ones first, so that none of them starts in between.
`slipway resume RUN` continues from the newest checkpoint; steps since then may be lost, unless --save saves
them first.

Like scancel and `kubectl delete` this does not ask: it ends the jobs that you name and lists them. -i asks.

examples:
  slipway cancel gpt3_126m               all pending and running launches of the run
  slipway cancel --save --wait gpt3_126m let the trainer save and exit, and wait until it has
  slipway cancel gpt3_126m --launch 2    only this launch
  slipway cancel 4711 4712_3             only these jobs; of the array only this task
  slipway cancel --json gpt3_126m | jq -r '.[] | select(.done == "cancelled") | .job_id'

exit code:
  0    no job is pending or running any more, or all are about to end
  1    the scheduler refused to end some job
  2    there is no such run or launch
  3    the state of some job is unknown, or the scheduler did not answer
  4    jobs were ended, and the output could not be written: stderr names them
  130  Ctrl-C while waiting; the jobs still end"""


def run_cancel(args: argparse.Namespace) -> int:
    if args.interactive and not sys.stdin.isatty():
        raise UserError("--interactive: stdin is not a terminal")
    targets = add_followers(chosen(args))
    each = (_ask_first(target, args.save) for target in targets)
    outcomes = print_outcomes(args, each if args.interactive else cancel(targets, args.save), "cancelled")
    if args.wait:
        outcomes = _wait(outcomes, args.json)
        print_resumable(outcome.end for outcome in outcomes if outcome.end and not args.json)
    elif any(outcome.effect is Effect.SAVING for outcome in outcomes) and not args.json:
        saving = next(outcome.target for outcome in outcomes if outcome.effect is Effect.SAVING)
        run = escape(shlex.quote(display_path(saving.run_dir)))
        print_stderr(f"to watch it save: slipway logs -f {run}; to continue it: slipway resume {run}")
    return finish(args, outcomes)


def _ask_first(target: LaunchStatus, save: bool) -> Outcome:
    if target.may_live:
        print(f"cancel {name_of(target)}, {describe(target)}? ", end="", file=sys.stderr)
        if not agrees(sys.stderr):
            return Outcome(target, Effect.LEFT)
    (outcome,) = cancel([target], save)
    return outcome


def _wait(outcomes: list[Outcome], quiet: bool) -> list[Outcome]:
    ended = {}
    try:
        for outcome in wait_for_ends(outcomes):
            ended[outcome.target.run_dir, outcome.target.number, outcome.target.task] = outcome
            if not quiet:
                print_end(outcome)
    except KeyboardInterrupt:
        print_stderr("stopped waiting; the jobs still end")
        raise SystemExit(WATCHING_ENDED) from None
    return [ended.get((o.target.run_dir, o.target.number, o.target.task), o) for o in outcomes]


# --- attach

_ATTACH = """\
Open a shell next to a rank of a running job: on its node, in its container if it has one (named or not, but
not Apptainer's), in its working directory and with its environment (RANK, MASTER_ADDR,
CUDA_VISIBLE_DEVICES, ...). It is a step of the job, and shares its nodes and GPUs with the training. Exiting
the shell does not end the job; the shell ends with the job. The command line goes to stderr first. An Enroot
container shares the node's processes: `pkill` in it ends all of yours on the node, and as root everybody's.

examples:
  slipway attach gpt3_126m                     rank 0
  slipway attach gpt3_126m --rank 9            the node of rank 9
  slipway attach gpt3_126m --node n2           that node, as one of its ranks
  slipway attach gpt3_126m -- nvidia-smi       a command instead of a shell, without a terminal
  slipway attach gpt3_126m -t -- htop          one with a terminal
  slipway attach gpt3_126m --outside           on the node itself, outside of the container
  slipway attach gpt3_126m --print             print the command line, and run nothing

exit code:
  that of the shell or the command, or srun's own
  2  there is no such run, or it is not running
  3  its state is not known"""


def run_attach(args: argparse.Namespace) -> int:
    """Print the command line, and become it."""
    # A printed command line is for a terminal, wherever it is printed.
    is_terminal = (args.tty or not args.command) and (args.print or sys.stdin.isatty())
    place = AttachPoint(args.rank, args.node, inside=not args.outside)
    attachment = attach(select_run(args), place, args.command, is_terminal)
    print(attachment.line, file=sys.stdout if args.print else sys.stderr, flush=True)
    if args.print:
        return 0
    try:
        os.execvpe(attachment.argv[0], attachment.argv, dict(attachment.environment))
    except FileNotFoundError as error:
        raise UserError(f"{attachment.argv[0]} is not on this machine", hint=WITHOUT_SLURM) from error
