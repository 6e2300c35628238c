"""Worker processes: each takes the next item when it is done with the last, and ends with its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any, TypeVar

from slipway.corpus.errors import OutsideError

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_unordered(
    work: Callable[[], Callable[[Item], Result]], items: Sequence[Item], workers: int
) -> Iterator[Result]:
    """Yield the results of all items as they come.

    Parameters
    ----------
    work
        Called once in each process; returns the function for items. It is pickled.
    items
        In the order in which they are begun.
    workers
        Number of processes; one item or one worker needs none but this.

    Raises
    ------
    Exception
        The function's first exception.
    OutsideError
        If a worker ended.
    """
    if workers == 1 or len(items) <= 1:
        function = work()
        for item in items:
            yield function(item)
        return
    others = multiprocessing.active_children()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(items)), context, _begin, (work,))
    try:
        for future in as_completed([pool.submit(_apply, item) for item in items]):
            yield future.result()
    except BrokenProcessPool:
        raise OutsideError(
            "a worker process was ended; the machine may be out of memory; finished work is kept: run it"
            " again"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # An executor would wait for the items that were begun.
        for process in set(multiprocessing.active_children()).difference(others):
            process.terminate()


def _begin(work: Callable[[], Callable[[Any], Any]]) -> None:
    """Prepare a worker process."""
    global _work
    _work = work
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _function() -> Callable[[Any], Any]:
    # At the first item: an error of it is raised as one of the item.
    return _work()


def _apply(item: Any) -> Any:
    return _function()(item)


_work: Callable[[], Callable[[Any], Any]]
