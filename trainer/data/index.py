"""The sample index of a data set: what the windows of its splits are computed from.

A window is a contiguous piece of the ``.bin`` file, so that where it lies is arithmetic, once it is known
where each split begins and how many tokens it holds. That takes one pass over the ``.idx`` file, which also
checks that sequences are contiguous.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.files import why_missing
from trainer.errors import UserError, suggest

Weights = tuple[float, float, float]
# Sequences that are looked at together: few enough for the processor's cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Split:
    """A part of a data set: its documents, the tokens before it, and its own."""

    documents: int
    start: int
    tokens: int


@dataclass(frozen=True)
class SampleIndex:
    """The sample index of a data set.

    Attributes
    ----------
    dtype
        Name of the numpy type of the tokens.
    tokens
        Tokens in the ``.bin`` file.
    splits
        Training, validation and test.
    """

    dtype: str
    tokens: int
    splits: tuple[Split, ...]

    @property
    def size(self) -> int:
        """Size of the ``.bin`` file in bytes."""
        return self.tokens * int(np.dtype(self.dtype).itemsize)


def split_documents(weights: Weights, documents: int) -> list[tuple[int, int]]:
    """Divide documents, in order, among training, validation and test.

    Parameters
    ----------
    weights
        Any non-negative numbers; only their ratios count.
    documents
        Number of documents.

    Returns
    -------
    list of (int, int)
        First document and one past the last, for each split. Rounding is Megatron's
        (``get_train_valid_test_split_``): each part is rounded, then all ends are shifted by what is over.
    """
    total = sum(weights)
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + round(weight / total * documents))
    surplus = ends[-1] - documents
    ends = [0, *(max(0, end - surplus) for end in ends[1:])]
    return list(itertools.pairwise(ends))


def build_index(prefix: Path, weights: Weights) -> SampleIndex:
    """Compute the index of ``prefix.bin`` and ``prefix.idx``.

    Raises
    ------
    UserError
        If a file is missing, is not of this format, or holds something else than tokens one after the other.
    """
    dataset = _open(prefix)
    lengths, boundaries = dataset.sequence_lengths, dataset.document_indices
    dtype = np.dtype(dataset.index.dtype)
    if dtype.kind not in "ui":
        raise _wrong(prefix, f"tokens are whole numbers, but these are {dtype}")
    _check_order(prefix, lengths, dataset.index.sequence_pointers, dtype.itemsize)
    splits = []
    for first, last in split_documents(weights, len(boundaries) - 1):
        begin, end = int(boundaries[first]), int(boundaries[last])
        splits.append(Split(last - first, _sum(lengths[:begin]), _sum(lengths[begin:end])))
    return SampleIndex(dtype.name, _sum(lengths), tuple(splits))


def check_files(prefix: Path) -> None:
    """Check that both files are there.

    Raises
    ------
    UserError
        With the nearest name that is, if one is not.
    """
    for suffix in (".idx", ".bin"):
        path = Path(f"{prefix}{suffix}")
        problem = why_missing(path)
        if not problem:
            continue
        hint = "; write it without the suffix" if prefix.suffix in (".idx", ".bin") else _nearest(prefix)
        raise UserError(
            f"model.data.data_prefix={prefix}: {path}: {problem}{hint}; "
            "`slipway data tokenize` makes one from text files"
        )


def check_size(prefix: Path, index: SampleIndex) -> None:
    """Check that the ``.bin`` file is as long as the index says.

    Raises
    ------
    UserError
        If it is cut short, or belongs to another ``.idx``.
    """
    found = Path(f"{prefix}.bin").stat().st_size
    if found != index.size:
        raise _wrong(prefix, f"its .idx tells of {index.size:,} bytes of tokens, its .bin has {found:,}")


def _open(prefix: Path) -> Any:
    # Only the process that reads the .idx needs it, and importing it takes seconds.
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    check_files(prefix)
    if not Path(f"{prefix}.bin").stat().st_size:
        raise _wrong(prefix, "its .bin is an empty file")
    try:
        dataset: Any = IndexedDataset.__new__(IndexedDataset)
        # If it cannot be opened, its __del__ would print a traceback for want of these.
        dataset.bin_reader = dataset.index = None
        dataset.__init__(str(prefix), mmap=True)
        return dataset
    except (AssertionError, ValueError, OverflowError, IndexError, AttributeError, struct.error) as error:
        raise _wrong(prefix, str(error)) from None


def _check_order(prefix: Path, lengths: Any, pointers: Any, itemsize: int) -> None:
    """Sequences lie one after the other from the start of the file: a window is then one read."""
    following = 0
    for start in range(0, len(lengths), _CHUNK):
        sizes = lengths[start : start + _CHUNK].astype(np.int64) * itemsize
        ends = following + np.cumsum(sizes)
        expected = ends - sizes
        wrong = np.flatnonzero((pointers[start : start + _CHUNK] != expected) | (sizes < 0))
        if len(wrong):
            raise _wrong(
                prefix,
                f"sequence {start + int(wrong[0]):,} does not begin where the one before ends; write the "
                "data set anew with megatron-core's IndexedDatasetBuilder",
            )
        following = int(ends[-1])


def _sum(lengths: Any) -> int:
    return int(np.sum(lengths, dtype=np.int64))


def _nearest(prefix: Path) -> str:
    try:
        names = sorted(str(path.with_suffix("")) for path in prefix.parent.glob("*.idx"))
    except OSError:
        return ""
    return suggest(str(prefix), names)


def _wrong(prefix: Path, problem: str) -> UserError:
    return UserError(f"model.data.data_prefix={prefix}: not a Megatron data set: {problem}")
