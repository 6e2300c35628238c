"""`slipway logs`: print the log of a launch, and follow it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launcher.cli.status import add_base_results_dir
from launcher.errors import UserError
from launcher.monitor.launches import Launch, ask, open_launch
from launcher.monitor.logs import LogReader, follow_log, rank_logs, read_all, tail_offset
from launcher.runs.paths import find_run
from launcher.schedulers.base import JobStatus

_DESCRIPTION = """\
Print the log of a run's job; with -f as it grows, until the job has ended.

examples:
  slipway logs gpt3_126m              the log of the newest launch
  slipway logs gpt3_126m -n 50 -f     its last 50 lines, and what follows
  slipway logs gpt3_126m --launch 1   an earlier launch
  slipway logs gpt3_126m --rank 3     what rank 3 logged itself

exit code:
  0    the log was printed; with -f: and the job completed
  1    there is no log yet; with -f: the job did not complete, or its state could not be told for a minute
  2    there is no such run, launch or rank
  130  Ctrl-C; the job goes on"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "logs",
        help="print the log of a launch, and follow it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_name", metavar="RUN", help="the run's name or directory")
    add_base_results_dir(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument(
        "-n", "--lines", type=_lines, metavar="N", help="only the last N lines (default: all)"
    )
    parser.add_argument("--launch", type=int, metavar="N", help="which launch (default: the newest)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--err", action="store_true", help="stderr, where the cluster keeps it apart")
    which.add_argument("--rank", type=int, metavar="N", help="the log that global rank N wrote")
    parser.set_defaults(run=run)


def _lines(text: str) -> int | None:
    if text == "all":
        return None
    if text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of lines nor 'all'")


def run(args: argparse.Namespace) -> int:
    """Print the log."""
    launch = open_launch(find_run(args.run_name, args.base_results_dir), args.launch)
    path = _choose(launch, args)
    if not args.follow:
        return _print(launch, path, args.lines)
    return follow_to_end(launch, path, args.lines)


def follow_to_end(launch: Launch, path: Path, lines: int | None = None) -> int:
    """Print a log as it grows until the launch's job has ended; return the exit code."""
    try:
        status = follow_log(launch, path, lines, _write, _tell)
    except KeyboardInterrupt:
        _tell(f"\nthe job {launch.job} goes on without being watched")
        return 130
    _tell(f"the job {launch.job} is {_words(status)}")
    return 0 if status.state.is_good else 1


def _choose(launch: Launch, args: argparse.Namespace) -> Path:
    if args.rank is not None:
        return _rank_log(launch, args.rank)
    path = launch.log("err" if args.err else "out")
    if args.err and not path.exists() and launch.log().exists():
        raise UserError(
            f"launch {launch.paths.number} of {launch.manifest.run} has no log of stderr",
            hint="the cluster writes stderr to the same log as stdout (cluster.stderr_to_stdout)",
        )
    return path


def _rank_log(launch: Launch, rank: int) -> Path:
    logs = rank_logs(launch, rank)
    if logs:
        return logs[0]
    world = launch.manifest.nodes * launch.manifest.tasks_per_node
    raise UserError(
        f"rank {rank} of {launch.manifest.run} has no log in {launch.paths.results}",
        hint=f"the launch has the ranks 0 to {world - 1}" if rank >= world else None,
    )


def _print(launch: Launch, path: Path, lines: int | None) -> int:
    if not path.exists():
        _tell(f"no log yet, the job {launch.job} is {_words(ask([launch])[0])}: {path}")
        return 1
    read_all(LogReader(path, 0 if lines is None else tail_offset(path, lines)), _write)
    return 0


def _words(status: JobStatus) -> str:
    return status.state.value + (f" ({status.reason})" if status.reason else "")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
