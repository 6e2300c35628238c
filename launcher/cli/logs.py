"""`slipway follow` and `slipway logs`: watch a launch, and print its log."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cli.runs import add_run, selected_run
from launcher.errors import DONE, WATCHING_ENDED, WENT_WRONG, UserError, one_line
from launcher.jobs.launches import Launch, open_launch
from launcher.jobs.status import poll
from launcher.monitor.follow import follow_and_tell
from launcher.monitor.logs import (
    LogReader,
    failed_task_logs,
    follow_log,
    job_logs,
    last_lines,
    link_log,
    newest_log,
    next_log,
    of_part,
    rank_failures,
    rank_logs,
    read_all,
    tail_offsets,
    task_logs,
)
from launcher.runs.paths import short
from launcher.schedulers.base import JobStatus
from launcher.schedulers.job_status import declared_tasks
from launcher.slurm.notations import compress_tasks
from launcher.ui.terminal import LogWriter

# Of an array that failed.
_FAILED_TASKS, _LAST_LINES = 3, 10

_FOLLOW = """\
Watch a launch until its job has ended: its state, its progress and its losses, live on a terminal, as lines
in a pipe. Ctrl-C stops watching; the job continues.

examples:
  slipway follow gpt3_126m
  slipway follow gpt3_126m --launch 2
  slipway follow gpt3_126m | tee progress.txt

exit code:
  0    the job completed
  1    the job did not complete
  2    there is no such run
  3    its state was unknown for a minute
  75   the training was interrupted: launching it again resumes it
  130  Ctrl-C; the job continues"""

_LOGS = """\
Print the log of a run's job; with -f as it grows, until the job has ended. A requeued job continues in the
same log. The log of a chain is the logs of all its links in order; with -f each next link follows, and of an
array the task that starts next.

examples:
  slipway logs gpt3_126m              the log of the newest launch
  slipway logs gpt3_126m -n 50 -f     its last 50 lines, and what follows
  slipway logs gpt3_126m --launch 1   an earlier launch; or by the id of its job: slipway logs 4711
  slipway logs gpt3_126m --rank 3     the log that rank 3 wrote itself
  slipway logs 4711_2                 task 2 of an array, the same as --task 2
  slipway logs 4712                   the link of a chain that is this job, the same as --link 2

exit code:
  0    the log was printed; with -f: and the job completed
  1    there is no log yet; with -f: the job did not complete
  2    there is no such run, launch, task, link or rank
with -f:
  3    the state of the job was unknown for a minute
  75   the training was interrupted: launching it again resumes it
  130  Ctrl-C; the job continues"""

_write = LogWriter()

_ONE_LOG = "launch {} of {} has no log of stderr"
_ONE_LOG_HINT = "the cluster writes stderr to the same log as stdout (cluster.stderr_to_stdout)"


@dataclass(frozen=True)
class LogSelection:
    """The selected logs: `logs` in their order, and a function that returns the log `after` the current one.

    `task` is the number of an array's task, `link` the job of a chain's link, if only that one is selected.
    """

    logs: Sequence[Path]
    after: Callable[[Path], Path] = lambda current: current
    task: str | None = None
    link: str | None = None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both verbs."""
    follow, parser = (
        subparsers.add_parser(name, help=summary, description=description)
        for name, summary, description in (
            ("follow", "watch a launch until its job has ended", _FOLLOW),
            ("logs", "print the log of a launch, or follow it", _LOGS),
        )
    )
    add_run(follow)
    follow.set_defaults(run=run_follow)
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job has ended")
    parser.add_argument(
        "-n", "--lines", type=_lines, metavar="N", help="only the last N lines (default: all)"
    )
    parser.add_argument(
        "--task", type=_number, metavar="N", help="task of an array (default: the highest that has started)"
    )
    parser.add_argument(
        "--link",
        type=_number,
        metavar="N",
        help="link of a chain (default: all, in order)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--err", action="store_true", help="stderr, if the cluster writes it to a separate log"
    )
    which.add_argument("--rank", type=_number, metavar="N", help="the log that global rank N wrote itself")
    parser.set_defaults(run=run_logs)


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


def run_follow(args: argparse.Namespace) -> int:
    """Follow the launch; return the exit code."""
    run = selected_run(args)
    return follow_and_tell(run.run_dir, run.launch)


def run_logs(args: argparse.Namespace) -> int:
    run = selected_run(args)
    launch = open_launch(run.run_dir, run.launch)
    task = args.task if args.task is not None or run.task is None else int(run.task)
    if args.rank is not None:
        selection = _rank_log(launch, args.rank)
    elif launch.is_chain:
        selection = _chain_log(launch, _link(launch, args.link, run.job), args.err)
    else:
        _refuse_link(launch, args.link)
        selection = _job_log(launch, task, args.err)
    if not args.follow:
        return _print(launch, selection, args.lines)
    return _follow(launch, selection, args.lines)


def follow_to_end(launch: Launch) -> int:
    """Print the job's log as it grows until the job has ended; return the exit code."""
    selection = _chain_log(launch, None) if launch.is_chain else _newest(launch)
    return _follow(launch, selection, None)


