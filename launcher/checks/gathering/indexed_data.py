"""Megatron's data sets: a ``.bin`` of tokens, and an ``.idx`` that tells where each document is in it.

Read without further libraries, and of the files no more than their first bytes and a few further ones.
"""

from __future__ import annotations

import struct
from pathlib import Path

from launcher.checks.gathering.path_resolver import opened

# megatron/core/datasets/indexed_dataset.py, _IndexWriter: magic, version, the type's code, how many sequences
# and how many boundaries of documents; then the sequences' lengths (int32), where they begin in the .bin
# (int64), and the boundaries (int64). Data sets of several kinds of sequences have a byte of each besides.
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_LENGTH, _POINTER, _BOUNDARY = struct.Struct("<i"), struct.Struct("<q"), struct.Struct("<q")
# DType there: bytes of a token by the type's code.
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


def why_no_data_set(idx: Path, bin_size: int) -> str | None:
    """Why an ``.idx`` and a ``.bin`` of that many bytes are no data set; ``None`` if they go together.

    Raises
    ------
    OSError
        If the ``.idx`` cannot be read.
    """
    with opened(idx) as stream:
        head = stream.read(_HEADER.size)
        size = stream.seek(0, 2)
        wrong = _why_no_header(head, size)
        if wrong is not None:
            return wrong
        _, _, code, sequences, _ = _HEADER.unpack(head)
        lengths = _HEADER.size + sequences * _LENGTH.size
        stream.seek(lengths - _LENGTH.size)
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        stream.seek(lengths + (sequences - 1) * _POINTER.size)
        (start,) = _POINTER.unpack(stream.read(_POINTER.size))
    told = start + length * _TOKEN_BYTES[code]
    if told != bin_size:
        return f"its .idx tells of {told:,} bytes of tokens, its .bin has {bin_size:,}"
    return None


def _why_no_header(head: bytes, size: int) -> str | None:
    if not size:
        return "its .idx is an empty file"
    if head.startswith(_OLD_MAGIC):
        return "its .idx is of an older format (TNTIDX), which Megatron reads no more"
    if not head.startswith(_MAGIC):
        return "its .idx is not Megatron's: it does not begin with MMIDIDX"
    if len(head) < _HEADER.size:
        return "its .idx is cut short"
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != 1 or code not in _TOKEN_BYTES:
        return f"its .idx is of a format that Megatron does not read: version {version}, type {code}"
    needed = _HEADER.size + sequences * (_LENGTH.size + _POINTER.size) + boundaries * _BOUNDARY.size
    if size < needed:
        return f"its .idx is cut short: {size:,} bytes of {needed:,}"
    if size not in (needed, needed + sequences):
        return f"its .idx has {size:,} bytes, and should have {needed:,}"
    return None if sequences and boundaries > 1 else "there are no documents in it"
