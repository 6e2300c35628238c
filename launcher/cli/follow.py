"""`slipway follow`: watch a launch until its job has ended."""

from __future__ import annotations

import argparse

from launcher.cli.status import add_base_results_dir
from launcher.monitor.follow import follow_and_tell
from launcher.runs.paths import find_run

_DESCRIPTION = """\
Watch a launch until its job has ended: its state, its progress and its losses, live on a terminal, as lines
in a pipe. Ctrl-C ends the watching, not the job.

examples:
  slipway follow gpt3_126m
  slipway follow gpt3_126m --launch 2
  slipway follow gpt3_126m | tee progress.txt

exit code:
  0    the job completed
  1    it did not, or its state could not be told for a minute
  2    there is no such run
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
    parser.add_argument("run_name", metavar="RUN", help="the run's name or directory")
    add_base_results_dir(parser)
    parser.add_argument("--launch", type=int, metavar="N", help="which launch (default: the newest)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Follow the launch."""
    return follow_and_tell(find_run(args.run_name, args.base_results_dir), args.launch)
