"""Worker processes: each takes the next item when it is done with the last.

Unlike a pool of the standard library, one whose worker is killed (for want of memory, say) says so instead of
waiting for it, and workers whose parent is killed leave.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from slipway.common.errors import UserError
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
    UserError, OutsideError, OSError
        As the function raises.
    OutsideError
        If a worker ended.
    """
    if workers == 1 or len(items) <= 1:
        function = work()
        for item in items:
            yield function(item)
        return
    context = multiprocessing.get_context("spawn")
    processes = {}
    try:
        for _ in range(min(workers, len(items))):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work), daemon=True)
            process.start()
            theirs.close()
            processes[mine] = process
        yield from _hand_out(processes, items)
    finally:
        for connection, process in processes.items():
            process.terminate()
            process.join()
            connection.close()


def _hand_out(processes: dict[Any, Any], items: Sequence[Any]) -> Iterator[Any]:
    waiting = iter(items)
    busy = {}
    for connection in processes:
        busy[connection] = item = next(waiting)
        connection.send(item)
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            try:
                result = connection.recv()
            except (EOFError, ConnectionError):
                process = processes[connection]
                process.join()
                raise OutsideError(_end(process.exitcode)) from None
            if isinstance(result, Exception):
                raise result
            del busy[connection]
            with contextlib.suppress(StopIteration):
                item = next(waiting)
                busy[connection] = item
                connection.send(item)
            yield result[0]


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = "; the machine may be out of memory" if name == "SIGKILL" else ""
        return f"a worker process was ended by {name}{memory}; what is done stays done: run it again"
    return f"a worker process ended with exit code {code}; what is done stays done: run it again"


def _serve(connection: Connection, work: Callable[[], Callable[[Any], Any]]) -> None:
    """Work for the parent until it is gone."""
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            function = work()
        except Exception as error:
            connection.recv()
            connection.send(_portable(error))
            return
        while True:
            item = connection.recv()
            try:
                result: Any = (function(item),)
            except Exception as error:
                result = _portable(error)
            connection.send(result)


def _portable(error: Exception) -> Exception:
    """Return the error as the parent shall raise it: a traceback does not survive pickling."""
    if isinstance(error, UserError | OutsideError | OSError):
        return error
    return RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