def _follow(launch: Launch, selection: LogSelection, lines: int | None) -> int:
    try:
        reader = _write_earlier(selection, lines)
        status = follow_log(
            launch, reader, selection.after, _write, _tell, task=selection.task, link=selection.link
        )
    except KeyboardInterrupt:
        _tell(f"\nstopped following; job {launch.job} continues")
        _tell(f"  cancel it:  {shlex.join(['slipway', 'cancel', short(launch.paths.run_dir)])}")
        return WATCHING_ENDED
    if selection.task is None:
        # An array's tasks run beside each other, and one log at a time is shown.
        for task, log in list(failed_task_logs(launch, status).items())[:_FAILED_TASKS]:
            _tell(f"the end of the log of task {task}, {short(log)}:")
            _write(last_lines(log, _LAST_LINES))
    _tell(f"job {_job(launch, selection, status)} is {_words(status)}")
    return status.state.exit_code


def _write_earlier(selection: LogSelection, lines: int | None) -> LogReader:
    """Write the last lines that are in earlier logs; return the reader of the last log."""
    starts = [(log, 0) for log in selection.logs] if lines is None else tail_offsets(selection.logs, lines)
    readers = [LogReader(log, offset) for log, offset in starts]
    for reader in readers[:-1]:
        _tell(f"{reader.path.name}:")
        read_all(reader, _write)
    if readers[1:]:
        _tell(f"{readers[-1].path.name}:")
    return readers[-1]


def _link(launch: Launch, number: int | None, job_id: str | None) -> str | None:
    """Return the job of the requested link, by its number or its id."""
    if number is None:
        return job_id if job_id in launch.jobs else None
    links = launch.links
    if number not in links:
        known = f"{len(links)} of {launch.manifest.links} links exist so far"
        if launch.manifest.is_repeated:
            known = f"it has {len(links)} jobs so far"
        raise UserError(
            f"--link {number}: launch {launch.paths.number} of {launch.manifest.run} has no such link",
            hint=known,
        )
    return links[number]


def _refuse_link(launch: Launch, number: int | None) -> None:
    if number is not None:
        raise UserError(
            f"--link {number}: launch {launch.paths.number} of {launch.manifest.run} is not a chain",
            hint="set resilience.links to launch a chain",
        )


def _chain_log(launch: Launch, link: str | None, err: bool = False) -> LogSelection:
    extension = "err" if err else "out"
    if err and not job_logs(launch, "err") and job_logs(launch):
        raise UserError(_ONE_LOG.format(launch.paths.number, launch.manifest.run), hint=_ONE_LOG_HINT)
    if link is not None:
        return LogSelection([link_log(launch, link, extension)], link=link)
    logs = job_logs(launch, extension) or [launch.log(extension)]
    return LogSelection(logs, lambda current: next_log(launch, current, extension))


def _job_log(launch: Launch, task: int | None, err: bool) -> LogSelection:
    extension = "err" if err else "out"
    tasks = task_logs(launch, extension)
    if task is None and len(tasks) > 1:
        newest = max(tasks)
        others = _list(set(tasks) - {newest})
        _tell(f"task {newest} of an array; other tasks that have started: {others} (--task N)")
    if task is not None and not tasks and launch.log().exists():
        raise UserError(
            f"launch {launch.paths.number} of {launch.manifest.run} is not an array: it has no task {task}"
        )
    log = newest_log(launch, extension)
    if task is not None:
        _check_task(launch, task, tasks)
        log = link_log(launch, f"{launch.job}_{task}", extension)
    if err and not log.exists() and newest_log(launch).exists():
        raise UserError(_ONE_LOG.format(launch.paths.number, launch.manifest.run), hint=_ONE_LOG_HINT)
    if task is not None:
        return LogSelection([log], task=str(task))
    return _newest(launch, extension)


def _newest(launch: Launch, extension: str = "out") -> LogSelection:
    return LogSelection([newest_log(launch, extension)], lambda current: next_log(launch, current, extension))


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


def _rank_log(launch: Launch, rank: int) -> LogSelection:
    for path, failure in rank_failures(launch).items():
        if failure.rank == rank:
            _tell(f"rank {rank} failed: {one_line(failure.error)}: {short(path)}")
    logs = rank_logs(launch, rank)
    if logs:
        return LogSelection(logs[:1])
    world = launch.nodes * launch.manifest.tasks_per_node
    raise UserError(
        f"rank {rank} of {launch.manifest.run} has no log in {short(launch.paths.results)}",
        hint=f"the launch has {'rank 0 alone' if world == 1 else f'the ranks 0 to {world - 1}'}"
        if rank >= world
        else None,
    )


def _print(launch: Launch, selection: LogSelection, lines: int | None) -> int:
    path = selection.logs[-1]
    if not path.is_file():
        status = of_part(poll([launch])[0].status, selection.task, selection.link)
        _tell(f"no log yet, job {_job(launch, selection, status)} is {_words(status)}: {short(path)}")
        return WENT_WRONG
    read_all(_write_earlier(selection, lines), _write)
    return DONE


def _job(launch: Launch, selection: LogSelection, status: JobStatus) -> str:
    if selection.link is not None:
        return selection.link
    return f"{launch.job}_{selection.task}" if selection.task else launch.job_in(status)


def _words(status: JobStatus) -> str:
    return status.state.value + (f" ({one_line(status.full_reason)})" if status.full_reason else "")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
