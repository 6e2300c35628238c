"""The fast path: gigatoken in place of `tokenizers`, as long as both give the same ids.

On one core gigatoken encodes dozens of times as many tokens per second. It is a beta by one author, so that
its ids are compared with the reference: on awkward texts when a process starts, and on a sample of each unit.
Where they differ, the unit is encoded again by the reference. Their editions of Unicode differ: a document
with a character that is new to the reference is encoded by that.
"""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.arithmetic.probe_texts import probe_texts

Ids = npt.NDArray[np.uint32]
Reference = Callable[[list[str]], list[Any]]

# Characters. The reference takes some sixty times as long: these samples are 3 % of the time.
_SAMPLE_EVERY = 1 << 22
_SAMPLE = 1 << 11


class UnsupportedError(Exception):
    """The tokenizer cannot be encoded by gigatoken; the message says why."""


class DifferentIdsError(Exception):
    """gigatoken failed, or gave other ids than the reference."""


class FastEncoder:
    """Encoder of texts by gigatoken, compared with a reference.

    Parameters
    ----------
    kind
        ``gpt2``, ``tokenizer.json`` or ``sentencepiece``.
    paths
        Files of the tokenizer.

    Raises
    ------
    UnsupportedError
        If gigatoken is not installed or cannot take the tokenizer, such as one of SentencePiece, or if the
        ids of an awkward text differ.
    """

    def __init__(self, kind: str, paths: Sequence[Path], reference: Reference) -> None:
        self._reference = reference
        try:
            self._fast = _open(kind, paths)
        except ImportError:
            raise UnsupportedError("gigatoken is not installed") from None
        except Exception as error:
            raise UnsupportedError(f"gigatoken cannot take this tokenizer: {error}") from None
        self._unassigned = _find_unassigned()
        self.start("")
        content = json.loads(paths[0].read_bytes()) if kind == "tokenizer.json" else {}
        added = [token["content"] for token in content.get("added_tokens") or ()]
        try:
            self._compare([self._remove_new(text) for text in probe_texts(added)])
        except DifferentIdsError as error:
            raise UnsupportedError(str(error)) from None

    def start(self, key: str) -> None:
        """Begin a unit; its content's `key` determines the sample."""
        self._draw = random.Random(key)
        self._until_sample = 0

    def encode(self, texts: list[str]) -> list[Ids]:
        """Return the ids of each text.

        Raises
        ------
        DifferentIdsError
            If those of a sample are not the reference's: the unit is to be encoded again without this.
        """
        try:
            ids = [self._encode(text) for text in texts]
        except BaseException as error:
            # A panic of Rust is no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise DifferentIdsError(f"gigatoken failed: {error}") from None
            raise
        size = sum(map(len, texts))
        self._until_sample -= size
        if self._until_sample < 0 and size:
            self._until_sample = self._draw.randrange(2 * _SAMPLE_EVERY)
            self._compare([_part(texts, self._draw.randrange(size))])
        return ids

    def _encode(self, text: str) -> Ids:
        if not text.isascii() and self._unassigned.take(_code_points(text)).any():
            return np.asarray(self._reference([text])[0], np.uint32)
        return self._fast(text)

    def _remove_new(self, text: str) -> str:
        """Return a text without the characters for which it would go to the reference."""
        numbers = _code_points(text)
        return numbers[~self._unassigned[numbers]].tobytes().decode("utf-32-le")

    def _compare(self, texts: list[str]) -> None:
        expected = self._reference(texts)
        for text, right in zip(texts, expected, strict=True):
            if not np.array_equal(self._encode(text), right):
                raise DifferentIdsError(f"gigatoken's ids differ from the reference's for {text[:60]!r}")


def _part(texts: list[str], position: int) -> str:
    """Return the document that has the character at a position of all texts, or the part around it."""
    for text in texts:
        if position < len(text):
            begin = max(0, min(position - _SAMPLE // 2, len(text) - _SAMPLE))
            return text[begin : begin + _SAMPLE]
        position -= len(text)
    raise IndexError(position)


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


@cache
def _find_unassigned() -> npt.NDArray[np.bool_]:
    """Return by code point whether the reference's edition of Unicode, or Python's, does not assign it.

    The reference reads Unicode's tables in several of its libraries, but only the regular expressions' can
    be asked; Python's are as a rule older than all of them.
    """
    from tokenizers import Regex, pre_tokenizers

    # The planes in between have no characters; those above, for private use, are rare in texts.
    numbers = [*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200)]
    assigned = pre_tokenizers.Split(Regex(r"\p{Cn}"), "removed")
    unassigned = np.ones(sys.maxunicode + 1, np.bool_)
    for part, _ in assigned.pre_tokenize_str("".join(map(chr, numbers))):
        unassigned[[ord(c) for c in part if unicodedata.category(c) != "Cn"]] = False
    return unassigned


def _open(kind: str, paths: Sequence[Path]) -> Callable[[str], Ids]:
    from gigatoken import Tokenizer

    if kind == "gpt2":
        from tokenizers import ByteLevelBPETokenizer

        vocabulary, merges = map(str, paths)
        tokenizer = Tokenizer.from_json(ByteLevelBPETokenizer(vocabulary, merges).to_str())
    elif kind == "sentencepiece":
        # 0.10.0: it takes `<s>` in a text for the token, and form feeds for no white space.
        raise ValueError("it reads special tokens and white space otherwise than SentencePiece")
    else:
        tokenizer = Tokenizer.from_json(paths[0].read_bytes())
    # One text at a time is as quick as a batch, which would import awkward: 50 MB and 0.3 s in each process.
    encode: Callable[[str], Ids] = tokenizer.backend.encode
    return encode
