"""`slipway logs`: print the log of a launch, and follow it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cli.runs import add_run, named_run
from launcher.errors import UserError, one_line
from launcher.exit_codes import DONE, WATCHING_ENDED, WENT_WRONG
from launcher.jobs.launches import Launch, open_launch
from launcher.jobs.status import poll
from launcher.monitor.logs import (
    LogReader,
    follow_log,
    job_logs,
    link_log,
    newest_log,
    next_log,
    of_part,
    rank_failures,
    rank_logs,
    read_all,
    tail_offsets,
    task_log,
    task_logs,
)
from launcher.runs.paths import short
from launcher.schedulers.base import JobStatus
from launcher.schedulers.job_status import declared_tasks
from launcher.slurm.hostlists import compress_tasks
from launcher.ui.terminal import LogWriter

_DESCRIPTION = """\
Print the log of a run's job; with -f as it grows, until the job has ended. A job that was requeued goes on in
the same log; of an array -f goes on to the task that begins next. Of a chain it is the logs of all its links
in their order; -f goes on from link to link.

examples:
  slipway logs gpt3_126m              the log of the newest launch
  slipway logs gpt3_126m -n 50 -f     its last 50 lines, and what follows
  slipway logs gpt3_126m --launch 1   an earlier launch; or by the id of its job: slipway logs 4711
  slipway logs gpt3_126m --rank 3     what rank 3 logged itself
  slipway logs 4711_2                 task 2 of an array, as --task 2
  slipway logs 4712                   of a chain the link that this job is, as --link 2

exit code:
  0    the log was printed; with -f: and the job completed
  1    there is no log yet; with -f: the job did not complete
  2    there is no such run, launch, task, link or rank
with -f:
  3    the state of the job could not be told for a minute
  75   the training was interrupted: launching it again continues
  130  Ctrl-C; the job goes on"""

_write = LogWriter()

_ONE_LOG = "launch {} of {} has no log of stderr"
_ONE_LOG_HINT = "the cluster writes stderr to the same log as stdout (cluster.stderr_to_stdout)"


@dataclass(frozen=True)
class Shown:
    """What is printed: `logs` one after the other, of which the last goes on, and then what comes `after` it.

    `task` is the number of an array's, `link` the job of a chain's link, where one is shown alone.
    """

    logs: Sequence[Path]
    after: Callable[[Path], Path] = lambda now: now
    task: str | None = None
    link: str | None = None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "logs",
        help="print the log of a launch, and follow it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument(
        "-n", "--lines", type=_lines, metavar="N", help="only the last N lines (default: all)"
    )
    parser.add_argument(
        "--task", type=_number, metavar="N", help="of an array (default: the highest that began)"
    )
    parser.add_argument(
        "--link",
        type=_number,
        metavar="N",
        help="only this job of a chain (default: all, one after the other)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--err", action="store_true", help="stderr, where the cluster keeps it apart")
    which.add_argument("--rank", type=_number, metavar="N", help="the log that global rank N wrote")
    parser.set_defaults(run=run)


def _lines(text: str) -> int | None:
    if text == "all":
        return None
    if text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of lines nor 'all'")


def _number(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")


def run(args: argparse.Namespace) -> int:
    """Print the log."""
    chosen = named_run(args)
    launch = open_launch(chosen.run_dir, chosen.launch)
    task = args.task if args.task is not None or chosen.task is None else int(chosen.task)
    if args.rank is not None:
        shown = _rank_log(launch, args.rank)
    elif launch.is_chain:
        shown = _chain_log(launch, _link(launch, args.link, chosen.job), args.err)
    else:
        _refuse_link(launch, args.link)
        shown = _job_log(launch, task, args.err)
    if not args.follow:
        return _print(launch, shown, args.lines)
    return _follow(launch, shown, args.lines)


def follow_to_end(launch: Launch) -> int:
    """Print the job's log as it grows until the job has ended; return the exit code."""
    shown = _chain_log(launch, None) if launch.is_chain else _newest(launch)
    return _follow(launch, shown, None)


def _follow(launch: Launch, shown: Shown, lines: int | None) -> int:
    try:
        reader = _write_earlier(shown, lines)
        status = follow_log(launch, reader, shown.after, _write, _tell, task=shown.task, link=shown.link)
    except KeyboardInterrupt:
        _tell(f"\nthe job {launch.job} goes on without being watched")
        _tell(f"  cancel it:  {shlex.join(['slipway', 'cancel', short(launch.paths.run_dir)])}")
        return WATCHING_ENDED
    _tell(f"the job {_job(launch, shown, status)} is {_words(status)}")
    return status.state.exit_code


