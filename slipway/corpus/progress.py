"""Progress of a phase: a bar on a terminal, plain lines elsewhere.

The bar is drawn here: images of containers have no library for it.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from slipway.common.errors import escape

_SECONDS = 3.0
_BAR_SECONDS = 0.1
_BEAT_SECONDS = 10.0
_BAR_WIDTH = 24
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def say(line: str) -> None:
    """Print a line at once, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {escape(line)}", flush=True)


@contextmanager
def heartbeat(line: str) -> Iterator[None]:
    """Print a line with the seconds so far every ten of them, while a library works that says nothing."""
    ended, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            say(f"{line}: {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Progress:
    """Amount, rate and time left, at most once every few seconds. Threads may share it.

    Parameters
    ----------
    verb
        First word of a line, such as ``tokenizing``.
    size
        Bytes in total; 0 if not known.
    count
        Items in total.
    noun
        Name of the items, in the plural.
    """

    def __init__(self, verb: str, size: int, count: int, noun: str) -> None:
        self._verb, self._size, self._count, self._noun = verb, size, count, noun
        self._began = self._reported = time.monotonic()
        self._bytes = self._items = self._old = 0
        self._expected: dict[str, int] = {}
        self._lock = threading.RLock()
        self._draws = False

    def __enter__(self) -> Progress:
        self._draws = sys.stdout.isatty()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._draws:
            self._draw(time.monotonic() - self._began)
            print(flush=True)
            self._draws = False

    def expect(self, item: str, size: int) -> None:
        """Note the size in bytes of an item, which was not known before or is another now."""
        with self._lock:
            self._size += size - self._expected.get(item, 0)
            self._expected[item] = size

    def advance(self, size: int, items: int = 0, old: bool = False) -> None:
        """Count bytes and finished items; print a line if the last is old enough.

        Parameters
        ----------
        size
            Bytes; less than 0 if some that were counted are needed again.
        items
            How many items these bytes finish.
        old
            Leave the bytes out of the rate: an earlier run had done them.
        """
        with self._lock:
            self._bytes += size
            self._items += items
            self._old += size if old else 0
            now = time.monotonic()
            if now - self._reported >= (_BAR_SECONDS if self._draws else _SECONDS):
                self._reported = now
                self._draw(now - self._began) if self._draws else say(self.line(now - self._began))

    def say(self, line: str) -> None:
        """Print a line, in the place of the bar, which follows."""
        with self._lock:
            if self._draws:
                print("\r\x1b[K", end="")
            say(line)

    def line(self, seconds: float) -> str:
        """Return the line after so many seconds."""
        rate = max(0, self._bytes - self._old) / seconds if seconds > 0 else 0.0
        text = f"{self._verb}: {self._items:,} of {self._count:,} {self._noun}, {in_bytes(self._bytes)}"
        total = self._total()
        if total:
            text += f" of {in_bytes(total)} ({100 * self._bytes / total:.0f} %)"
        text += f", {in_bytes(rate)}/s"
        if total and rate > 0:
            left = int(max(0, total - self._bytes) / rate)
            text += f", ETA {left // 3600:02d}:{left // 60 % 60:02d}:{left % 60:02d}"
        return text

    def _total(self) -> int:
        """Return all bytes; 0 while the sizes of some items are not known."""
        return self._size if not self._expected or len(self._expected) >= self._count else 0

    def _draw(self, seconds: float) -> None:
        share = min(1.0, self._bytes / self._total()) if self._total() else 0.0
        bar = "━" * round(share * _BAR_WIDTH)
        line = f"{bar:┈<{_BAR_WIDTH}} {self.line(seconds)}"
        print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def in_bytes(size: float) -> str:
    """Return a size in bytes for reading, in powers of 1,000."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
