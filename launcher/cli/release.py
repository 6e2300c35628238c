"""`slipway release`: let held jobs start."""

from __future__ import annotations

import argparse

from launcher.cli.acting import add_targets, hold_and_tell
from launcher.jobs.acting import release

_DESCRIPTION = """\
Let the jobs of runs start that `slipway hold` kept from it. What is not held just waits on; what an
administrator holds only an administrator can release.

examples:
  slipway release gpt3_126m             all launches of the run that are held
  slipway release 4711                  only this job

exit code:
  0  released
  1  the scheduler refused
  2  there is no such run, or nothing of it waits
  3  the state of some job is not known, or the scheduler did not answer
  4  jobs were released, and the output could not be written: stderr names them"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "release",
        help="let held jobs start",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_targets(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Release the jobs."""
    return hold_and_tell(args, release, "released")
