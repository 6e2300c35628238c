"""`slipway hold` and `slipway release`: keep pending jobs from starting, and let held jobs start."""

from __future__ import annotations

import argparse

from launcher.cli.acting import act_on_all, add_targets
from launcher.jobs.acting import hold, release

_EXIT_CODES = """
exit code:
  0  {done}
  1  the scheduler refused
  2  there is no such run, or none of its jobs is pending
  3  the state of some job is unknown, or the scheduler did not answer
  4  jobs were {done}, and the output could not be written: stderr names them"""

_HOLD = """\
Keep the pending jobs of runs from starting until `slipway release`; of an array its pending tasks. Running
jobs continue; `slipway cancel --save` lets them save and end. Holding a held job changes nothing.

examples:
  slipway hold gpt3_126m                all pending launches of the run
  slipway hold 4711                     only this job
  slipway release gpt3_126m
"""

_RELEASE = """\
Let jobs of runs start that `slipway hold` held. Pending jobs that are not held stay as they are; only an
administrator can release a job that an administrator holds.

examples:
  slipway release gpt3_126m             all held launches of the run
  slipway release 4711                  only this job
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both verbs."""
    for name, summary, description, run in (
        ("hold", "keep pending jobs from starting", _HOLD + _EXIT_CODES.format(done="held"), run_hold),
        ("release", "let held jobs start", _RELEASE + _EXIT_CODES.format(done="released"), run_release),
    ):
        parser = subparsers.add_parser(
            name,
            help=summary,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_targets(parser)
        parser.set_defaults(run=run)


def run_hold(args: argparse.Namespace) -> int:
    """Hold the jobs; return the exit code."""
    return act_on_all(args, hold, "held")


def run_release(args: argparse.Namespace) -> int:
    """Release the jobs; return the exit code."""
    return act_on_all(args, release, "released")
