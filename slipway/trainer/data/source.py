"""Sources of windows of tokens: mock sequences, Megatron's ``.bin``/``.idx`` files, and blends of those."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.common.errors import UserError
from slipway.trainer.data.index import SampleIndex, check_files, check_size
from slipway.trainer.data.interleave import Interleaving
from slipway.trainer.data.seeds import sample_seed

Tokens = npt.NDArray[np.int64]

# Enough different tokens to be learnt from, few enough to be learnt quickly.
_MOCK_ALPHABET = 512
_MOCK_STEPS = 4


def loss_mask(window: Tokens, masked_token: int | None) -> npt.NDArray[np.float32]:
    """Return 1.0 where the loss counts, for each input position of a window, ``[seq_length]``.

    With a `masked_token` (NeMo's ``eod_mask_loss``) it does not count where that token is the input.
    """
    if masked_token is None:
        return np.ones(len(window) - 1, dtype=np.float32)
    mask: npt.NDArray[np.float32] = (window[:-1] != masked_token).astype(np.float32)
    return mask


def select_targets(window: Tokens, masked_token: int | None) -> Tokens:
    """Return the targets of a window where the loss counts, at most ``[seq_length]``; see `loss_mask`."""
    return window[1:][loss_mask(window, masked_token) > 0]


def check_tokens(tokens: Tokens, vocabulary: int) -> None:
    """Check that all tokens are of a tokenizer of so many.

    Tensor-parallel embeddings would silently read a foreign one as zeros.

    Raises
    ------
    UserError
        If one is not.
    """
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocabulary:
        raise UserError(
            f"the data hold token {lowest if lowest < 0 else highest}, but the vocabulary of model.tokenizer "
            f"ends at {vocabulary - 1}: were they made with another tokenizer?",
            found_by="rank",
        )


class MockSource:
    """Sequences that count upwards in steps of 1 to 4, made from the seed and the sample's number.

    The structure can be learnt: a model has to infer the step from the context.

    Parameters
    ----------
    seq_length
        Length of a window's inputs, in tokens.
    vocabulary
        Number of tokens; the first 512 are used.
    seed
        Together with the sample's number it determines every token.
    generation
        The data generation; `HELDOUT` for validation, which then has other samples than training.
    """

    windows: int | None = None

    def __init__(self, seq_length: int, vocabulary: int, seed: int, generation: int = 0) -> None:
        self._positions = np.arange(seq_length + 1, dtype=np.int64)
        self._alphabet = min(vocabulary, _MOCK_ALPHABET)
        self._seed, self._generation = seed, generation

    def window(self, index: int) -> Tokens:
        """Return sample `index`."""
        drawn = sample_seed(self._seed, self._generation, index)
        start, step = drawn % self._alphabet, 1 + (drawn >> 32) % _MOCK_STEPS
        return (start + step * self._positions) % self._alphabet


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
            unneeded = "; trainer.limit_val_batches=0 trains without validation" if split == 1 else ""
            raise UserError(
                f"the {SPLITS[split]} split of {prefix} has {self.tokens:,} tokens in "
                f"{self.documents:,} documents, but one window needs model.data.seq_length + 1 = "
                f"{seq_length + 1:,}; change model.data.splits_string or use more data{unneeded}"
            )
        check_files(prefix)
        try:
            check_size(prefix, index)
            self._stream = np.asarray(np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r"))
        except OSError as error:
            raise UserError(f"model.data.data_prefix={prefix}: it cannot be read: {error}", "rank") from None

    @property
    def windows(self) -> int:
        """Return the number of windows in the split."""
        return (self.tokens - 1) // self._seq_length

    def window(self, index: int) -> Tokens:
        """Return window `index`."""
        start = self.place(index)[2]
        tokens: Tokens = self._stream[start : start + self._seq_length + 1].astype(np.int64)
        return tokens

    def place(self, index: int) -> tuple[int, int, int]:
        """Return 0 for the data set, the number of the window there, and the tokens before it."""
        if not 0 <= index < self.windows:
            raise IndexError(index)
        return 0, index, self._start + index * self._seq_length


class BlendedSource:
    """The windows of the first source, then those of the second, and so on.

    Parameters
    ----------
    sources
        One for each data set.
    weights
        How much of each is trained on; None for as much as each has windows, as in Megatron.
    """

    def __init__(self, sources: Sequence[IndexedSource], weights: Sequence[Fraction] | None) -> None:
        self.sources = sources
        self.sizes = [source.windows for source in sources]
        self.interleaving = Interleaving(self.sizes if weights is None else weights)
        self._starts = [0, *itertools.accumulate(self.sizes)]

    @property
    def windows(self) -> int:
        """Return the number of windows in all sources."""
        return self._starts[-1]

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all sources."""
        return sum(source.tokens for source in self.sources)

    @property
    def documents(self) -> int:
        """Return the number of documents in all sources."""
        return sum(source.documents for source in self.sources)

    def window(self, index: int) -> Tokens:
        """Return window `index`."""
        source, number = self._member(index)
        return self.sources[source].window(number)

    def place(self, index: int) -> tuple[int, int, int]:
        """Return the data set of a window, its number there, and the tokens of that `.bin` before it."""
        source, number = self._member(index)
        return source, number, self.sources[source].place(number)[2]

    def _member(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.windows:
            raise IndexError(index)
        source = bisect.bisect_right(self._starts, index) - 1
        return source, index - self._starts[source]

    def number(self, source: int, window: int) -> int:
        """Return the number here of a window of a source."""
        return self._starts[source] + window


# Windows of ``seq_length + 1`` tokens: a window's inputs, and the same shifted by one as its targets.
Source = MockSource | IndexedSource | BlendedSource
