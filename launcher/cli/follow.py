"""`slipway follow`: watch a launch until its job has ended."""

from __future__ import annotations

import argparse

from launcher.cli.runs import add_run, named_run
from launcher.monitor.follow import follow_and_tell

_DESCRIPTION = """\
Watch a launch until its job has ended: its state, its progress and its losses, live on a terminal, as lines
in a pipe. Ctrl-C ends the watching, not the job.

examples:
  slipway follow gpt3_126m
  slipway follow gpt3_126m --launch 2
  slipway follow gpt3_126m | tee progress.txt

exit code:
  0    the job completed
  1    it did not
  2    there is no such run
  3    its state was not known for a minute
  75   the training was interrupted: launching it again continues
  130  Ctrl-C; the job goes on"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "follow",
        help="watch a launch until its job has ended",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Not `run`: that name is taken by the function behind a verb.
    add_run(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Follow the launch."""
    ref = named_run(args)
    return follow_and_tell(ref.run_dir, ref.launch)
