"""The sample index of a data set, from which the windows of its splits are computed.

A window is a contiguous piece of the ``.bin`` file, so that where it lies is arithmetic, once it is known
where each split begins and how many tokens it holds. That takes one pass over the ``.idx`` file, which also
checks that sequences are contiguous.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.arithmetic import indexed
from slipway.common.errors import UserError, suggest
from slipway.trainer.data.files import explain_missing

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


@dataclass(frozen=True)
class Tables:
    """The tables of an ``.idx``, mapped into memory.

    Attributes
    ----------
    dtype
        Name of the numpy type of the tokens.
    lengths
        Tokens of each sequence, ``[sequences]``.
    pointers
        The byte of the ``.bin`` at which each begins, ``[sequences]``.
    boundaries
        The first sequence of each document, and after them the number of sequences, ``[documents + 1]``.
    """

    dtype: str
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    boundaries: npt.NDArray[np.int64]

    def start(self, document: int) -> int:
        """Return the tokens before a document; the number of documents means the end."""
        sequence = int(self.boundaries[document])
        itemsize = np.dtype(self.dtype).itemsize
        if sequence < len(self.pointers):
            return int(self.pointers[sequence]) // itemsize
        return int(self.pointers[-1]) // itemsize + int(self.lengths[-1]) if len(self.pointers) else 0

    def document_at(self, token: int) -> int:
        """Return the document that holds a token, by bisection; the last of several that begin there."""
        return bisect.bisect_right(range(len(self.boundaries) - 1), token, key=self.start) - 1


def read_tables(prefix: Path) -> Tables:
    """Map the tables of ``prefix.idx`` into memory.

    Raises
    ------
    UserError
        If a file is missing, or is not of this format.
    """
    check_files(prefix)
    path = Path(f"{prefix}.idx")
    with path.open("rb") as file:
        head = file.read(indexed.HEADER.size)
        size = file.seek(0, 2)
    if not Path(f"{prefix}.bin").stat().st_size:
        raise _make_error(prefix, "its .bin is an empty file")
    try:
        header = indexed.parse_header(head, size)
    except ValueError as error:
        raise _make_error(prefix, str(error)) from None
    content: Any = np.memmap(path, dtype=np.uint8, mode="r")

    def table(start: int, count: int, dtype: str) -> Any:
        return np.frombuffer(content, dtype, count, start)

    tables = Tables(
        header.dtype,
        table(indexed.HEADER.size, header.sequences, "<i4"),
        table(header.pointers_at, header.sequences, "<i8"),
        table(header.boundaries_at, header.boundaries, "<i8"),
    )
    if not header.boundaries or tables.boundaries[-1] != header.sequences:
        raise _make_error(
            prefix, f"its documents do not end at its last sequence, number {header.sequences:,}"
        )
    return tables


def build_index(prefix: Path, weights: Weights, rule: str = indexed.SPLIT_RULE) -> SampleIndex:
    """Compute the index of ``prefix.bin`` and ``prefix.idx``, with splits by a rule.

    Raises
    ------
    UserError
        If a file is missing, is not of this format, or holds something else than tokens one after the other.
    """
    tables = read_tables(prefix)
    lengths, boundaries, dtype = tables.lengths, tables.boundaries, np.dtype(tables.dtype)
    if dtype.kind not in "ui":
        raise _make_error(prefix, f"tokens are whole numbers, but these are {dtype}")
    _check_order(prefix, lengths, tables.pointers, dtype.itemsize)
    splits = []
    for first, last in indexed.split_documents(weights, len(boundaries) - 1, rule):
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
        problem = explain_missing(path)
        if not problem:
            continue
        hint = "; write it without the suffix" if prefix.suffix in (".idx", ".bin") else _suggest(prefix)
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
        raise _make_error(prefix, f"its .idx tells of {index.size:,} bytes of tokens, its .bin has {found:,}")


def _check_order(prefix: Path, lengths: Any, pointers: Any, itemsize: int) -> None:
    """Sequences lie one after the other from the start of the file: a window is then one read."""
    following = 0
    for start in range(0, len(lengths), _CHUNK):
        sizes = lengths[start : start + _CHUNK].astype(np.int64) * itemsize
        ends = following + np.cumsum(sizes)
        expected = ends - sizes
        wrong = np.flatnonzero((pointers[start : start + _CHUNK] != expected) | (sizes < 0))
        if len(wrong):
            raise _make_error(
                prefix,
                f"sequence {start + int(wrong[0]):,} does not begin where the one before ends; write the "
                "data set anew with megatron-core's IndexedDatasetBuilder",
            )
        following = int(ends[-1])


def _sum(lengths: Any) -> int:
    return int(np.sum(lengths, dtype=np.int64))


def _suggest(prefix: Path) -> str:
    try:
        names = sorted(str(path.with_suffix("")) for path in prefix.parent.glob("*.idx"))
    except OSError:
        return ""
    return suggest(str(prefix), names)


def _make_error(prefix: Path, problem: str) -> UserError:
    return UserError(f"model.data.data_prefix={prefix}: not a Megatron data set: {problem}")
