"""Reading a log: its end, and what is appended to it until its job has ended."""

from __future__ import annotations

import codecs
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from launcher.errors import one_line
from launcher.jobs.launches import Launch
from launcher.monitor.watch import StatusWatch
from launcher.runs.paths import launch_numbers
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from supervisor.files import open_regular

_BLOCK = 1 << 16
_POLL = 0.25


class LogReader:
    """Reads the text that was appended to a file since it was last asked; the file need not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def poll(self) -> str:
        """Return the new text; a character that is half written waits for its rest."""
        try:
            # Opened afresh each time: a network file system shows what others wrote only to a new open.
            with open_regular(self.path) as stream:
                stream.seek(self._offset)
                content = stream.read(_BLOCK)
        except FileNotFoundError:
            return ""
        self._offset += len(content)
        return self._decoder.decode(content)


def tail_offset(path: Path, lines: int) -> int:
    """The byte at which the last `lines` lines of a file begin, found from its end."""
    try:
        with open_regular(path) as stream:
            return _tail_offset(stream, lines)
    except FileNotFoundError:
        return 0


def _tail_offset(stream: BinaryIO, lines: int) -> int:
    size = end = stream.seek(0, os.SEEK_END)
    # A line begins after the newline before it; a file's last newline ends a line and begins none.
    to_pass = lines
    while end > 0 and lines > 0:
        start = max(end - _BLOCK, 0)
        stream.seek(start)
        content = stream.read(end - start)
        if end == size and not content.endswith(b"\n"):
            to_pass -= 1
        position = len(content)
        while (position := content.rfind(b"\n", 0, position)) >= 0:
            if to_pass <= 0:
                return start + position + 1
            to_pass -= 1
        end = start
    return 0 if lines > 0 else size


def last_lines(path: Path, lines: int) -> str:
    """The last lines of a file; nothing where there is no file."""
    parts: list[str] = []
    read_all(LogReader(path, tail_offset(path, lines)), parts.append)
    return "".join(parts)


def tail_offsets(paths: Sequence[Path], lines: int) -> list[tuple[Path, int]]:
    """The last files that hold the last `lines` lines of all, and at which byte of each they begin."""
    found: list[tuple[Path, int]] = []
    for path in reversed(paths):
        offset = tail_offset(path, lines)
        found.insert(0, (path, offset))
        if offset > 0:
            break
        lines -= _count_lines(path)
        if lines <= 0:
            break
    return found


def _count_lines(path: Path) -> int:
    lines, last = 0, b"\n"
    with contextlib.suppress(FileNotFoundError), open_regular(path) as stream:
        while block := stream.read(_BLOCK):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")


def read_all(reader: LogReader, write: Callable[[str], object]) -> bool:
    """Write all that there is to read now, piece by piece; tell whether there was anything."""
    found = False
    while text := reader.poll():
        write(text)
        found = True
    return found


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

    Parameters
    ----------
    reader
        Of the log to begin with.
    choose
        Says which file comes next, given the one that is read: each task of an array has its own, and each
        link of a chain.
    write
        Takes the log's text.
    tell
        Takes what is to be said beside the log: what it is waited for, and that there is a newer launch.
    task
        Until this task of an array has ended.
    link
        Until this job of a chain has ended.
    """
    said = _Once(tell)
    was_quiet = False
    with StatusWatch(launch) as watch:
        while True:
            # The state first: what a job wrote before it ended is there once it is known to have ended.
            status = of_part(watch.status, task, link)
            over = status.state.is_final or watch.is_blind
            found = read_all(reader, write)
            if found:
                watch.alive()
            elif (newest := choose(reader.path)) != reader.path:
                reader = LogReader(newest)
                said(f"{newest.name}:")
                continue
            elif over and was_quiet:
                return status
            elif not over and not reader.path.exists():
                said(_wait_message(reader.path, status))
            elif status.state is State.PENDING and status.chain and link is None:
                said(f"waiting for link {status.chain}: {_state(status)}")
            _tell_newer(launch, said)
            was_quiet = over and not found  # once more, for a network file system that is late
            time.sleep(_POLL)


def of_part(status: JobStatus, task: str | None = None, link: str | None = None) -> JobStatus:
    """The status of one task of an array, or of one job of a chain; of the whole if nothing is known."""
    if link is not None and status.chain and link in status.chain.jobs:
        return status.chain.jobs[link]
    if task is None or task not in status.tasks:
        return status
    return replace(status, state=status.tasks[task], reason=None, exit_code=None, tasks={})


class _Once:
    """Says nothing twice in a row."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._said: dict[str, str] = {}

    def __call__(self, text: str, about: str = "") -> None:
        if self._said.get(about) != text:
            self._said[about] = text
            self._tell(text)


def _tell_newer(launch: Launch, said: _Once) -> None:
    newest = launch_numbers(launch.paths.run_dir)[-1:]
    if newest and newest[0] > launch.paths.number:
        said(f"the run was launched again meanwhile: this is launch {launch.paths.number}", "newer")


def _wait_message(path: Path, status: JobStatus) -> str:
    return f"waiting for {path.name}: {_state(status)}"


def _state(status: JobStatus) -> str:
    reason = f" ({one_line(status.reason)})" if status.reason else ""
    return f"the job is {status.state.value}{reason}"
