"""The logs of a launch, read and followed: of its job, an array's tasks, a chain's links, single ranks."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import escape
from launcher.jobs.launches import Launch
from launcher.monitor.polling import job_poller
from launcher.runs.paths import launch_numbers
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from slipway.common.files import blocks_back, names_in, open_regular
from slipway.common.node.evidence import Left, read_rank_failures

FAILURES = "failures"


def task_logs(launch: Launch, extension: str = "out") -> dict[int, Path]:
    """Return the existing logs of an array's tasks by their numbers, ascending; empty for any other job."""
    if launch.manifest.job_id is None:
        return {}
    prefix = f"{launch.paths.log_prefix}{launch.manifest.job_id}_"
    name = re.compile(rf"{re.escape(prefix)}([0-9]+)\.{extension}")
    matches = map(name.fullmatch, names_in(launch.paths.directory))
    logs = {int(match[1]): launch.paths.directory / match[0] for match in matches if match}
    return dict(sorted(logs.items()))


def failed_task_logs(launch: Launch, status: JobStatus) -> dict[int, Path]:
    """Return the logs of the tasks of an array that ended badly, by their numbers."""
    bad = {number for number, state in status.tasks.items() if state.is_final and not state.is_good}
    return {number: log for number, log in task_logs(launch).items() if str(number) in bad}


def job_logs(launch: Launch, extension: str = "out") -> list[Path]:
    """Return the existing logs: the job's, those of an array's tasks, or of a chain's links in order."""
    logs = [launch.paths.log(job_id, extension) for job_id in launch.links.values()]
    logs += task_logs(launch, extension).values()
    # The last first: whoever sees a link's log sees those of the links before it.
    return [log for log in reversed(logs) if log.is_file()][::-1]


def find_log(launch: Launch, extension: str = "out") -> Path:
    """Return the newest log: the job's, that of an array's highest task, or that of a chain's last link.

    It need not exist yet; raise UserError if the launch never became a job.
    """
    path = launch.log(extension)
    if launch.is_chain:
        return (job_logs(launch, extension) or [path])[-1]
    if path.is_file():
        return path
    tasks = task_logs(launch, extension)
    return tasks[max(tasks)] if tasks else path


def find_next(launch: Launch, current: Path, extension: str = "out") -> Path:
    """Return the log of the next link or task once it exists, until then the current one."""
    logs = job_logs(launch, extension)
    later = logs[logs.index(current) + 1 :] if current in logs else logs
    return later[0] if later else current


def rank_logs(launch: Launch, rank: int) -> list[Path]:
    """Return the logs that one rank's process wrote itself, the newest first.

    At its start NeMo's rank 0 moves existing files to ``run_0/``, ``run_1/``, ..., at times the log of a rank
    that began before it.
    """
    name = f"nemo_log_globalrank-{rank}_*.txt"
    moved = launch.paths.results.glob(f"run_*/{name}")
    return [*sorted(launch.paths.results.glob(name)), *sorted(moved, key=get_change_time, reverse=True)]


def get_change_time(path: Path) -> float:
    """Return the time of a file's last change in Unix seconds; 0 if there is no file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def get_last_start(launch: Launch) -> float:
    """Return the newest of several starts of the tasks in Unix seconds, else 0: earlier errors are old."""
    starts = launch.starts
    return (starts[-1].started or 0.0) if len(starts) > 1 else 0.0


def rank_failures(launch: Launch) -> list[Left]:
    """Return the failures of ranks since the job last began, in the order of their times."""
    return read_rank_failures(launch.paths.results / FAILURES, get_last_start(launch))


_BLOCK = 1 << 16
_POLL = 0.25


class LogReader:
    """A reader of the text appended to a file since the last call; the file need not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def poll(self) -> str:
        """Return the new text; an incomplete character waits for its rest."""
        content = b""
        # Opened afresh each time: a network file system shows what others wrote only to a new open.
        with contextlib.suppress(FileNotFoundError), open_regular(self.path) as stream:
            stream.seek(self._offset)
            content = stream.read(_BLOCK)
        self._offset += len(content)
        return self._decoder.decode(content)


