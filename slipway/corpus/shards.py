"""Shards: the tokens of one unit on the disk, complete or not there.

A shard is ``NNNNNN.bin`` and ``.idx`` in Megatron's format, ``.origins``
(`slipway.arithmetic.indexed.ORIGIN`), ``.hashes`` (16 bytes per document, where the merge needs them),
``.minhash`` (signatures), and ``.json``, which is renamed last: it says that the shard is complete, and what
it was made from.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.arithmetic import indexed
from slipway.common.files import sync_path, write_atomic

ORIGIN = np.dtype([("file", "<u4"), ("offset", "<u8")])
assert ORIGIN.itemsize == indexed.ORIGIN.size
HASH_BYTES = 16
# Documents per write of an index.
_DOCUMENTS = 1 << 20
_CODES = {name: code for code, (name, _) in indexed.TOKEN_TYPES.items()}


# Megatron takes two bytes for a token up to here (``DType.optimal_dtype``).
_TWO_BYTES_BELOW = 65500


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the type of tokens on the disk, as Megatron chooses it."""
    return np.dtype("<u2" if vocabulary < _TWO_BYTES_BELOW else "<i4")


@dataclass(frozen=True)
class ShardPaths:
    """Paths of the files of a shard."""

    directory: Path
    unit: int

    def path(self, suffix: str) -> Path:
        """Return the file with a suffix, such as ``.bin``."""
        return self.directory / f"{self.unit:06d}{suffix}"

    def read_record(self, key: str) -> dict[str, Any] | None:
        """Return what ``.json`` says if the shard is complete and was made from the same; else None."""
        try:
            record = json.loads(self.path(".json").read_bytes())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.get("key") == key else None

    def lengths(self) -> npt.NDArray[np.int32]:
        """Return the tokens of each document."""
        path = self.path(".idx")
        with path.open("rb") as stream:
            header = indexed.parse_header(stream.read(indexed.HEADER.size), path.stat().st_size)
            return np.fromfile(stream, "<i4", header.sequences)

    def origins(self) -> npt.NDArray[Any]:
        """Return file and offset of each document."""
        return np.fromfile(self.path(".origins"), ORIGIN)

    def hashes(self) -> npt.NDArray[np.uint64]:
        """Return the hash of each document as two numbers."""
        return np.fromfile(self.path(".hashes"), "<u8").reshape(-1, 2)


class ShardWriter:
    """Writer of a shard in its own directory; `publish` renames the files.

    Parameters
    ----------
    paths
        Where the shard shall be.
    dtype
        Type of the tokens.
    with_hashes
        Write the hash of each text.
    """

    def __init__(self, paths: ShardPaths, dtype: np.dtype[Any], with_hashes: bool) -> None:
        self._paths, self._dtype, self._with_hashes = paths, dtype, with_hashes
        self._directory = make_temporary_path(paths.directory, f"{paths.unit:06d}")
        self._lengths: list[int] = []
        self._open: dict[str, Any] = {}

    @property
    def minhash(self) -> Path:
        """Return the file for signatures."""
        return self._directory / ".minhash"

    def __enter__(self) -> ShardWriter:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        suffixes = (".bin", ".origins", *((".hashes",) if self._with_hashes else ()))
        for suffix in suffixes:
            self._open[suffix] = (self._directory / suffix).open("wb", buffering=1 << 20)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            # A full disk has been reported by then.
            with contextlib.suppress(OSError):
                stream.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def add(self, tokens: npt.NDArray[Any], text: bytes | None, file: int, offset: int) -> None:
        """Write a document; `text` is hashed if hashes are wanted."""
        self._open[".bin"].write(tokens.data)
        self._open[".origins"].write(indexed.ORIGIN.pack(file, offset))
        if text is not None:
            self._open[".hashes"].write(hashlib.blake2b(text, digest_size=HASH_BYTES).digest())
        self._lengths.append(len(tokens))

    def publish(self, record: dict[str, Any]) -> None:
        """Bring all files to the disk and rename them, ``.json`` last."""
        lengths = np.array(self._lengths, "<i4")
        with (self._directory / ".idx").open("wb") as stream:
            write_index(stream, self._dtype, len(lengths), lambda: (lengths,))
            stream.flush()
            os.fsync(stream.fileno())
        for stream in self._open.values():
            stream.flush()
            os.fsync(stream.fileno())
        # A shard of another key is invalid without its .json.
        self._paths.path(".json").unlink(missing_ok=True)
        for part in self._directory.iterdir():
            part.replace(self._paths.path(part.name))
        sync_path(self._paths.directory)
        write_atomic(self._paths.path(".json"), json.dumps(record, sort_keys=True))


def write_index(stream: Any, dtype: np.dtype[Any], documents: int, lengths: Any) -> None:
    """Write an ``.idx`` of documents of one sequence each.

    Parameters
    ----------
    stream
        File that was opened for writing.
    dtype
        Type of the tokens.
    lengths
        Function that returns an iterable of arrays, the tokens of each document; called once per table.
    """
    code = _CODES[dtype.name]
    stream.write(indexed.HEADER.pack(indexed.MAGIC, indexed.VERSION, code, documents, documents + 1))
    for part in lengths():
        stream.write(part.astype("<i4", copy=False).data)
    begin = 0
    for part in lengths():
        sizes = part.astype("<i8") * dtype.itemsize
        ends = np.cumsum(sizes)
        stream.write((ends - sizes + begin).data)
        begin += int(ends[-1]) if len(ends) else 0
    for start in range(0, documents + 1, _DOCUMENTS):
        stream.write(np.arange(start, min(start + _DOCUMENTS, documents + 1), dtype="<i8").data)


def make_temporary_path(directory: Path, name: str) -> Path:
    """Return the path of a file or directory that this process has not finished."""
    return directory / f"{_temporary_prefix()}{os.getpid()}-{name}"


def find_abandoned(directory: Path, name: str = "") -> Iterator[Path]:
    """Yield what killed processes of this host have not finished, if its name begins so."""
    for path in directory.glob(f"{glob.escape(_temporary_prefix())}*"):
        pid, _, rest = path.name.removeprefix(_temporary_prefix()).partition("-")
        if pid.isdigit() and rest.startswith(name) and not Path(f"/proc/{pid}").exists():
            yield path


def _temporary_prefix() -> str:
    return f".unfinished-{socket.gethostname()}-"
