"""Formats and compressions of source files, recognized by name and first bytes; decompressing streams."""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast, get_args

from slipway.common.errors import UserError, suggest
from slipway.common.files import open_regular
from slipway.common.sections import DataPreparation, SourceFormat
from slipway.corpus.errors import missing_library

FORMATS = get_args(SourceFormat)[1:]
COMPRESSIONS = ("gz", "zst", "bz2", "xz")
FORMATS_BY_SUFFIX = {
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
VOCAB, MERGES, FAST, PIECES = "vocab.json", "merges.txt", "tokenizer.json", "tokenizer.model"
TOKENIZER_FILES = (VOCAB, MERGES, FAST, PIECES, "tokenizer_config.json", "special_tokens_map.json")
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
    # A file may begin with a skippable frame, as pzstd's do.
    "zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "bz2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}
_POINTERS = {b"version https://git-lfs": "git lfs pull", b"/annex/objects/": "git annex get"}
_POINTERS[b"version https://hawser"] = "git lfs pull"  # Git LFS before its name
_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|head|body)\b", re.IGNORECASE)
_DESCRIPTION = re.compile(r"(?:readme|licen[cs]e|notice|citation)(?:\.\w+)?", re.IGNORECASE)
# Directories of a hub's cache.
_SNAPSHOT, _HUB = re.compile("((?:.*/)?)snapshots/[0-9a-f]{40}/"), ("blobs", "refs")
_HEAD = 1024
# Of --long=31, the largest that zstd writes; the library's own limit is 128 MiB.
_ZSTD_WINDOW = 1 << 31
_CHUNK = 1 << 16
_BUFFER = 1 << 20
# The decompressed bytes of a part are held as a whole, and may be 30,000 times as many.
_FRAME_CHUNK = 1 << 11
# What any file may become: a small one may well be all alike.
FREE_BYTES = 1 << 26


class DamagedError(Exception):
    """Compressed data, or a container, that cannot be read to its end."""


class ExpansionError(Exception):
    """Data that become more than `max_expansion` bytes for each byte of their file."""


class UnknownFormatError(UserError):
    """File with an unknown format: neither its name nor its content shows it."""


def find_auxiliary(names: Sequence[str], pattern: str = "*") -> dict[str, str]:
    """Return the files that are not sources, and why: the one rule of all searches in directories.

    Parameters
    ----------
    names
        Paths of all files below a directory, relative to it.
    pattern
        Glob that they match; if a part of it begins with ``.`` or ``_``, hidden files are meant.
    """
    is_meant = any(part[0] in "._" for part in PurePath(pattern).parts)
    hubs = tuple(f"{match[1]}{part}/" for match in map(_SNAPSHOT.match, names) if match for part in _HUB)
    reasons = {}
    for name in names:
        *directories, last = PurePath(name).parts
        if not is_meant and any(part[0] in "._" for part in (*directories, last)):
            reasons[name] = "hidden"
        elif name.startswith(hubs):
            reasons[name] = "of a hub's cache: its snapshots link to it"
        elif last in TOKENIZER_FILES:
            reasons[name] = "of a tokenizer"
        elif any(part.endswith(".work") for part in directories):
            reasons[name] = "of an unfinished preparation"
    kinds = {FORMATS_BY_SUFFIX.get(_suffixes(name)[0]) for name in names if name not in reasons}
    if kinds - {None, "txt"}:
        described = (name for name in names if _DESCRIPTION.fullmatch(name))
        reasons |= dict.fromkeys(described, "a description of data of another format")
    return reasons


