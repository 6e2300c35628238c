"""Encoding: batches of texts to arrays of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.corpus.fast_encoding import FastEncoder, UnsupportedError
from slipway.corpus.tokenizers import BatchEncoder, TokenizerFiles, open_tokenizer

# Megatron takes two bytes for a token up to here (``DType.optimal_dtype``).
_TWO_BYTES_BELOW = 65500


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the type of tokens on the disk, as Megatron chooses it."""
    return np.dtype("<u2" if vocabulary < _TWO_BYTES_BELOW else "<i4")


class Encoder:
    """Encoder of documents: gigatoken where it gives the ids of the reference, which else does the work.

    Parameters
    ----------
    tokenizer
        Files of the tokenizer.
    append_eod
        End each document with the end-of-document token.

    Attributes
    ----------
    note
        Why gigatoken is not used; None if it is.
    """

    def __init__(self, tokenizer: TokenizerFiles, append_eod: bool) -> None:
        self._reference = open_tokenizer(tokenizer)
        self._type = token_type(tokenizer.vocabulary_size)
        self._end = (tokenizer.end_of_document,) if append_eod else ()
        self._encode: BatchEncoder = self._reference
        self.note: str | None = None
        self._fast: FastEncoder | None = None
        try:
            self._fast = FastEncoder(tokenizer.kind, tokenizer.paths, self._reference)
        except UnsupportedError as error:
            self.note = str(error)

    def start(self, key: str) -> None:
        """Begin a unit, whose content `key` identifies, with gigatoken if possible."""
        if self._fast is not None:
            self._fast.start(key)
            self._encode = self._fast.encode

    def use_reference(self) -> None:
        """Encode by the reference until the next `start`."""
        self._encode = self._reference

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        """Return the tokens of each text.

        Raises
        ------
        DifferentIdsError
            If gigatoken's ids are not the reference's: the unit is to be encoded again, by the reference.
        """
        return [self._array(ids) for ids in self._encode(texts)]

    def _array(self, ids: Any) -> npt.NDArray[Any]:
        tokens = np.empty(len(ids) + len(self._end), self._type)
        tokens[: len(ids)] = ids
        tokens[len(ids) :] = self._end
        return tokens
