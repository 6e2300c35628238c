"""megatron-core's writer of checkpoint files, in this process.

megatron-core forks a process for each file and waits for it without an end: one that is killed, say for want
of memory, hangs the training, and one whose training is killed stays, with its standard output held open. A
rank writes one file, so that the fork gains nothing.
"""

from __future__ import annotations

import queue
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from trainer.logs import LOGGER


def make_strategy() -> Any:
    """Return the strategy for one save: format ``torch_dist``, one file per rank."""
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_here)
    # megatron-core would keep a server process for this queue, which outlives a killed rank.
    filesystem_async._results_queue = queue.Queue()
    return TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)


def take_snapshot(buckets: list[Any], copy: bool) -> None:
    """Replace the tensors that are going to be written by such in host memory.

    Parameters
    ----------
    buckets
        megatron-core's: for each file its path, its name and what is in it. Objects are bytes already.
    copy
        Whether the training goes on before they are written: tensors in host memory are then copied as well.
    """
    # In place, so that megatron-core's writer does not keep what it had on the device.
    buckets[:] = [
        (path, name, (objects, [(item, _fetched(tensor, copy)) for item, tensor in tensors]))
        for path, name, (objects, tensors) in buckets
    ]
    # Copies from a device may still be under way.
    torch.cuda.synchronize()


def _fetched(tensor: Any, copy: bool) -> Any:
    if tensor.is_cpu:
        return tensor.clone() if copy else tensor
    return tensor.to("cpu", non_blocking=True)


def _write_here(transforms: Any, _use_msc: bool, _rank: int, buckets: list[Any], results: Any) -> None:
    """Stand in for ``write_preloaded_data_multiproc``: each bucket's results, or one exception for all."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answer: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answer, count, True)
        _, found = answer.get_nowait()
        if isinstance(found, Exception):
            # The error that megatron-core raises on every rank names neither the file nor the first cause.
            LOGGER.error("cannot write %s: %s", bucket[0], _first_cause(found))
            results.put(found)
            return
        written[number] = found
    results.put(written)


def _first_cause(error: BaseException) -> BaseException:
    while error.__context__ is not None:
        error = error.__context__
    return error
