"""The identity of a training's data: what each file of it was, so that an exchange is noticed.

``.idx`` files and the tokenizer's are hashed whole, a large ``.bin`` by blocks at fixed places: a training
must not wait for a terabyte. Imports the standard library alone. The launcher, which imports nothing of the
trainer, asks ``python -m trainer.data.identity``: it reads ``{"wanted": [...], "earlier": [...]}`` from
stdin, the files and an identity to compare with, and writes
``{"identity": [...], "changed": ["..."], "accept": "..."}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

DATA, TOKENIZER = "data", "tokenizer"
DATA_KEY = "model.data.data_prefix"
SUFFIXES = (".bin", ".idx")
# Of a Hugging Face tokenizer's directory, which may hold a model's weights too.
TOKENIZER_NAMES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_MIB = 1 << 20
# Up to so many bytes a file is hashed whole, above that in so many blocks: a .bin, and any other file.
_OF_BIN = (64 * _MIB, 256)
_OF_OTHERS = (1024 * _MIB, 4096)
_BLOCK = _MIB // 16
_READ = 4 * _MIB
# Hashing and a parallel file system's reads both go on beside each other.
_THREADS = 8


@dataclass(frozen=True)
class InputFile:
    """A file whose identity is wanted.

    Attributes
    ----------
    kind
        ``data`` or ``tokenizer``.
    key
        The key of the configuration that names it.
    name
        Its path as the job has it.
    path
        Its path on this machine.
    """

    kind: str
    key: str
    name: str
    path: str


@dataclass(frozen=True)
class FileIdentity:
    """The identity of a file: its size in bytes, modification time in Unix seconds, and checksum.

    The checksum begins with how it was computed. The time is told, and never compared.
    """

    kind: str
    key: str
    name: str
    size: int
    mtime: int
    checksum: str

    @property
    def content(self) -> tuple[int, str]:
        """Return the size and the checksum, which are compared."""
        return self.size, self.checksum


@dataclass(frozen=True)
class Difference:
    """A file that is not what it was."""

    old: FileIdentity
    new: FileIdentity

    def __str__(self) -> str:
        old, new = self.old, self.new
        name = new.name if new.name == old.name else f"{old.name} → {new.name}"
        size = "same size" if new.size == old.size else f"{old.size:,} → {new.size:,} bytes"
        return f"{name} ({new.key}): {size}, {_short(old.checksum)} → {_short(new.checksum)}"


Identity = tuple[FileIdentity, ...]


def input_files(prefixes: Iterable[Path], tokenizer: Mapping[str, Path | None]) -> list[InputFile]:
    """Return the files of data sets, and of a tokenizer by the keys that name its files or directory."""
    names = [f"{prefix}{suffix}" for prefix in dict.fromkeys(prefixes) for suffix in SUFFIXES]
    files = [InputFile(DATA, DATA_KEY, name, name) for name in names]
    named = ((key, str(path)) for key, path in tokenizer.items() if path is not None)
    return [*files, *(InputFile(TOKENIZER, key, name, name) for key, name in named)]


def identify(inputs: Sequence[InputFile]) -> Identity:
    """Return the identity of the files that are here and can be read; the others are left out."""
    files = [file for item in inputs for file in _expanded(item)]
    with ThreadPoolExecutor(_THREADS) as pool:
        identities = list(pool.map(_identified, files))
    return tuple(identity for identity in identities if identity is not None)


def differences(old: Identity, new: Identity) -> list[Difference]:
    """Return the files of the same name, or tokenizer's key, that have another content.

    What one of the two lacks is not compared, nor is a data set that the configuration names otherwise.
    """
    before = {_role(file): file for file in old}
    pairs = ((before.get(_role(file)), file) for file in new)
    return [Difference(was, file) for was, file in pairs if was is not None and was.content != file.content]


def renamed(old: Identity, new: Identity) -> tuple[list[str], list[str]]:
    """Return the names of data that one of the two has alone, whose contents the other lacks."""
    return _alone(old, new), _alone(new, old)


def accepts(accepted: str | None, changed: Sequence[Difference]) -> bool:
    """Return whether the user has accepted exactly these differences: the new contents have that digest."""
    return not changed or accepted == digest(changed)


def digest(changed: Sequence[Difference]) -> str:
    """Return a short digest of the new contents, which names them to accept them."""
    contents = sorted([*_role(change.new), *map(str, change.new.content)] for change in changed)
    # With a word in front: digits alone would be read as a number.
    return f"data-{hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:12]}"


def to_json(identity: Identity) -> list[dict[str, Any]]:
    """Return the identity as JSON keeps it."""
    return [asdict(file) for file in identity]


def from_json(content: object) -> Identity:
    """Read an identity that was kept; what is none, or of another version, is left out."""
    if not isinstance(content, list):
        return ()
    return tuple(file for file in map(_file_from, content) if file is not None)


def main() -> None:
    """Answer the launcher."""
    request = json.load(sys.stdin)
    identity = identify([InputFile(**item) for item in request["wanted"]])
    changed = differences(from_json(request["earlier"]), identity)
    accept = digest(changed) if changed else None
    json.dump(
        {"identity": to_json(identity), "changed": list(map(str, changed)), "accept": accept}, sys.stdout
    )


def _file_from(item: object) -> FileIdentity | None:
    types = {"size": int, "mtime": int}
    if not isinstance(item, dict):
        return None
    values: dict[str, Any] = {field.name: item.get(field.name) for field in fields(FileIdentity)}
    if not all(isinstance(value, types.get(name, str)) for name, value in values.items()):
        return None
    return FileIdentity(**values)


def _role(file: FileIdentity) -> tuple[str, str]:
    # Another path of a tokenizer is no other tokenizer; data sets are told apart by their names alone.
    return file.kind, file.key if file.kind == TOKENIZER else file.name


def _alone(these: Identity, others: Identity) -> list[str]:
    names, contents = {file.name for file in others}, {file.content for file in others}
    data = (file for file in these if file.kind == DATA)
    return [file.name for file in data if file.name not in names and file.content not in contents]


def _expanded(input_file: InputFile) -> list[InputFile]:
    path = Path(input_file.path)
    try:
        if input_file.kind != TOKENIZER or not stat.S_ISDIR(path.stat().st_mode):
            return [input_file]
    except (OSError, ValueError):
        return []
    names = TOKENIZER_NAMES
    return [
        InputFile(TOKENIZER, f"{input_file.key}/{name}", f"{input_file.name}/{name}", str(path / name))
        for name in names
    ]


def _identified(input_file: InputFile) -> FileIdentity | None:
    try:
        # Without O_NONBLOCK the open of a FIFO would wait for a writer.
        with os.fdopen(os.open(input_file.path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return None
            checksum = _checksum(
                file, found.st_size, *(_OF_BIN if input_file.name.endswith(".bin") else _OF_OTHERS)
            )
    except (OSError, ValueError):
        return None
    return FileIdentity(
        input_file.kind, input_file.key, input_file.name, found.st_size, int(found.st_mtime), checksum
    )


def _checksum(file: BinaryIO, size: int, whole: int, blocks: int) -> str:
    """Hash a file whole up to that size, a larger one in evenly spread blocks."""
    if size <= whole:
        sums = hashlib.sha256()
        while part := file.read(_READ):
            sums.update(part)
        return f"sha256:{sums.hexdigest()}"
    sums = hashlib.sha256()
    for number in range(blocks):
        # The first block is the file's first, the last its last.
        start = (size - _BLOCK) * number // (blocks - 1)
        sums.update(os.pread(file.fileno(), _BLOCK, start))
    return f"sha256-{blocks}x{_BLOCK}:{sums.hexdigest()}"


def _short(checksum: str) -> str:
    return checksum.rpartition(":")[2][:12]


if __name__ == "__main__":
    main()
