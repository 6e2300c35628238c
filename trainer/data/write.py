"""Write Megatron's ``.bin``/``.idx``: complete under their names, or not there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from trainer.data.encode import Chunk
from trainer.data.heldout import entropy
from trainer.errors import UserError


@dataclass(frozen=True)
class Written:
    """Counts of what was written; `unigram_entropy` in nats per token."""

    documents: int
    tokens: int
    skipped: int
    unigram_entropy: float


def write_indexed(prefix: Path, chunks: Iterable[Chunk], vocabulary: int) -> Written:
    """Write the documents of all chunks to ``prefix.bin`` and ``prefix.idx``.

    Token ids take two bytes where the vocabulary allows it, as in Megatron.

    Raises
    ------
    UserError
        If there is no document at all.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    bin_path, idx_path = (_unfinished(prefix, suffix) for suffix in (".bin", ".idx"))
    builder = IndexedDatasetBuilder(str(bin_path), dtype=DType.optimal_dtype(vocabulary))
    counts = np.zeros(vocabulary, dtype=np.int64)
    documents = skipped = 0
    for chunk in chunks:
        start = 0
        for length in chunk.lengths:
            builder.add_document(torch.from_numpy(chunk.tokens[start : start + length]), [length])
            start += length
        counts += np.bincount(chunk.tokens, minlength=vocabulary)
        documents += len(chunk.lengths)
        skipped += chunk.skipped
    builder.finalize(str(idx_path))
    if documents == 0:
        bin_path.unlink()
        idx_path.unlink()
        raise UserError(f"no document: all {skipped:,} files are empty or not UTF-8")
    _publish(prefix, bin_path, idx_path)
    tokens, nats = entropy(counts)
    return Written(documents, tokens, skipped, nats)


def _unfinished(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(f".unfinished-{os.getpid()}-{prefix.name}{suffix}")


def _publish(prefix: Path, bin_path: Path, idx_path: Path) -> None:
    for path in (bin_path, idx_path):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    # A reader that finds an index must find its data: an old index goes first, the new one comes last. An old
    # summary goes too: it would vouch for data that it does not describe.
    for suffix in (".json", ".idx"):
        Path(f"{prefix}{suffix}").unlink(missing_ok=True)
    bin_path.replace(f"{prefix}.bin")
    idx_path.replace(f"{prefix}.idx")