def detect_pointer(content: bytes | bytearray) -> str | None:
    """Return a description of a pointer to a file; None if it is a text."""
    for start, command in _POINTERS.items():
        if content.startswith(start) and len(content) < _HEAD:
            return f"not the file, but a pointer to it: `{command}` gets the file"
    return None


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
    UnknownFormatError
        If the format is not known.
    UserError
        If the content contradicts the name or `wanted`.
    """
    with open_regular(path) as stream:
        head = stream.read(_HEAD)
    compression = next((kind for kind, magic in _MAGIC.items() if magic.match(head)), None)
    if compression is not None:
        head = _read_first_bytes(path, compression)
    suffix, packed = _suffixes(name)
    kind = wanted if wanted != "auto" else _detect_format(head, FORMATS_BY_SUFFIX.get(suffix))
    if head:
        is_other = packed is not None and compression is None and _detect_format(head, None) is None
        _check_content(head, name, kind, packed if is_other else None)
    if kind is None:
        raise UnknownFormatError(
            f"{name}: unknown format; valid are {', '.join(FORMATS)}, each also with "
            f"{', '.join(f'.{suffix}' for suffix in COMPRESSIONS)}{suggest(suffix, FORMATS_BY_SUFFIX)}; "
            "data_preparation.format=NAME sets it for all files, `format` of an entry of inputs for one"
        )
    return kind, compression


def _suffixes(name: str) -> tuple[str, str | None]:
    """Return the suffix of a name for the format, and the compression by its last one."""
    if "://" in name:
        name = re.sub(r"[?#].*", "", name)
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    packed = _COMPRESSED.get(suffixes[-1]) if suffixes else None
    if packed is not None:
        suffixes = [*suffixes[:-1], ".tar"] if suffixes[-1] == ".tgz" else suffixes[:-1]
    return suffixes[-1] if suffixes else "", packed


def _check_content(head: bytes, name: str, kind: str | None, packed: str | None) -> None:
    """Raise UserError if the first bytes cannot be those of the format, or of the compression `packed`."""
    defect = detect_pointer(head)
    is_page = kind == "jsonl" and head.lstrip().startswith(b"<")
    if defect is None and (is_page or ((packed or kind not in (None, "txt")) and _HTML.match(head))):
        defect = "a web page instead of the data, such as the message of a server"
    if defect is None and packed:
        defect = f"not compressed, and its name says {packed}: its content begins with {head[:16]!r}"
    if defect is None and kind == "parquet" and not head.startswith(b"PAR1"):
        defect = f"not Parquet: its content begins with {head[:16]!r}"
    if defect is not None:
        raise UserError(f"{name}: {defect}")


def open_stream(
    path: Path, compression: str | None, max_expansion: int = DataPreparation.max_expansion
) -> BinaryIO:
    """Open a file for reading, decompressed; broken data raises `DamagedError`, a bomb `ExpansionError`."""
    if compression is None:
        return open_regular(path, buffering=_BUFFER)
    left = max(FREE_BYTES, max_expansion * path.stat().st_size)
    return cast(BinaryIO, io.BufferedReader(_Frames(path, compression, left), _CHUNK))


def _decompressor(path: Path, compression: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return what makes the decompressor of a frame, and its error."""
    if compression == "gz":
        return partial(zlib.decompressobj, zlib.MAX_WBITS + 16), zlib.error
    if compression == "bz2":
        return bz2.BZ2Decompressor, OSError
    if compression == "xz":
        return lzma.LZMADecompressor, lzma.LZMAError
    try:
        import zstandard
    except ImportError:
        raise missing_library("zstandard", f"reading {path}") from None
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj, zstandard.ZstdError


class _Frames(io.RawIOBase):
    """Decompressed bytes of all frames, or streams, of a file; `left` is how many there may be.

    A file that ends within a frame, or has anything but frames, is broken here; the streams of the libraries
    would take it for whole, and leave out the rest.
    """

    def __init__(self, path: Path, compression: str, left: int) -> None:
        self._new_frame, self._error = _decompressor(path, compression)
        self._left = left
        self._file = open_regular(path, buffering=_BUFFER)
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
            self._input = self._input or self._file.read(_FRAME_CHUNK)
            if not self._input:
                if self._frame is not None:
                    raise DamagedError("the last frame is cut short")
                return 0
            if self._frame is None:
                # Between streams of gzip and xz, and behind the last one, may be zeros.
                self._input = self._input.lstrip(b"\0")
                if not self._input:
                    continue
                self._frame = self._new_frame()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise DamagedError(str(error)) from None
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        self._left -= count
        if self._left < 0:
            raise ExpansionError
        return count


def _read_first_bytes(path: Path, compression: str) -> bytes:
    try:
        with open_stream(path, compression) as stream:
            return stream.read(_HEAD)
    except (DamagedError, UserError):
        # Which reading it says.
        return b""


def _detect_format(head: bytes, kind: str | None) -> str | None:
    """Return the format that the first bytes prove, else `kind`."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head[257:262] == b"ustar":
        return "tar"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"<mediawiki"):
        return "wikipedia"
    if kind is None and re.match(rb'\{\s*"', start):
        return "jsonl"
    return kind
