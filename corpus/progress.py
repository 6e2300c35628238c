"""Progress of a phase as plain lines on stdout."""

from __future__ import annotations

import time

_SECONDS = 3.0
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def say(line: str) -> None:
    """Print a line at once, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Progress:
    """Lines with amount, rate and time left, at most one every few seconds.

    Parameters
    ----------
    verb
        First word of a line, such as ``tokenizing``.
    size
        Bytes in total; 0 if not known.
    count
        Items in total.
    noun
        What is counted, in the plural.
    """

    def __init__(self, verb: str, size: int, count: int, noun: str) -> None:
        self._verb, self._size, self._count, self._noun = verb, size, count, noun
        self._began = self._reported = time.monotonic()
        self._bytes = self._items = 0

    def advance(self, size: int, items: int = 0) -> None:
        """Count bytes and finished items; print a line if the last is old enough."""
        self._bytes += size
        self._items += items
        now = time.monotonic()
        if now - self._reported >= _SECONDS:
            self._reported = now
            say(self.line(now - self._began))

    def line(self, seconds: float) -> str:
        """Return the line after so many seconds."""
        rate = self._bytes / seconds if seconds > 0 else 0.0
        text = f"{self._verb}: {self._items:,} of {self._count:,} {self._noun}, {in_bytes(self._bytes)}"
        if self._size:
            text += f" of {in_bytes(self._size)} ({100 * self._bytes / self._size:.0f} %)"
        text += f", {in_bytes(rate)}/s"
        if self._size and rate > 0:
            left = int(max(0, self._size - self._bytes) / rate)
            text += f", ETA {left // 3600:02d}:{left // 60 % 60:02d}:{left % 60:02d}"
        return text


def in_bytes(size: float) -> str:
    """Return a size in bytes for reading, in powers of 1,000."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
