"""Processes by number and start time: a number alone may meanwhile belong to somebody else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can be told from a later one with the same number.

    `start_time` is in clock ticks since the machine was booted, as in ``/proc/<pid>/stat``.
    """

    pid: int
    start_time: int

    @property
    def is_alive(self) -> bool:
        """True if the process still runs; a zombie does not."""
        now = _read(self.pid)
        return now is not None and now.process == self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this very process, or to nobody."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_time": self.start_time}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        return cls(record["pid"], record["start_time"])


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A process and the number of its parent."""

    process: Process
    parent: int


def child(pid: int) -> Process:
    """Return the child process with this number, even if it has ended already."""
    entry = _read(pid, ended=True)
    if entry is None:
        raise ProcessLookupError(f"no child {pid}")
    return entry.process


def boot_id() -> str:
    """Return the id of this boot of the machine: start times of an earlier one mean nothing."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def stop(processes: Iterable[Process], number: signal.Signals, seconds: float) -> None:
    """Send a signal to processes and wait until they end, at most some seconds."""
    remaining = list(processes)
    for process in remaining:
        process.signal(number)
    deadline = time.monotonic() + seconds
    while remaining and time.monotonic() < deadline:
        time.sleep(0.01)
        for process in remaining:
            reap(process.pid)
        remaining = [process for process in remaining if process.is_alive]


def reap(pid: int) -> int | None:
    """Collect a child that has ended and return its exit code; `None` if it runs or is no child of ours."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def entries() -> dict[int, ProcessEntry]:
    """Return every process of the machine, by number."""
    found = (_read(int(name)) for name in os.listdir(_PROC) if name.isdecimal())  # noqa: PTH208 (speed)
    return {entry.process.pid: entry for entry in found if entry}


def ancestry(pid: int, entries: dict[int, ProcessEntry]) -> Iterator[int]:
    """Yield the number of a process, of its parent, of the parent's parent, and so on."""
    seen: set[int] = set()
    while pid in entries and pid not in seen:
        yield pid
        seen.add(pid)
        pid = entries[pid].parent


def mount_namespace(pid: int) -> Path:
    """Return the file that stands for the mount namespace of a process."""
    return _PROC / str(pid) / "ns" / "mnt"


def root_directory(pid: int) -> tuple[int, int] | None:
    """Return the device and inode of what a process has as ``/``; `None` when it cannot be told."""
    try:
        status = (_PROC / str(pid) / "root").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty when it cannot be read."""
    try:
        text = (_PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (word.partition("=") for word in text.split("\0"))
    return {name: value for name, _, value in pairs}


def _read(pid: int, ended: bool = False) -> ProcessEntry | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may itself hold blanks and parentheses.
    words = text[text.rindex(b")") + 2 :].split()
    if words[0] in (b"Z", b"X") and not ended:
        return None
    return ProcessEntry(Process(pid, int(words[19])), int(words[1]))
