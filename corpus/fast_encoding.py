"""The fast path: gigatoken in place of `tokenizers`, as long as both give the same ids.

On one core gigatoken encodes dozens of times as many tokens per second. It is a beta by one author, so that
its ids are compared with the reference: on awkward texts when a process starts, and on a sample of each unit.
Where they differ, the unit is encoded again by the reference: what is written never depends on gigatoken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]
Reference = Callable[[list[str]], list[Any]]

# Characters. The reference takes some sixty times as long: these samples are 3 % of the time.
_SAMPLE_EVERY = 1 << 22
_SAMPLE = 1 << 11
# Scripts, joined and combining characters, white space of all kinds, contractions, digits, special tokens.
PROBES = (
    "",
    " ",
    " \n\n\t x \r\n\r\n  y",
    "a\0b\x85\x1c\ufeff\u200b\u202e\u3000\u00a0 c",
    "it's I'LL they've 'tis don't  stop ſ's",
    "0123456789 3.14 1,000,000 １２３ ٣٤٥ Ⅷ①²",
    "e\u0301 é ŉ ǅ ﬁ Å ß ẞ İ ı",
    "日本語のテキスト。中文文本，한국어 텍스트 ภาษาไทย हिन्दी العربية עברית",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽",
    "\ud7ff\ue000\uffff\U0010ffff",
    "!?.,;: --- *** <<>> {[()]} \\ // `` \"\" ''",
    "<|endoftext|> <s></s> <pad> [MASK] <|im_start|>",
    "def f(x):\n    return {'a': x**2, \"b\": [1, 2]}  # comment\n\n\n",
    "x" * 3000 + " " * 3000 + "\n" * 300,
)


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
    reference
        Function that encodes texts.

    Raises
    ------
    UnsupportedError
        If gigatoken is not installed or cannot take the tokenizer, such as one of SentencePiece, or if the
        ids of an awkward text differ.
    """

    def __init__(self, kind: str, paths: Sequence[Path], reference: Reference) -> None:
        self._reference = reference
        try:
            self._encode = _open(kind, paths)
        except ImportError:
            raise UnsupportedError("gigatoken is not installed") from None
        except Exception as error:
            raise UnsupportedError(f"gigatoken cannot take this tokenizer: {error}") from None
        self.start("")
        try:
            self._compare(list(PROBES))
        except DifferentIdsError as error:
            raise UnsupportedError(str(error)) from None

    def start(self, key: str) -> None:
        """Begin a unit, whose content `key` identifies: the sample follows from it."""
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
