"""`slipway cancel`: cancel the jobs of runs, at once or with a checkpoint."""

from __future__ import annotations

import argparse
import sys

from launcher.cli.acting import (
    act_one_by_one,
    add_targets,
    chosen,
    describe,
    finish,
    has_effect,
    name_of,
    print_end,
    print_outcomes,
)
from launcher.errors import UserError
from launcher.exit_codes import WATCHING_ENDED
from launcher.jobs.acting import Effect, Outcome, wait_for_ends
from launcher.jobs.cancelling import cancel, with_followers
from launcher.jobs.status import LaunchStatus

_DESCRIPTION = """\
End the running and pending jobs of runs; pending ones first, so that none of them starts in between. To
launch a run again resumes it from its newest checkpoint; steps since then may be lost, unless --save saves
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


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "cancel",
        help="cancel the jobs of runs",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_targets(parser)
    parser.add_argument(
        "--save",
        action="store_true",
        help="let running jobs save and exit, as before a time limit; pending ones are cancelled",
    )
    parser.add_argument("--wait", action="store_true", help="wait until the scheduler confirms the end")
    parser.add_argument("-i", "--interactive", action="store_true", help="ask before each job")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Cancel the jobs."""
    if args.interactive and not sys.stdin.isatty():
        raise UserError("--interactive: stdin is not a terminal")
    if args.interactive:
        outcomes = act_one_by_one(args, chosen(args), lambda target: _ask_first(target, args), "cancelled")
    else:
        outcomes = cancel(with_followers(chosen(args)), args.save)
        print_outcomes(args, outcomes, "cancelled")
    if args.wait:
        outcomes = _wait(outcomes, args.json)
    elif has_effect(outcomes, Effect.SAVING) and not args.json:
        _hint("to watch it save: slipway logs -f RUN; launching it again resumes it")
    return finish(args, outcomes)


def _ask_first(target: LaunchStatus, args: argparse.Namespace) -> Outcome:
    if target.may_live and not _agrees(target):
        return Outcome(target, Effect.LEFT)
    (outcome,) = cancel([target], args.save)
    return outcome


def _agrees(target: LaunchStatus) -> bool:
    print(f"cancel {name_of(target)}, {describe(target)}? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = ""
    try:
        answer = sys.stdin.readline()
    finally:
        if not answer.endswith("\n"):  # also after Ctrl-C: the next output begins a line
            print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def _wait(outcomes: list[Outcome], quiet: bool) -> list[Outcome]:
    ended = {}
    try:
        for outcome in wait_for_ends(outcomes):
            ended[outcome.target.run_dir, outcome.target.number, outcome.target.task] = outcome
            if not quiet:
                print_end(outcome)
    except KeyboardInterrupt:
        _hint("stopped waiting; the jobs still end")
        raise SystemExit(WATCHING_ENDED) from None
    return [ended.get((o.target.run_dir, o.target.number, o.target.task), o) for o in outcomes]


def _hint(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
