"""The pieces of a SentencePiece model file, for their number and the one that ends a document.

The file is a protocol buffer, ``sentencepiece_model.proto`` of github.com/google/sentencepiece; the training
needs so little of it that the library would be a dependency for thirty lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Of ModelProto: the pieces, and how they were trained; of a piece: its text and type; of the latter: the name
# of the piece that ends a sentence.
_PIECES, _TRAINER = 1, 2
_TEXT, _TYPE = 1, 3
_EOS_PIECE = 47
_CONTROL = 3


def read_pieces(path: Path) -> tuple[int, int | None]:
    """Return the number of pieces and the id of the end-of-sentence piece, None without one.

    Raises
    ------
    ValueError
        If the file is not a SentencePiece model.
    OSError
        If it cannot be read.
    """
    control: dict[bytes, int] = {}
    size, end = 0, b"</s>"
    for number, value in _fields(memoryview(path.read_bytes())):
        if number == _PIECES:
            piece = dict(_fields(_message(value)))
            if piece.get(_TYPE) == _CONTROL and _TEXT in piece:
                control[bytes(_message(piece[_TEXT]))] = size
            size += 1
        elif number == _TRAINER:
            end = bytes(_message(dict(_fields(_message(value))).get(_EOS_PIECE, memoryview(end))))
    if not size:
        raise ValueError("it has no pieces")
    return size, control.get(end)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field: a whole number, or the bytes of anything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"it has a field of the unknown kind {kind}")
        if at + length > len(data):
            raise ValueError("it ends in the middle of a field")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("it ends in the middle of a field")
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it has a number where a message belongs")
    return value
