"""Asking again and again in a thread, beside a display that must not wait for the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Poller(Generic[T]):
    """The newest answer to a question. It is asked once at first, so that there is always one.

    Use it as a context: inside of it a thread asks.

    Parameters
    ----------
    pause
        How many seconds to wait after an answer; ``None`` to ask no more.
    """

    def __init__(self, ask: Callable[[], T], pause: Callable[[T], float | None]) -> None:
        self._ask = ask
        self._pause = pause
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._newest = ask()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()

    @property
    def newest(self) -> T:
        """The newest answer; raises what the thread raised."""
        if self._failure:
            raise self._failure
        return self._newest

    def _run(self) -> None:
        try:
            while (seconds := self._pause(self._newest)) is not None and not self._stop.wait(seconds):
                self._newest = self._ask()
        except BaseException as error:  # told to whoever watches: a thread's own traceback is lost
            self._failure = error


def backoff(interval: float, failures: int, most: float = 30.0) -> float:
    """Seconds to wait before asking again a scheduler that did not answer so many times in a row."""
    return min(interval * 2.0 ** min(failures, 10), max(most, interval))
