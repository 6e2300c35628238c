"""Sample indices kept between launches, under a hash of their inputs.

Two kinds of small JSON files lie in ``model.data.index_mapping_dir``. ``sample-index-<hash>.json`` is an
index, named by the SHA-256 of the whole ``.idx`` file and the splits' weights; ``idx-hash-<path>.json``
remembers that SHA-256 for a file as the file system describes it. Reading the 200 MB of 10 million
documents for the hash takes several times as long as computing the index from them: the cache saves
reading the file at all.

A file that was written to has another change time, which only the kernel sets. Two writes within one tick
of the file system's clock have the same: a hash is remembered only once a file has rested longer than any
tick.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipway.arithmetic.indexed import SPLIT_RULE
from slipway.common.files import write_atomic
from slipway.trainer.data.index import SampleIndex, Split, Weights
from slipway.trainer.logs import LOGGER

_VERSION = 1
_RESTED_SECONDS = 2.0


class IndexCache:
    """A directory of sample indices; defects in it cost time only.

    Several processes may use it at once: files appear complete under their names, and equal names have equal
    contents.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._has_warned = False

    def get(
        self, prefix: Path, weights: Weights, build: Callable[[], SampleIndex], rule: str = SPLIT_RULE
    ) -> SampleIndex:
        """Return the index of a data set.

        Parameters
        ----------
        prefix
            Of a data set whose files are there.
        weights, rule
            Of its splits.
        build
            Computes the index if none is kept.
        """
        path = Path(f"{prefix}.idx")
        before = _identity(path.stat())
        splits = [*weights, *([rule] if rule else [])]
        key = {"version": _VERSION, "idx_sha256": self._content_hash(path), "splits": splits}
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        cached = self._directory / f"sample-index-{name[:32]}.json"
        index = _parse_index(self._read(cached), key)
        if index is None:
            index = build()
            # Of the content that was hashed, unless it was exchanged meanwhile.
            if _identity(path.stat()) == before:
                self._write(cached, {"key": key, "index": dataclasses.asdict(index)})
        return index

    def _content_hash(self, path: Path) -> str:
        name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
        cached = self._directory / f"idx-hash-{name[:32]}.json"
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = _identity(status)
            known = self._read(cached)
            if isinstance(known, dict) and known.get("identity") == identity and "sha256" in known:
                return str(known["sha256"])
            rested = time.time() - max(status.st_mtime, status.st_ctime) > _RESTED_SECONDS
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if rested:
            self._write(cached, {"file": str(path), "identity": identity, "sha256": digest})
        return digest

    def _read(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._tell(f"{path.name} is made anew", error)
            return None

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            self._tell("sample indices are not kept", error)

    def _tell(self, consequence: str, error: Exception) -> None:
        """Warn once: the next file would have the same problem."""
        if not self._has_warned:
            LOGGER.warning("model.data.index_mapping_dir=%s: %s: %s", self._directory, consequence, error)
        self._has_warned = True


def _identity(status: os.stat_result) -> list[int]:
    """Return the attributes that change with a file's content; a mount may change a file system's number."""
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _parse_index(content: Any, key: dict[str, Any]) -> SampleIndex | None:
    """Return the index that a file holds, or None if it holds another or none."""
    try:
        if content["key"] != key:
            return None
        index = content["index"]
        splits = tuple(Split(**split) for split in index["splits"])
        index_read = SampleIndex(index["dtype"], index["tokens"], splits)
        return index_read if _is_whole(index_read) else None
    except (KeyError, TypeError):
        return None


def _is_whole(index: SampleIndex) -> bool:
    """Return whether an index is one that could be computed: anybody may have written the file."""
    if np.dtype(index.dtype).kind not in "ui" or len(index.splits) != 3:
        return False
    return all(0 <= split.start <= split.start + split.tokens <= index.tokens for split in index.splits)
