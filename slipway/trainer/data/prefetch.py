"""Prefetching: a thread prepares micro batches while the step before is computed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

# Micro batches: enough to bridge the jitter of reads, few enough to be small compared with the model. On a
# CPU the thread would take its time from the training itself.
DEPTH_ON_CUDA = 16
DEPTH_ON_CPU = 0
_POLL_SECONDS = 0.1


# Marks the end of a step in the queue.
_STEP_END = object()


class Prefetcher(Generic[T]):
    """A queue of micro batches, step after step, in their order.

    Parameters
    ----------
    steps
        The micro batches of each step. Only one thread iterates over it, ahead of the requests.
    depth
        How many micro batches are kept ready; 0 makes each when it is asked for, without a thread.
    device
        Where the tensors go. To a GPU they are copied from pinned memory, asynchronously.
    """

    def __init__(self, steps: Iterable[Iterable[T]], depth: int, device: Any) -> None:
        self.waited = 0.0
        self._device = device
        self._stop = threading.Event()
        self._items = _flatten(steps)
        self._queue: queue.Queue[Any] | None = None
        self._thread: threading.Thread | None = None
        self._at_step_end = True
        if depth:
            self._queue = queue.Queue(depth)
            self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
            self._thread.start()

    def step(self) -> Iterator[T]:
        """Return the micro batches of the next step; skip those of the step before that were not taken.

        Seconds that were spent waiting for them are added to `waited`.

        Raises
        ------
        Exception
            The error of making a micro batch, when its place in the order is reached.
        """
        while not self._at_step_end:
            self._next()
        self._at_step_end = False
        return self._batches()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _batches(self) -> Iterator[T]:
        while not self._at_step_end:
            began = time.perf_counter()
            item = self._next()
            self.waited += time.perf_counter() - began
            if not self._at_step_end:
                yield move_to_device(item, self._device)

    def _next(self) -> Any:
        item = self._queue.get() if self._queue else next(self._items, _STEP_END)
        if isinstance(item, BaseException):
            self._at_step_end = True
            raise item
        self._at_step_end = item is _STEP_END
        return item

    def _fill(self) -> None:
        pinned = self._device.type == "cuda"
        try:
            if pinned:
                # A thread begins with device 0, where each of a node's ranks would start a context.
                torch.cuda.set_device(self._device)
            for item in self._items:
                if not self._put(pin(item) if pinned and item is not _STEP_END else item):
                    return
            # Beyond the last step there is nothing, however often one asks.
            while self._put(_STEP_END):
                pass
        except BaseException as error:
            # Raised in the thread that asks.
            self._put(error)

    def _put(self, item: Any) -> bool:
        assert self._queue
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False


def move_to_device(batch: T, device: Any) -> T:
    """Return a batch, a dataclass, with its tensors on a device."""
    return _change_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: T) -> T:
    """Return a batch with its tensors in memory that a GPU can read by itself."""
    return _change_tensors(batch, lambda tensor: tensor.pin_memory())


def _flatten(steps: Iterable[Iterable[T]]) -> Iterator[Any]:
    for step in steps:
        yield from step
        yield _STEP_END


def _change_tensors(batch: T, change: Any) -> T:
    assert is_dataclass(batch) and not isinstance(batch, type)
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: change(v) for name, v in values.items() if isinstance(v, torch.Tensor)})