def tail_offset(path: Path, lines: int) -> int:
    """Return the byte at which the last `lines` lines of a file begin, searched for from its end.

    A line has at most a block on average, or 16: a hole is one line, however long.
    """
    first = 0
    with contextlib.suppress(FileNotFoundError), open_regular(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        if lines <= 0:
            return size
        # A line begins after the newline before it; a file's last newline ends a line and begins none.
        to_skip, first = lines, max(0, size - _BLOCK * max(lines, 16))
        for start, content in blocks_back(stream, first, size, _BLOCK):
            if start + len(content) == size and not content.endswith(b"\n"):
                to_skip -= 1
            position = len(content)
            while (position := content.rfind(b"\n", 0, position)) >= 0:
                if to_skip <= 0:
                    return start + position + 1
                to_skip -= 1
    return first


def read_last_lines(path: Path, lines: int) -> str:
    """Return the last lines of a file; an empty text if there is no file."""
    parts: list[str] = []
    read_all(LogReader(path, tail_offset(path, lines)), parts.append)
    return "".join(parts)


def tail_offsets(paths: Sequence[Path], lines: int) -> list[tuple[Path, int]]:
    """Return the files that have the last `lines` lines of all, each with the byte at which they begin."""
    offsets: list[tuple[Path, int]] = []
    for path in reversed(paths):
        offset, last = tail_offset(path, lines), b"\n"
        offsets.insert(0, (path, offset))
        if offset == 0:
            with contextlib.suppress(FileNotFoundError), open_regular(path) as stream:
                while block := stream.read(_BLOCK):
                    lines, last = lines - block.count(b"\n"), block[-1:]
            if last != b"\n":  # the last line has no end
                lines -= 1
        if offset > 0 or lines <= 0:
            break
    return offsets


def read_all(reader: LogReader, write: Callable[[str], object]) -> bool:
    """Write all new text, piece by piece; return True if there was any."""
    has_text = False
    while text := reader.poll():
        write(text)
        has_text = True
    return has_text


def follow_log(
    launch: Launch,
    reader: LogReader,
    choose: Callable[[Path], Path],
    write: Callable[[str], object],
    tell: Callable[[str], object],
    *,
    task: str | None = None,
    link: str | None = None,
) -> JobStatus:
    """Write a log as it grows, until its job has ended and all of it was written.

    `choose` returns the next file after the current one: arrays have one per task, chains one per link.
    `tell` writes messages about the log: why the job waits, and that there is a newer launch.
    """
    last_messages: dict[str, str] = {}  # by their topics

    def tell_once(text: str, topic: str = "log") -> None:
        if last_messages.get(topic) != text:
            last_messages[topic] = text
            tell(text)

    was_quiet = False
    with job_poller(launch) as watch:
        while True:
            # The state first: once the job is known to have ended, everything that it wrote is there.
            snapshot = watch.snapshot()
            status = select_part(snapshot.rows[0], task, link)
            over = status.state.is_final or snapshot.is_over
            reason = f" ({escape(status.reason)})" if status.reason else ""
            state = f"the job is {status.state.value}{reason}"
            has_text = read_all(reader, write)
            if has_text:
                watch.mark_alive()
            elif (newest := choose(reader.path)) != reader.path:
                reader = LogReader(newest)
                tell_once(f"{newest.name}:")
                continue
            elif over and was_quiet:
                return status
            elif not over and not reader.path.exists():
                tell_once(f"waiting for {reader.path.name}: {state}")
            elif status.state is State.PENDING and status.chain and link is None:
                tell_once(f"waiting for link {status.chain}: {state}")
            if max(launch_numbers(launch.paths.run_dir), default=0) > launch.paths.number:
                message = f"the run was launched again meanwhile: this is launch {launch.paths.number}"
                tell_once(message, "newer")
            was_quiet = over and not has_text  # read once more, for a network file system that is late
            time.sleep(_POLL)


def select_part(status: JobStatus, task: str | None = None, link: str | None = None) -> JobStatus:
    """Return the status of one task of an array or one job of a chain; that of the whole if it is unknown."""
    if link is not None and status.chain and link in status.chain.jobs:
        return status.chain.jobs[link]
    if task is None or task not in status.tasks:
        return status
    return replace(status, state=status.tasks[task], reason=None, exit_code=None, tasks={})