def _write_earlier(shown: Shown, lines: int | None) -> LogReader:
    """Write what of the last lines stands in earlier logs; return the reader of the last one."""
    starts = [(log, 0) for log in shown.logs] if lines is None else tail_offsets(shown.logs, lines)
    readers = [LogReader(log, offset) for log, offset in starts]
    for reader in readers[:-1]:
        _tell(f"{reader.path.name}:")
        read_all(reader, _write)
    if readers[1:]:
        _tell(f"{readers[-1].path.name}:")
    return readers[-1]


def _link(launch: Launch, number: int | None, job_id: str | None) -> str | None:
    """The job of the link that is asked for, by its number or its id."""
    if number is None:
        return job_id if job_id in launch.jobs else None
    links = launch.links
    if number not in links:
        known = f"{len(links)} of {launch.manifest.links} are known"
        raise UserError(
            f"--link {number}: launch {launch.paths.number} of {launch.manifest.run} has no such link",
            hint=known,
        )
    return links[number]


def _refuse_link(launch: Launch, number: int | None) -> None:
    if number is not None:
        raise UserError(
            f"--link {number}: launch {launch.paths.number} of {launch.manifest.run} is no chain",
            hint="resilience.links makes it one",
        )


def _chain_log(launch: Launch, link: str | None, err: bool = False) -> Shown:
    extension = "err" if err else "out"
    if err and not job_logs(launch, "err") and job_logs(launch):
        raise UserError(_ONE_LOG.format(launch.paths.number, launch.manifest.run), hint=_ONE_LOG_HINT)
    if link is not None:
        return Shown([link_log(launch, link, extension)], link=link)
    logs = job_logs(launch, extension) or [launch.log(extension)]
    return Shown(logs, lambda now: next_log(launch, now, extension))


def _job_log(launch: Launch, task: int | None, err: bool) -> Shown:
    extension = "err" if err else "out"
    tasks = task_logs(launch, extension)
    if task is None and len(tasks) > 1:
        newest = max(tasks)
        others = _list(set(tasks) - {newest})
        _tell(f"task {newest} of an array; others that began: {others} (--task N)")
    if task is not None and not tasks and launch.log().exists():
        raise UserError(f"launch {launch.paths.number} of {launch.manifest.run} has no task {task}: no array")
    log = newest_log(launch, extension)
    if task is not None:
        _check_task(launch, task, tasks)
        log = task_log(launch, task, extension)
    if err and not log.exists() and newest_log(launch).exists():
        raise UserError(_ONE_LOG.format(launch.paths.number, launch.manifest.run), hint=_ONE_LOG_HINT)
    if task is not None:
        return Shown([log], task=str(task))
    return _newest(launch, extension)


def _newest(launch: Launch, extension: str = "out") -> Shown:
    return Shown([newest_log(launch, extension)], lambda now: next_log(launch, now, extension))


def _check_task(launch: Launch, task: int, with_logs: Collection[int]) -> None:
    declared = [] if task in with_logs else declared_tasks(launch.paths.directory)
    if declared and task not in declared:
        raise UserError(
            f"launch {launch.paths.number} of {launch.manifest.run} has no task {task}",
            hint=f"its tasks: {compress_tasks(declared)}",
        )


def _list(numbers: set[int]) -> str:
    listed = sorted(numbers)
    return ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")


def _rank_log(launch: Launch, rank: int) -> Shown:
    failure = next((failure for failure in rank_failures(launch) if failure.rank == rank), None)
    if failure:
        _tell(f"rank {rank} failed: {one_line(failure.error)}: {short(failure.path)}")
    logs = rank_logs(launch, rank)
    if logs:
        return Shown(logs[:1])
    world = launch.nodes * launch.manifest.tasks_per_node
    raise UserError(
        f"rank {rank} of {launch.manifest.run} has no log in {short(launch.paths.results)}",
        hint=f"the launch has {'rank 0 alone' if world == 1 else f'the ranks 0 to {world - 1}'}"
        if rank >= world
        else None,
    )


def _print(launch: Launch, shown: Shown, lines: int | None) -> int:
    path = shown.logs[-1]
    if not path.is_file():
        status = of_part(poll([launch])[0].status, shown.task, shown.link)
        _tell(f"no log yet, the job {_job(launch, shown, status)} is {_words(status)}: {short(path)}")
        return WENT_WRONG
    read_all(_write_earlier(shown, lines), _write)
    return DONE


def _job(launch: Launch, shown: Shown, status: JobStatus) -> str:
    if shown.link is not None:
        return shown.link
    return f"{launch.job}_{shown.task}" if shown.task else launch.job_in(status)


def _words(status: JobStatus) -> str:
    return status.state.value + (f" ({one_line(status.full_reason)})" if status.full_reason else "")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
