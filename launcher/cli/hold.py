"""`slipway hold` and `slipway release`: keep waiting jobs from starting, and let them start."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from launcher.cli.acting import act_on_all, add_targets
from launcher.jobs.acting import Outcome, hold, release
from launcher.jobs.status import LaunchStatus

_HOLD = """\
Keep the waiting jobs of runs from starting, and of an array the waiting tasks, until `slipway release`.
Running jobs go on; `slipway cancel --save` lets them save and leave. Holding a held job changes nothing.

examples:
  slipway hold gpt3_126m                all waiting launches of the run
  slipway hold 4711                     only this job
  slipway release gpt3_126m

exit code:
  0  held
  1  the scheduler refused
  2  there is no such run, or nothing of it waits
  3  the state of some job is not known, or the scheduler did not answer
  4  jobs were held, and the output could not be written: stderr names them"""

_RELEASE = """\
Let the jobs of runs start that `slipway hold` kept from starting. A job that is not held just waits on; a job
that an administrator holds only an administrator can release.

examples:
  slipway release gpt3_126m             all held launches of the run
  slipway release 4711                  only this job

exit code:
  0  released
  1  the scheduler refused
  2  there is no such run, or nothing of it waits
  3  the state of some job is not known, or the scheduler did not answer
  4  jobs were released, and the output could not be written: stderr names them"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both verbs."""
    _add(subparsers, "hold", "keep waiting jobs from starting", _HOLD, hold, "held")
    _add(subparsers, "release", "let held jobs start", _RELEASE, release, "released")


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_text: str,
    description: str,
    act: Callable[[Sequence[LaunchStatus]], list[Outcome]],
    participle: str,
) -> None:
    parser = subparsers.add_parser(
        name,
        help=help_text,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_targets(parser)
    parser.set_defaults(run=lambda args: act_on_all(args, act, participle))
