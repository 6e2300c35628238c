"""Encoding: batches of texts to arrays of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from corpus.tokenizers import TokenizerFiles, open_tokenizer

# Megatron takes two bytes for a token up to here (``DType.optimal_dtype``).
_TWO_BYTES_BELOW = 65500


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the type of tokens on the disk, as Megatron chooses it."""
    return np.dtype("<u2" if vocabulary < _TWO_BYTES_BELOW else "<i4")


class Encoder:
    """Encoder of documents.

    Parameters
    ----------
    tokenizer
        Files of the tokenizer.
    append_eod
        End each document with the end-of-document token.
    """

    def __init__(self, tokenizer: TokenizerFiles, append_eod: bool) -> None:
        self._encode = open_tokenizer(tokenizer)
        self._type = token_type(tokenizer.vocabulary_size)
        self._end = (tokenizer.end_of_document,) if append_eod else ()

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return the tokens of each text."""
        return [self._array(ids) for ids in self._encode(list(texts))]

    def _array(self, ids: Any) -> npt.NDArray[Any]:
        tokens = np.empty(len(ids) + len(self._end), self._type)
        tokens[: len(ids)] = ids
        tokens[len(ids) :] = self._end
        return tokens
