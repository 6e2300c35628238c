"""`slipway hold`: keep waiting jobs from starting."""

from __future__ import annotations

import argparse

from launcher.cli.acting import add_targets, hold_and_tell
from launcher.jobs.acting import hold

_DESCRIPTION = """\
Keep the jobs of runs that wait from starting, and of an array the tasks that wait, until `slipway release`.
What runs goes on; `slipway cancel --save` lets it save and leave. Holding what is held changes nothing.

examples:
  slipway hold gpt3_126m                all launches of the run that wait
  slipway hold 4711                     only this job
  slipway release gpt3_126m

exit code:
  0  held
  1  the scheduler refused
  2  there is no such run, or nothing of it waits
  3  the state of some job is not known, or the scheduler did not answer
  4  jobs were held, and the output could not be written: stderr names them"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "hold",
        help="keep waiting jobs from starting",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_targets(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Hold the jobs."""
    return hold_and_tell(args, hold, "held")
