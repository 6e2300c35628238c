"""Formats and compressions of source files, recognized by name and first bytes; decompressing streams."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from corpus.errors import UserError, missing_library, suggest
from corpus.spec import COMPRESSIONS, FORMATS, MAX_EXPANSION

_SUFFIXES = {
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".xml": "wikipedia",
    ".tar": "tar",
}
_COMPRESSED = {
    ".gz": "gz",
    ".zst": "zst",
    ".zstd": "zst",
    ".bz2": "bz2",
    ".xz": "xz",
    ".tgz": "gz",
}
_MAGIC = {
    "gz": re.compile(rb"\x1f\x8b"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd"),
    "bz2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}
_HEAD = 1024
_CHUNK = 1 << 16
_BUFFER = 1 << 20
# What zstd makes of a part is held as a whole, and may be 30,000 times as large.
_ZSTD_CHUNK = 1 << 11
# What any file may become: a small one may well be all alike.
FREE_BYTES = 1 << 26


class DamagedError(Exception):
    """Compressed data, or a container, that cannot be read to its end."""


class ExpansionError(Exception):
    """Data that become more than `max_expansion` bytes for each byte of their file."""


def recognize(path: Path, name: str, wanted: str = "auto") -> tuple[str, str | None]:
    """Return the format of a file and its compression.

    Parameters
    ----------
    path
        Local file.
    name
        Path or URL as the user wrote it; its suffixes are looked at.
    wanted
        Format of the configuration, or ``auto``.

    Raises
    ------
    UserError
        If the format is not known, or the compression is none of ours.
    """
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    compression = next((kind for kind, magic in _MAGIC.items() if magic.match(head)), None)
    if wanted != "auto":
        return wanted, compression
    suffixes = [suffix.lower() for suffix in Path(re.sub(r"[?#].*", "", name)).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes = [*suffixes[:-1], ".tar"] if suffixes[-1] == ".tgz" else suffixes[:-1]
    kind = _SUFFIXES.get(suffixes[-1]) if suffixes else None
    if compression is None and head:
        kind = _by_content(head, kind)
    elif compression is not None and kind is None:
        kind = _by_content(_first_bytes(path, compression), kind)
    if kind is None:
        suffix = suffixes[-1] if suffixes else ""
        raise UserError(
            f"{name}: unknown format; valid are {', '.join(FORMATS)}, each also with "
            f"{', '.join(f'.{suffix}' for suffix in COMPRESSIONS)}{suggest(suffix, _SUFFIXES)}; "
            "data_preparation.format=NAME sets it for all files, `format` of an entry of inputs for one"
        )
    return kind, compression


def open_stream(path: Path, compression: str | None, max_expansion: int = MAX_EXPANSION) -> BinaryIO:
    """Open a file for reading, decompressed; broken data raises `DamagedError`, a bomb `ExpansionError`."""
    if compression is None:
        return path.open("rb", buffering=_BUFFER)
    left = max(FREE_BYTES, max_expansion * path.stat().st_size)
    raw = _ZstdStream(path) if compression == "zst" else _LIBRARIES[compression](path)
    return cast(BinaryIO, io.BufferedReader(_Decompressed(raw, left), _CHUNK))


_LIBRARIES: dict[str, Callable[[Path], Any]] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}


class _Decompressed(io.RawIOBase):
    """Stream of a library, with one kind of error for broken data, and so many bytes at most."""

    def __init__(self, stream: Any, left: int) -> None:
        self._stream, self._left = stream, left

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        try:
            count = int(self._stream.readinto(buffer))
            self._left -= count
            if self._left < 0:
                raise ExpansionError
            return count
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise DamagedError(str(error)) from None
        except OSError as error:
            # An error of the system has a number; those of gzip and bz2 have none.
            if error.errno is not None:
                raise
            raise DamagedError(str(error)) from None


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of all frames of a file.

    A file that ends within a frame is broken here; the library's own stream would take it for whole.
    """

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise missing_library("zstandard", f"reading {path}") from None
        self._library = zstandard
        self._file = path.open("rb", buffering=_BUFFER)
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._file.read(_ZSTD_CHUNK) or b""
            if not self._input:
                if self._frame is not None:
                    raise DamagedError("the last frame is cut short")
                return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._library.ZstdError as error:
                raise DamagedError(str(error)) from None
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


def _first_bytes(path: Path, compression: str) -> bytes:
    try:
        with open_stream(path, compression) as stream:
            return stream.read(_HEAD)
    except DamagedError:
        return b""


def _by_content(head: bytes, kind: str | None) -> str | None:
    """Return the format that the first bytes tell beyond doubt, else `kind`."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head[257:262] == b"ustar":
        return "tar"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"<mediawiki"):
        return "wikipedia"
    if kind is None and start.startswith(b'{"'):
        return "jsonl"
    return kind
