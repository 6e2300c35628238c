"""Windows over Megatron's ``.bin``/``.idx`` files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.data.index import SampleIndex, check_files, check_size
from trainer.data.source import Tokens
from trainer.errors import UserError

SPLITS = ("training", "validation", "test")


class IndexedSource:
    """One split of an indexed data set, as windows of ``seq_length + 1`` tokens with stride ``seq_length``.

    Documents lie one after the other in the ``.bin`` file, so that a window is one contiguous read and may
    span documents.

    Parameters
    ----------
    prefix
        Path of the ``.bin`` file without the suffix.
    index
        The data set's.
    split
        0 training, 1 validation, 2 test.
    seq_length
        Length of a window's inputs, in tokens.

    Raises
    ------
    UserError
        If the files are missing here or not those of the index, or the split has not even one window.
    """

    def __init__(self, prefix: Path, index: SampleIndex, split: int, seq_length: int) -> None:
        part = index.splits[split]
        self.documents, self.tokens, self._start = part.documents, part.tokens, part.start
        self._seq_length = seq_length
        if self.tokens < seq_length + 1:
            raise UserError(
                f"the {SPLITS[split]} split of {prefix} has {self.tokens:,} tokens in "
                f"{self.documents:,} documents, but one window needs model.data.seq_length + 1 = "
                f"{seq_length + 1:,}; change model.data.splits_string or use more data"
            )
        check_files(prefix)
        try:
            check_size(prefix, index)
            self._stream = np.asarray(np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r"))
        except OSError as error:
            raise UserError(f"model.data.data_prefix={prefix}: it cannot be read: {error}", "rank") from None

    @property
    def windows(self) -> int:
        """How many windows the split holds."""
        return (self.tokens - 1) // self._seq_length

    def window(self, index: int) -> Tokens:
        """Return window `index`."""
        if not 0 <= index < self.windows:
            raise IndexError(index)
        start = self._start + index * self._seq_length
        tokens: Tokens = self._stream[start : start + self._seq_length + 1].astype(np.int64)
        return tokens
