"""Units of work: which bytes of which source files become one shard.

They follow from the sources and `shard_bytes` alone, never from the number of tasks or workers: that is why
the tokens are the same however they were prepared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipway.common.sections import DataPreparation

# Small data sets have this many units at least, so that tasks and workers share them.
_SHARES = 32
_SMALLEST_UNIT = 1 << 20
# Formats of lines: a unit may begin and end within a file.
_DIVISIBLE = ("jsonl",)


@dataclass(frozen=True)
class SourceFile:
    """Local file with documents.

    Attributes
    ----------
    number
        Position among the sources, from 0.
    name
        Path or URL as the user wrote it, with the path below it if it was a directory.
    path
        Local file.
    size
        In bytes, as it lies there (compressed).
    sha256
        Of its bytes, in hexadecimal digits.
    format
        ``txt``, ``jsonl``, ``parquet``, ``wikipedia`` or ``tar``.
    compression
        ``gz``, ``zst``, ``bz2``, ``xz`` or None.
    text_key
        Key or column of the text; None for formats without keys.
    row_groups
        Bytes of each row group of a Parquet file.
    max_document_bytes, max_expansion
        Limits of the specification on this file's content in memory.
    """

    number: int
    name: str
    path: Path
    size: int
    sha256: str
    format: str
    compression: str | None = None
    text_key: str | None = None
    row_groups: tuple[int, ...] = ()
    max_document_bytes: int = DataPreparation.max_document_bytes
    max_expansion: int = DataPreparation.max_expansion

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path), "row_groups": list(self.row_groups)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> SourceFile:
        """Return what `record` was made from."""
        values = record | {"path": Path(record["path"]), "row_groups": tuple(record.get("row_groups", ()))}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a source file.

    Attributes
    ----------
    file
        Number of the source file.
    start, end
        Bytes of a file of lines, which hold the lines that begin there; row groups of Parquet. (0, None)
        is the whole file.
    """

    file: int
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Unit:
    """Pieces that become one shard, in order."""

    number: int
    pieces: tuple[Piece, ...]


def divide(files: Sequence[SourceFile], shard_bytes: int) -> list[Unit]:
    """Divide the sources into units.

    Parameters
    ----------
    files
        All sources, in their final order.
    shard_bytes
        Bytes that a unit has at most, unless one file that cannot be divided has more.

    Returns
    -------
    list of Unit
        In the order of the sources. Files that cannot be divided share units.
    """
    total = sum(file.size for file in files)
    target = min(shard_bytes, max(_SMALLEST_UNIT, total // _SHARES))
    units: list[Unit] = []
    pieces: list[Piece] = []
    held = 0
    for file in files:
        for piece, size in _pieces(file, target):
            if pieces and held + size > target:
                units.append(Unit(len(units), tuple(pieces)))
                pieces, held = [], 0
            pieces.append(piece)
            held += size
    if pieces:
        units.append(Unit(len(units), tuple(pieces)))
    return units


def size_of(piece: Piece, file: SourceFile) -> int:
    """Return the bytes of a piece; those of row groups are not compressed."""
    if piece.end is None:
        return file.size
    return sum(file.row_groups[piece.start : piece.end]) if file.row_groups else piece.end - piece.start


def _pieces(file: SourceFile, target: int) -> list[tuple[Piece, int]]:
    """Return the parts of a file and the size of each."""
    if file.format in _DIVISIBLE and file.compression is None and file.size > target:
        starts = [*range(0, file.size, target), file.size]
        return [(Piece(file.number, start, end), end - start) for start, end in itertools.pairwise(starts)]
    if file.format == "parquet" and len(file.row_groups) > 1:
        return [(Piece(file.number, row, row + 1), size) for row, size in enumerate(file.row_groups)]
    return [(Piece(file.number), file.size)]
