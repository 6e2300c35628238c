"""The layout of Megatron's ``.idx`` files, and of the ``.origins`` that Slipway writes with them.

An ``.idx`` is little-endian (megatron/core/datasets/indexed_dataset.py, ``_IndexWriter``): a header, the
sequences' lengths in tokens (int32), where each begins in the ``.bin`` in bytes (int64), and the boundaries
of documents (int64): the first sequence of each, and after them the number of sequences. Data sets of
several kinds of sequences have a byte for each of them besides.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_OLD_MAGIC = b"TNTIDX\x00\x00"
# ``DType`` there: the name and the bytes of a token by the type's code.
TOKEN_TYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float64", 8),
    7: ("float32", 4),
    8: ("uint16", 2),
}
LENGTH, POINTER, BOUNDARY = struct.Struct("<i"), struct.Struct("<q"), struct.Struct("<q")

# A record of an ``.origins`` file: the number of the document's source file in the manifest, and the place in
# it: the byte of a line, or the number of a row or a record.
ORIGIN = struct.Struct("<IQ")
# The data sets of a data preparation with splits, which share its manifest.
SPLITS = ("train", "validation", "test")

# How documents are divided among the splits, as checkpoints name it; those of earlier versions name none.
SPLIT_RULE, FIRST_SPLIT_RULE = "megatron-core", ""


@dataclass(frozen=True)
class IndexHeader:
    """The header of an ``.idx``: the type of the tokens, and the sizes of the tables.

    Attributes
    ----------
    dtype
        Name of the tokens' type, as numpy calls it.
    token_bytes
        Bytes of a token.
    sequences, boundaries
        Entries of the tables; there is one boundary more than there are documents.
    """

    dtype: str
    token_bytes: int
    sequences: int
    boundaries: int

    @property
    def pointers_at(self) -> int:
        """The byte at which the table of pointers begins; that of the lengths begins after the header."""
        return HEADER.size + self.sequences * LENGTH.size

    @property
    def boundaries_at(self) -> int:
        """The byte at which the table of boundaries begins."""
        return self.pointers_at + self.sequences * POINTER.size

    @property
    def size(self) -> int:
        """The bytes of the file; those of several kinds of sequences have `sequences` more."""
        return self.boundaries_at + self.boundaries * BOUNDARY.size


def parse_header(head: bytes, size: int) -> IndexHeader:
    """Parse the first bytes of an ``.idx``.

    Parameters
    ----------
    head
        At least as many bytes as `HEADER` has, or the whole file if it is shorter.
    size
        Bytes of the file.

    Raises
    ------
    ValueError
        If it is no such file or not a whole one; the message begins with "its .idx".
    """
    if not size:
        raise ValueError("its .idx is an empty file")
    if head.startswith(_OLD_MAGIC):
        raise ValueError("its .idx is of an older format (TNTIDX), which Megatron reads no more")
    if not head.startswith(MAGIC):
        raise ValueError("its .idx is not Megatron's: it does not begin with MMIDIDX")
    if len(head) < HEADER.size:
        raise ValueError("its .idx is cut short")
    _, version, code, sequences, boundaries = HEADER.unpack(head[: HEADER.size])
    if version != VERSION or code not in TOKEN_TYPES:
        raise ValueError(
            f"its .idx is of a format that Megatron does not read: version {version}, type {code}"
        )
    header = IndexHeader(*TOKEN_TYPES[code], sequences, boundaries)
    if size < header.size:
        raise ValueError(f"its .idx is cut short: {size:,} bytes of {header.size:,}")
    if size not in (header.size, header.size + sequences):
        raise ValueError(f"its .idx has {size:,} bytes, and should have {header.size:,}")
    return header


def read_start(stream: BinaryIO, header: IndexHeader, document: int) -> int:
    """Return the bytes in the ``.bin`` before a document; the number of documents means the end."""

    def read(place: int, form: struct.Struct) -> int:
        stream.seek(place)
        return int(form.unpack(stream.read(form.size))[0])

    sequence = read(header.boundaries_at + document * BOUNDARY.size, BOUNDARY)
    if 0 <= sequence < header.sequences:
        return read(header.pointers_at + sequence * POINTER.size, POINTER)
    length = read(header.pointers_at - LENGTH.size, LENGTH)
    return read(header.boundaries_at - POINTER.size, POINTER) + length * header.token_bytes


def split_documents(
    weights: Sequence[float], documents: int, rule: str = SPLIT_RULE
) -> list[tuple[int, int]]:
    """Divide documents, in order, among splits; return the first of each, and one past its last.

    ``megatron-core`` rounds the ends of the shares (blended_megatron_dataset_builder.py). The rule of earlier
    versions is Megatron-LM's first (``get_train_valid_test_split_``): each part is rounded, then all ends are
    shifted by the excess. Only the ratios of the weights count; they are not negative.
    """
    *_, total = itertools.accumulate(weights)
    shares = [weight / total for weight in weights]
    if rule == FIRST_SPLIT_RULE:
        ends = [0, *itertools.accumulate(round(share * documents) for share in shares)]
        ends = [0, *(max(0, end + documents - ends[-1]) for end in ends[1:])]
    else:
        ends = [round(end * documents) for end in itertools.accumulate(shares, initial=0.0)]
    return list(itertools.pairwise(ends))


class Origin(NamedTuple):
    """The source of a document: the name of the file as the user gave it, and the place in it."""

    source: str
    offset: int


class Origins:
    """The sources of a data set's documents, read from ``PREFIX.origins`` and the data set's manifest.

    Parameters
    ----------
    prefix
        Path of the ``.bin`` without its suffix.
    documents
        Number of documents of the data set.

    Raises
    ------
    ValueError
        If the files are not those of the data set; the message begins with the file's name.
    OSError
        If one cannot be read.
    """

    def __init__(self, prefix: Path, documents: int) -> None:
        self._path = origins_path(prefix)
        manifest = manifest_path(prefix)
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
            self._sources = [str(source["name"]) for source in content["sources"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{manifest}: not a manifest of data: {error!r}") from None
        size = self._path.stat().st_size
        if size != documents * ORIGIN.size:
            raise ValueError(
                f"{self._path}: {size:,} bytes, but {documents:,} documents have {documents * ORIGIN.size:,}"
            )

    def __getitem__(self, document: int) -> Origin:
        with self._path.open("rb", buffering=0) as file:
            file.seek(document * ORIGIN.size)
            number, offset = ORIGIN.unpack(file.read(ORIGIN.size))
        if number >= len(self._sources):
            raise ValueError(
                f"{self._path}: document {document} is of source {number}, which is not in the manifest"
            )
        return Origin(self._sources[number], offset)


def origins_path(prefix: Path) -> Path:
    """Return the file with the sources of a data set's documents; only data prepared by Slipway have one."""
    return Path(f"{prefix}.origins")


def manifest_path(prefix: Path) -> Path:
    """Return the manifest of a data set: its own, or for a split that of the whole preparation."""
    own = Path(f"{prefix}.manifest.json")
    whole, _, split = str(prefix).rpartition("_")
    return Path(f"{whole}.manifest.json") if split in SPLITS and not own.exists() else own
