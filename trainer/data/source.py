"""Where windows of tokens come from."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.seeds import sample_seed
from trainer.errors import UserError

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


def counted_targets(window: Tokens, masked_token: int | None) -> Tokens:
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


class Source(Protocol):
    """Windows of ``seq_length + 1`` tokens: a window's inputs, and the same shifted by one as its targets."""

    @property
    def windows(self) -> int | None:
        """How many windows there are; None if there is no end of them."""

    def window(self, index: int) -> Tokens:
        """Return window `index`, ``[seq_length + 1]``."""


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
