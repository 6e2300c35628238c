"""Context parallelism for an attention that has none: each rank gathers the keys and values of all.

As in the training of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2): the keys of grouped
queries are few, and any mask can be had. A rank's tokens are two chunks of the sequence, one from either end,
so that all ranks have as much causal attention to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def gather_tokens(x: Any, group: Any) -> Any:
    """Return ``[t, ...]``, all tokens in their order, from this rank's ``[t / ranks, ...]``.

    Its gradient is the sum of the ranks' gradients.
    """
    gathered = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    chunks = gathered.chunk(2 * group.size(), dim=0)
    # They come as 0, last, 1, last but one, ...
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])), dim=0)


def ahead(length: int, group: Any, device: Any) -> Any:
    """Return ``[length, length * ranks]``, True where one of this rank's tokens would look ahead."""
    rank, ranks, half = group.rank(), group.size(), length // 2
    starts = (rank * half, (2 * ranks - 1 - rank) * half)
    own = torch.cat([torch.arange(start, start + half, device=device) for start in starts])
    return torch.arange(length * ranks, device=device) > own[:, None]
