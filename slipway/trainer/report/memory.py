"""The memory of the ranks: the fullest of them, and allocations that had to be tried again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipway.trainer.device import measure_used_bytes

ALLOCATED, RESERVED, RETRIES = "allocated_bytes", "reserved_bytes", "allocation_retries"
FIELDS = (ALLOCATED, RESERVED, RETRIES)


def memory_usage(device: Any) -> list[float]:
    """Return `FIELDS` of this rank, without waiting for its device.

    On a GPU, the most bytes that tensors took and that PyTorch's allocator held, and how often it freed its
    cache to find room. On a CPU, the resident bytes twice, and 0.
    """
    used = measure_used_bytes(device)
    if device.type != "cuda":
        return [used, used, 0]
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return [used, torch.cuda.max_memory_reserved(device), retries]


def find_fullest(by_rank: Sequence[Sequence[float]]) -> dict[str, dict[str, int]]:
    """Return the ``max`` of each of `FIELDS` over ``[ranks][FIELDS]``, and the first ``rank`` that has it."""
    columns = ([int(row[index]) for row in by_rank] for index in range(len(FIELDS)))
    return {
        name: {"max": max(column), "rank": column.index(max(column))}
        for name, column in zip(FIELDS, columns, strict=True)
    }
