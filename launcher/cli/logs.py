"""`slipway follow` and `slipway logs`: watch a launch, and print its log."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cli.options import Verbs, add_option, add_verb, whole_number
from launcher.cli.runs import add_run, select_run
from launcher.errors import DONE, MISTAKE, WATCHING_ENDED, WENT_WRONG, UserError, escape
from launcher.jobs.launches import Launch, open_launch
from launcher.jobs.status import poll
from launcher.monitor.follow import follow_and_tell
from launcher.monitor.logs import (
    LogReader,
    failed_task_logs,
    find_log,
    find_next,
    follow_log,
    job_logs,
    rank_failures,
    rank_logs,
    read_all,
    read_last_lines,
    select_part,
    tail_offsets,
    task_logs,
)
from launcher.runs.paths import display_path
from launcher.schedulers.base import JobStatus
from launcher.schedulers.job_status import declared_tasks
from launcher.slurm.notations import compress_tasks
from launcher.ui.tables import join_first
from launcher.ui.terminal import LogWriter, print_stderr

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
  3    its state was unknown for a minute, or Slurm silent for five
  75   the training was interrupted: slipway resume continues it
  130  Ctrl-C; the job continues"""

_LOGS = """\
Print the log of a run's job; with -f as it grows, until the job has ended. A requeued job continues in the
same log. The log of a chain is the logs of all its links in order; with -f it continues with each next link,
or with the array task that starts next.

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
  3    the state of the job was unknown for a minute, or Slurm silent for five
  75   the training was interrupted: slipway resume continues it
  130  Ctrl-C; the job continues"""

_write = LogWriter()


@dataclass(frozen=True)
class LogSelection:
    """The selected logs: `logs` in their order, and a function that returns the log `after` the current one.

    `task` is the number of an array's task, `link` the job of a chain's link, if only that one is selected.
    """

    logs: Sequence[Path]
    after: Callable[[Path], Path] = lambda current: current
    task: str | None = None
    link: str | None = None


def add_parser(verbs: Verbs) -> None:
    follow = add_verb(verbs, "follow", run_follow, text=_FOLLOW)
    add_run(follow)
    logs = add_verb(verbs, "logs", run_logs, text=_LOGS)
    add_run(logs)
    add_option(logs, "-f --follow", "continue until the job has ended")
    add_option(logs, "-n --lines N", "only the last N lines (default: all)", type=_lines)
    number = whole_number(0)
    text = "task of an array (default: the highest that has started)"
    add_option(logs, "--task N", text, type=number)
    add_option(logs, "--link N", "link of a chain (default: all, in order)", type=number)
    which = logs.add_mutually_exclusive_group()
    add_option(which, "--err", "stderr, if the cluster writes it to a separate log")
    add_option(which, "--rank N", "the log that global rank N wrote itself", type=number)


def _lines(text: str) -> int | None:
    if text == "all":
        return None
    if text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of lines nor 'all'")


def run_follow(args: argparse.Namespace) -> int:
    run = select_run(args)
    return follow_and_tell(run.run_dir, run.launch)


def run_logs(args: argparse.Namespace) -> int:
    run = select_run(args)
    launch = open_launch(run.run_dir, run.launch)
    task = args.task if args.task is not None or run.task is None else int(run.task)
    extension = "err" if args.err else "out"
    if args.rank is not None:
        selection = _rank_log(launch, args.rank)
    elif launch.is_chain:
        selection = _chain_log(launch, _link(launch, args.link, run.job), extension)
    elif args.link is not None:
        message = f"--link {args.link}: {_name(launch)} is not a chain"
        raise UserError(message, hint="set resilience.links to launch a chain")
    else:
        selection = _job_log(launch, task, extension)
    if not args.follow:
        return _print(launch, selection, args.lines)
    return _code(_follow(launch, selection, args.lines))


def follow_to_end(launch: Launch) -> int:
    """Print the job's log as it grows until the job has ended; return the exit code.

    Return that of a user's mistake if the job's program refused its input.
    """
    selection = _chain_log(launch, None) if launch.is_chain else _select_newest(launch)
    status = _follow(launch, selection, None)
    return MISTAKE if status is not None and status.exit_code == MISTAKE else _code(status)


def _code(status: JobStatus | None) -> int:
    return WATCHING_ENDED if status is None else status.state.exit_code


def _follow(launch: Launch, selection: LogSelection, lines: int | None) -> JobStatus | None:
    """Print a log as it grows; return the status of the job, None after Ctrl-C."""
    try:
        reader = _write_earlier(selection, lines)
        status = follow_log(
            launch, reader, selection.after, _write, print_stderr, task=selection.task, link=selection.link
        )
    except KeyboardInterrupt:
        print_stderr(f"\nstopped following; job {launch.job} continues")
        print_stderr(f"  cancel it:  {shlex.join(['slipway', 'cancel', display_path(launch.paths.run_dir)])}")
        return None
    if selection.task is None:
        # An array's tasks run at the same time, and one log at a time is shown.
        for task, log in list(failed_task_logs(launch, status).items())[:_FAILED_TASKS]:
            print_stderr(f"the end of the log of task {task}, {display_path(log)}:")
            _write(read_last_lines(log, _LAST_LINES))
    print_stderr(f"job {_job(launch, selection, status)} is {_words(status)}")
    return status


