"""megatron-core's strategies for checkpoint files: every rank writes and reads a share (``torch_dist``)."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from slipway.trainer.logs import LOGGER


class SaveStrategy:
    """The strategy of all saves of a run; every rank has one.

    What data- and context-parallel ranks hold alike is written once, in equal shares. The shares, the plans
    and the index are worked out in the first saves and reused: the state of a run has one structure. Only the
    first save is validated, for which all ranks exchange the metadata of all tensors.

    One file per rank, written by this process: megatron-core forks a process for each file and waits for it
    without an end. A forked process that is killed, say for want of memory, hangs the training; if the
    training is killed, the process stays, with its standard output held open. A rank writes one file, so that
    the fork gains nothing.
    """

    def __init__(self) -> None:
        FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_here)
        # megatron-core would keep a server process for this queue, which outlives a killed rank.
        filesystem_async._results_queue = queue.Queue()
        files = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1, cached_metadata=True)
        self._inner = FullyParallelSaveStrategyWrapper(files, _replicas(), do_cache_distribution=True)
        self._is_validated = False

    def begin(self, state: dict[str, Any], directory: Path) -> Any:
        """Plan a save and write the common state; return megatron-core's request to write the rest."""
        request = dist_checkpointing.save(
            state,
            str(directory),
            self._inner,
            validate_access_integrity=not self._is_validated,
            async_sharded_save=True,
        )
        self._is_validated = True
        return request


def load_strategy() -> Any:
    """Return the strategy of a load: ranks that hold the same tensors read a share each, and exchange."""
    return FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas())


def _replicas() -> Any:
    """Return the group of the ranks that hold the same weights."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _write_here(transforms: Any, _use_msc: bool, _rank: int, buckets: list[Any], results: Any) -> None:
    """Replace ``write_preloaded_data_multiproc``: each bucket's results, or one exception for all."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answer: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answer, count, True)
        _, result = answer.get_nowait()
        if isinstance(result, Exception):
            # The error that megatron-core raises on every rank names neither the file nor the first cause.
            LOGGER.error("cannot write %s: %s", bucket[0], _find_first_cause(result))
            results.put(result)
            return
        written[number] = result
    results.put(written)


def _find_first_cause(error: BaseException) -> BaseException:
    while error.__context__ is not None:
        error = error.__context__
    return error
