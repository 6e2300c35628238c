"""The logs of a job: their ends, and what is appended to them."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from launcher.monitor.launches import Launch
from launcher.monitor.watch import StatusWatch
from launcher.schedulers.base import JobStatus

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
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read(_BLOCK)
        except FileNotFoundError:
            return ""
        self._offset += len(content)
        return self._decoder.decode(content)


def tail_offset(path: Path, lines: int) -> int:
    """The byte at which the last `lines` lines of a file begin, found from its end."""
    try:
        with path.open("rb") as stream:
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


def read_all(reader: LogReader, write: Callable[[str], object]) -> bool:
    """Write all that there is to read now, piece by piece; tell whether there was anything."""
    found = False
    while text := reader.poll():
        write(text)
        found = True
    return found


def rank_logs(launch: Launch, rank: int) -> list[Path]:
    """The logs that one rank's process wrote itself."""
    return sorted(launch.paths.results.glob(f"nemo_log_globalrank-{rank}_*.txt"))


def follow_log(
    launch: Launch,
    path: Path,
    lines: int | None,
    write: Callable[[str], object],
    tell: Callable[[str], object],
) -> JobStatus:
    """Write a log as it grows, until its job has ended and all of it was written.

    Parameters
    ----------
    lines
        Begin with so many of the lines that are already there; ``None`` for all.
    write
        Takes the log's text.
    tell
        Takes what is to be said beside the log: what it is waited for.
    """
    reader = LogReader(path, 0 if lines is None else tail_offset(path, lines))
    waiting, was_quiet = "", False
    with StatusWatch(launch) as watch:
        while True:
            # The state first: what a job wrote before it ended is there once it is known to have ended.
            over, status = watch.is_over, watch.status
            found = read_all(reader, write)
            if found:
                watch.alive()
            elif over and was_quiet:
                return status
            elif not over and not path.exists() and waiting != (waiting := _wait_message(path, status)):
                tell(waiting)
            was_quiet = over and not found  # once more, for a network file system that is late
            time.sleep(_POLL)


def _wait_message(path: Path, status: JobStatus) -> str:
    reason = f" ({status.reason})" if status.reason else ""
    return f"waiting for {path.name}: the job is {status.state.value}{reason}"
