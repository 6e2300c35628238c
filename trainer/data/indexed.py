"""Windows over Megatron's ``.bin``/``.idx`` files."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from trainer.data.source import Tokens
from trainer.errors import UserError

SPLITS = ("training", "validation", "test")


def split_documents(weights: tuple[float, float, float], documents: int) -> list[tuple[int, int]]:
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


class IndexedSource:
    """One split of an indexed data set, as windows of ``seq_length + 1`` tokens with stride ``seq_length``.

    Documents lie one after the other in the ``.bin`` file, so that a window is one contiguous read and may
    span documents.

    Parameters
    ----------
    dataset
        The opened data set.
    split
        0 training, 1 validation, 2 test.
    weights
        The splits' weights.
    seq_length
        Length of a window's inputs, in tokens.

    Raises
    ------
    UserError
        If the split has not even one window.
    """

    def __init__(
        self, dataset: IndexedDataset, split: int, weights: tuple[float, float, float], seq_length: int
    ) -> None:
        self._reader = dataset.bin_reader
        self._dtype = dataset.index.dtype
        self._seq_length = seq_length
        lengths = dataset.sequence_lengths
        boundaries = dataset.document_indices
        first, last = split_documents(weights, len(boundaries) - 1)[split]
        sequences = slice(int(boundaries[first]), int(boundaries[last]))
        self.documents = last - first
        self.tokens = int(np.sum(lengths[sequences], dtype=np.int64))
        self._start = int(np.sum(lengths[: sequences.start], dtype=np.int64))
        if self.tokens < seq_length + 1:
            raise UserError(
                f"the {SPLITS[split]} split of {dataset.path_prefix} has {self.tokens:,} tokens in "
                f"{self.documents:,} documents, but one window needs model.data.seq_length + 1 = "
                f"{seq_length + 1:,}; change model.data.splits_string or use more data"
            )

    @property
    def windows(self) -> int:
        """How many windows the split holds."""
        return (self.tokens - 1) // self._seq_length

    def window(self, index: int) -> Tokens:
        """Return window `index`."""
        if not 0 <= index < self.windows:
            raise IndexError(index)
        size = np.dtype(self._dtype).itemsize
        offset = (self._start + index * self._seq_length) * size
        tokens: Tokens = self._reader.read(self._dtype, self._seq_length + 1, offset).astype(np.int64)
        return tokens


def open_indexed(prefix: Path) -> IndexedDataset:
    """Open ``prefix.bin`` and ``prefix.idx``, mapped into memory.

    Raises
    ------
    UserError
        If a file is missing or is not an index of this format.
    """
    for suffix in (".idx", ".bin"):
        path = Path(f"{prefix}{suffix}")
        if not path.is_file():
            raise UserError(
                f"model.data.data_prefix={prefix}: there is no file {path}; "
                "`slipway data tokenize` makes one from text files"
            )
    try:
        return IndexedDataset(str(prefix), mmap=True)
    except (AssertionError, ValueError) as error:
        raise UserError(f"model.data.data_prefix={prefix}: not a Megatron data set: {error}") from None
