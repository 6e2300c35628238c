"""Where windows of tokens come from."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

# Enough different tokens to be learnt from, few enough to be learnt quickly.
_MOCK_ALPHABET = 512
_MOCK_STEPS = 4
_VALIDATION_STREAM = 1 << 32


def loss_mask(window: Tokens, masked_token: int | None) -> npt.NDArray[np.float32]:
    """Return 1.0 where the loss counts, for each input position of a window, ``[seq_length]``.

    With a `masked_token` (NeMo's ``eod_mask_loss``) it does not count where that token is the input.
    """
    if masked_token is None:
        return np.ones(len(window) - 1, dtype=np.float32)
    mask: npt.NDArray[np.float32] = (window[:-1] != masked_token).astype(np.float32)
    return mask


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
    validation
        Whether to draw from the validation stream, which never repeats a training sample's numbers.
    """

    windows: int | None = None

    def __init__(self, seq_length: int, vocabulary: int, seed: int, validation: bool) -> None:
        self._positions = np.arange(seq_length + 1, dtype=np.int64)
        self._alphabet = min(vocabulary, _MOCK_ALPHABET)
        self._seed = seed
        self._offset = _VALIDATION_STREAM if validation else 0

    def window(self, index: int) -> Tokens:
        """Return sample `index`."""
        random: Any = np.random.default_rng((self._seed, self._offset + index))
        start = int(random.integers(self._alphabet))
        step = 1 + int(random.integers(_MOCK_STEPS))
        return (start + step * self._positions) % self._alphabet