def _write_earlier(selection: LogSelection, lines: int | None) -> LogReader:
    """Write the last lines that are in earlier logs; return the reader of the last log."""
    starts = [(log, 0) for log in selection.logs] if lines is None else tail_offsets(selection.logs, lines)
    readers = [LogReader(log, offset) for log, offset in starts]
    for reader in readers[:-1]:
        print_stderr(f"{reader.path.name}:")
        read_all(reader, _write)
    if readers[1:]:
        print_stderr(f"{readers[-1].path.name}:")
    return readers[-1]


def _name(launch: Launch) -> str:
    return f"launch {launch.paths.number} of {launch.manifest.run}"


def _link(launch: Launch, number: int | None, job_id: str | None) -> str | None:
    """Return the job of the requested link, by its number or its id."""
    if number is None:
        return job_id if job_id in launch.links.values() else None
    links = launch.links
    if number not in links:
        known = f"{len(links)} of {launch.manifest.links} links exist so far"
        if launch.manifest.is_repeated:
            known = f"it has {len(links)} jobs so far"
        raise UserError(f"--link {number}: {_name(launch)} has no such link", hint=known)
    return links[number]


def _explain_no_stderr(launch: Launch) -> UserError:
    hint = "the cluster writes stderr to the same log as stdout (cluster.stderr_to_stdout)"
    return UserError(f"{_name(launch)} has no log of stderr", hint=hint)


def _chain_log(launch: Launch, link: str | None, extension: str = "out") -> LogSelection:
    logs = job_logs(launch, extension)
    if extension == "err" and not logs and job_logs(launch):
        raise _explain_no_stderr(launch)
    if link is not None:
        return LogSelection([launch.paths.log(link, extension)], link=link)
    logs = logs or [launch.log(extension)]
    return LogSelection(logs, lambda current: find_next(launch, current, extension))


def _job_log(launch: Launch, task: int | None, extension: str) -> LogSelection:
    tasks = task_logs(launch, extension)
    if task is None:
        if len(tasks) > 1:
            newest = max(tasks)
            others = join_first([str(task) for task in sorted(tasks) if task != newest], 8)
            print_stderr(f"task {newest} of an array; other tasks that have started: {others} (--task N)")
        selection = _select_newest(launch, extension)
    else:
        if not tasks and launch.log().exists():
            raise UserError(f"{_name(launch)} is not an array: it has no task {task}")
        declared = [] if task in tasks else declared_tasks(launch.paths.directory)
        if declared and task not in declared:
            hint = f"its tasks: {compress_tasks(declared)}"
            raise UserError(f"{_name(launch)} has no task {task}", hint=hint)
        selection = LogSelection([launch.paths.log(f"{launch.job}_{task}", extension)], task=str(task))
    if extension == "err" and not selection.logs[0].exists() and find_log(launch).exists():
        raise _explain_no_stderr(launch)
    return selection


def _select_newest(launch: Launch, extension: str = "out") -> LogSelection:
    return LogSelection([find_log(launch, extension)], lambda current: find_next(launch, current, extension))


def _rank_log(launch: Launch, rank: int) -> LogSelection:
    failure = next((failure for failure in rank_failures(launch) if failure.rank == rank), None)
    if failure is not None:
        print_stderr(f"rank {rank} failed: {escape(failure.error)}: {display_path(Path(failure.path))}")
    logs = rank_logs(launch, rank)
    if logs:
        return LogSelection(logs[:1])
    world = launch.nodes * launch.manifest.tasks_per_node
    ranks = "rank 0 alone" if world == 1 else f"the ranks 0 to {world - 1}"
    raise UserError(
        f"rank {rank} of {launch.manifest.run} has no log in {display_path(launch.paths.results)}",
        hint=f"the launch has {ranks}" if rank >= world else None,
    )


def _print(launch: Launch, selection: LogSelection, lines: int | None) -> int:
    path = selection.logs[-1]
    if not path.is_file():
        status = select_part(poll([launch])[0], selection.task, selection.link)
        job = f"job {_job(launch, selection, status)} is {_words(status)}"
        print_stderr(f"no log yet, {job}: {display_path(path)}")
        return WENT_WRONG
    read_all(_write_earlier(selection, lines), _write)
    return DONE


def _job(launch: Launch, selection: LogSelection, status: JobStatus) -> str:
    if selection.link is not None:
        return selection.link
    return f"{launch.job}_{selection.task}" if selection.task else launch.find_job(status)


def _words(status: JobStatus) -> str:
    return status.state.value + (f" ({escape(status.full_reason)})" if status.full_reason else "")
