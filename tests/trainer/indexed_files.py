"""Megatron's .bin/.idx written and read by hand, from the description of the format: no megatron-core.

The .idx is little-endian: the magic, a version of 8 bytes, a code of 1 byte for the type of the tokens, the
numbers of sequences and of document boundaries in 8 bytes each; then for each sequence its length (int32),
for each its offset in the .bin in bytes (int64), and the boundaries (int64): where in the sequences each
document begins, and after them their number.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
Document = list[list[int]]


def write(prefix: Path, documents: Sequence[Document], dtype: str) -> list[int]:
    """Write documents, each a list of sequences; return all tokens in their order."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = [token for sequence in sequences for token in sequence]
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = (ends - lengths) * np.dtype(dtype).itemsize
    boundaries = [0, *itertools.accumulate(len(document) for document in documents)]
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, dtype=dtype).tobytes())
    Path(f"{prefix}.idx").write_bytes(
        MAGIC
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(boundaries))
        + lengths.tobytes()
        + offsets.astype("<i8").tobytes()
        + np.array(boundaries, dtype="<i8").tobytes()
    )
    return tokens


@dataclass(frozen=True)
class IndexedContent:
    """The content of a pair of files."""

    dtype: str
    documents: list[Document]


def read(prefix: Path) -> IndexedContent:
    """Read a pair of files, checking that nothing is left over."""
    data, index = Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == MAGIC
    version, code, sequences, boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    assert len(index) == 34 + sequences * (4 + 8) + boundaries * 8
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    offsets = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(index, "<i8", boundaries, 34 + 12 * sequences)
    dtype = {code: name for name, code in CODES.items()}[code]
    rows = [
        np.frombuffer(data, dtype, length, offset).tolist()
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    assert sum(lengths) * np.dtype(dtype).itemsize == len(data)
    return IndexedContent(dtype, [rows[first:last] for first, last in itertools.pairwise(bounds)])
