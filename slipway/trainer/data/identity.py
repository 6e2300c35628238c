"""The identity of a training's data: a record of each file, so that an exchange is noticed.

``.idx`` files and the tokenizer's are hashed whole, a large ``.bin`` by blocks at fixed places: a training
must not wait for a terabyte. A change outside the blocks shows in its manifest, which has the SHA-256 of the
whole file, and without a manifest in the modification time. Imports the standard library alone.

The launcher, which imports nothing of the trainer, asks ``python -m slipway.trainer.data.identity``: it reads
``{"wanted": [...], "earlier": [...]}`` from stdin, the files and an identity to compare with, and writes
``{"identity": [...], "changed": ["..."], "accept": "..."}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from slipway.arithmetic.indexed import manifest_path
from slipway.common.files import open_regular, read_bytes

if TYPE_CHECKING:
    from slipway.trainer.config.data import Data

DATA, TOKENIZER, TEACHER = "data", "tokenizer", "teacher"
DATA_KEY = "model.data.data_prefix"
SUFFIXES = (".bin", ".idx")
# Of a Hugging Face tokenizer's directory, which may hold a model's weights too: patterns, because the
# names differ between versions of transformers and makers of models.
_TOKENIZER_PATTERNS = (
    *("*token*.json", "vocab*", "merges*.txt", "*.model", "*.tiktoken", "*.jinja"),
    "additional_chat_templates/*.jinja",
)
_MIB = 1 << 20
# Beginning of a checksum of all bytes.
_WHOLE = "sha256:"
# Up to so many bytes a file is hashed whole, above that in so many blocks: a .bin, and any other file.
_OF_BIN = (64 * _MIB, 256)
_OF_OTHERS = (1024 * _MIB, 4096)
_BLOCK = _MIB // 16
_LARGEST_MANIFEST = 256 * _MIB
# Sources that an identity lists; of more it has the digest of their list.
_SOURCES = 256
_CHANGES_SHOWN = 6
_READ = 4 * _MIB
# Both hashing and the reads of a parallel file system profit from threads.
_THREADS = 8


@dataclass(frozen=True)
class InputFile:
    """A file whose identity is wanted.

    Attributes
    ----------
    kind
        ``data``, ``tokenizer`` or ``teacher``.
    key
        The key of the configuration that names it.
    name
        Its path as the job has it.
    """

    kind: str
    key: str
    name: str
    path: str


@dataclass(frozen=True)
class FileIdentity:
    """The identity of a file: its size in bytes, modification time in Unix seconds, and checksum.

    The checksum begins with how it was computed.

    `origin` is from the manifest of a ``.bin``: ``sha256`` of the whole file, ``sources``
    (pairs of name and SHA-256, unless they are too many), ``sources_sha256`` of their list, ``tokenizer``, a
    SHA-256, and ``options``. It is ``None`` without a manifest, or if the file was written after it.
    """

    kind: str
    key: str
    name: str
    size: int
    mtime: int
    checksum: str
    origin: dict[str, Any] | None = None

    @property
    def content(self) -> tuple[int, str]:
        """Return the size and the checksum, which are compared."""
        return self.size, self.checksum

    @property
    def is_whole(self) -> bool:
        """Return True if the checksum is of all bytes of the file."""
        return self.checksum.startswith(_WHOLE)

    def differs(self, other: FileIdentity) -> bool:
        """Return True if this file has, or may have, another content than `other`.

        The times decide if neither the checksums nor the manifests do: a file that was written since may
        differ between the blocks that are hashed.
        """
        if self.content != other.content or self.is_whole:
            return self.content != other.content
        if self.origin is not None and other.origin is not None:
            return bool(self.origin["sha256"] != other.origin["sha256"])
        return self.mtime != other.mtime


@dataclass(frozen=True)
class Difference:
    """A file whose content changed."""

    old: FileIdentity
    new: FileIdentity

    def __str__(self) -> str:
        old, new = self.old, self.new
        name = new.name if new.name == old.name else f"{old.name} → {new.name}"
        size = "same size" if new.size == old.size else f"{old.size:,} → {new.size:,} bytes"
        hashes = f"{_shorten(old.checksum)} → {_shorten(new.checksum)}"
        if old.content == new.content:
            hashes = f"written again on {_format_time(new.mtime)}, after {_format_time(old.mtime)}"
            if old.origin is not None and new.origin is not None:
                hashes = f"{_shorten(old.origin['sha256'])} → {_shorten(new.origin['sha256'])}"
        why = _changed_origin(old.origin, new.origin)
        return f"{name} ({new.key}): {size}, {hashes}{f': {why}' if why else ''}"


Identity = tuple[FileIdentity, ...]


def tokenizer_names(directory: Path) -> list[str]:
    """Return the names of the tokenizer's files, and of its chat templates, in a directory."""
    paths = {path for pattern in _TOKENIZER_PATTERNS for path in directory.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(directory)) for path in paths)


def _teacher_names(directory: Path) -> list[str]:
    """Return the names of the files of a model: a checkpoint's marker has the checksums of all others."""
    names = ["complete.json"]
    if not (directory / names[0]).exists():
        names = ["config.json", *sorted(path.name for path in directory.glob("*.safetensors"))]
    return names


def input_files(prefixes: Iterable[Path], tokenizer: Mapping[str, Path | None]) -> list[InputFile]:
    """Return the files of data sets, and of a tokenizer by the keys that name its files or directory."""
    names = [f"{prefix}{suffix}" for prefix in dict.fromkeys(prefixes) for suffix in SUFFIXES]
    files = [InputFile(DATA, DATA_KEY, name, name) for name in names]
    named = ((key, str(path)) for key, path in tokenizer.items() if path is not None)
    return [*files, *(InputFile(TOKENIZER, key, name, name) for key, name in named)]


def identify_data(data: Data, prefixes: Iterable[Path], teacher: Path | None = None) -> Identity:
    """Return the identity of data sets, the tokenizer that a configuration of data names, and a teacher."""
    tokenizer = data.tokenizer
    files = {"model": tokenizer.model, "vocab_file": tokenizer.vocab_file, "merge_file": tokenizer.merge_file}
    if tokenizer.library == "huggingface" and Path(tokenizer.name).is_absolute():
        files = {"type": Path(tokenizer.name)}
    inputs = input_files(prefixes, {f"model.tokenizer.{name}": path for name, path in files.items()})
    if teacher is not None:
        inputs.append(InputFile(TEACHER, "model.teacher", str(teacher), str(teacher)))
    return identify(inputs)


def identify(inputs: Sequence[InputFile]) -> Identity:
    """Return the identity of the files that are here and can be read; the others are left out."""
    files = [file for item in inputs for file in _expand(item)]
    with ThreadPoolExecutor(_THREADS) as pool:
        identities = list(pool.map(_identify, files))
    return tuple(identity for identity in identities if identity is not None)


def differences(old: Identity, new: Identity) -> list[Difference]:
    """Return the files of the same name, or of the tokenizer's or teacher's key, that have another content.

    A file of only one of the two is not compared, nor is a data set that the configuration names otherwise.
    """
    before = {_role(file): file for file in old}
    pairs = ((before.get(_role(file)), file) for file in new)
    return [Difference(was, file) for was, file in pairs if was is not None and file.differs(was)]


def find_renamed(old: Identity, new: Identity) -> tuple[list[str], list[str]]:
    """Return the names of data in only one of the two whose contents are not in the other either."""
    return _find_missing(old, new), _find_missing(new, old)


def accepts(accepted: str | None, changed: Sequence[Difference]) -> bool:
    """Return whether the user has accepted exactly these differences: the new contents have that digest.

    Other accepted digests, such as that of another tokenizer, are separated by plus signs.
    """
    return not changed or digest(changed) in (accepted or "").split("+")


def digest(changed: Sequence[Difference]) -> str:
    """Return a short digest of the new contents, which names them to accept them."""
    contents = sorted(
        [*_role(change.new), *map(str, change.new.content), *_distinguish(change)] for change in changed
    )
    # With a word in front: digits alone would be read as a number.
    return f"data-{hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:12]}"


def _distinguish(change: Difference) -> list[str]:
    """Return what distinguishes the new content from the old one if size and checksum do not."""
    new = change.new
    if change.old.content != new.content:
        return []
    return [str(new.mtime) if new.origin is None else new.origin["sha256"]]


def _changed_origin(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    """Return which sources and options, and whether the tokenizer, are others than before."""
    if old is None or new is None:
        return "" if old is None else "changed after its manifest was written, or without one"
    changes = [*_changed_sources(old, new)]
    if old["tokenizer"] != new["tokenizer"]:
        changes.append(f"another tokenizer ({_shorten(old['tokenizer'])} → {_shorten(new['tokenizer'])})")
    before, now = old["options"], new["options"]
    changes += [
        f"{key} {json.dumps(before.get(key))} → {json.dumps(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    more = f", and {len(changes) - _CHANGES_SHOWN} more" if len(changes) > _CHANGES_SHOWN else ""
    return f"{', '.join(changes[:_CHANGES_SHOWN])}{more}"


def _changed_sources(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if old["sources_sha256"] == new["sources_sha256"]:
        return
    if old["sources"] is None or new["sources"] is None:
        yield "other sources"
        return
    before, now = dict(old["sources"]), dict(new["sources"])
    for name in {**before, **now}:
        if name not in now:
            yield f"without source {name}"
        elif name not in before:
            yield f"with source {name}"
        elif before[name] != now[name]:
            yield f"source {name} changed ({_shorten(before[name])} → {_shorten(now[name])})"
    if before == now:
        yield "the sources in another order"


def to_json(identity: Identity) -> list[dict[str, Any]]:
    """Return the identity as JSON keeps it."""
    return [asdict(file) for file in identity]


def from_json(content: object) -> Identity:
    """Read an identity that was kept; entries that are invalid, or of another version, are left out."""
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
    origin = _check_origin(values.pop("origin"))
    if not all(isinstance(value, types.get(name, str)) for name, value in values.items()):
        return None
    return FileIdentity(**values, origin=origin)


def _check_origin(item: object) -> dict[str, Any] | None:
    """Return an origin that was kept; None if it is invalid."""
    if not isinstance(item, dict):
        return None
    texts = (item.get(name) for name in ("sha256", "sources_sha256", "tokenizer"))
    sources = item.get("sources")
    are_pairs = sources is None or (
        isinstance(sources, list)
        and all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in sources)
    )
    is_valid = all(isinstance(text, str) for text in texts) and isinstance(item.get("options"), dict)
    return item if is_valid and are_pairs else None


def read_manifest(path: Path) -> Any:
    """Return the content of a manifest; raise OSError or ValueError if it is not one."""
    return json.loads(read_bytes(path, _LARGEST_MANIFEST))


def _read_origin(path: Path, size: int, written: int) -> dict[str, Any] | None:
    """Return a ``.bin``'s origin from its manifest; None without a manifest of this very file.

    Parameters
    ----------
    size
        Of the file, in bytes.
    written
        Modification time of the file, in nanoseconds: a later one than the manifest's is a change.
    """
    manifest = manifest_path(path.with_suffix(""))
    try:
        found = manifest.stat()
        if found.st_mtime_ns < written:
            return None
        content = read_manifest(manifest)
        (output,) = [item for item in content["outputs"] if item["path"] == path.name]
        if output["size"] != size:
            return None
        sources = [[source["name"], source["sha256"]] for source in content["sources"]]
        return _check_origin(
            {
                "sha256": output["sha256"],
                "sources": sources if len(sources) <= _SOURCES else None,
                "sources_sha256": hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
                "tokenizer": content["tokenizer"]["sha256"],
                "options": content["options"],
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _role(file: FileIdentity) -> tuple[str, str]:
    # Another path of a tokenizer is no other tokenizer; data sets are distinguished by their names alone.
    return file.kind, file.name if file.kind == DATA else file.key


def _find_missing(these: Identity, others: Identity) -> list[str]:
    names, contents = {file.name for file in others}, {file.content for file in others}
    data = (file for file in these if file.kind == DATA)
    return [file.name for file in data if file.name not in names and file.content not in contents]


def _expand(input_file: InputFile) -> list[InputFile]:
    path = Path(input_file.path)
    try:
        if input_file.kind == DATA or not stat.S_ISDIR(path.stat().st_mode):
            return [input_file]
    except (OSError, ValueError):
        return []
    kind, names = input_file.kind, tokenizer_names if input_file.kind == TOKENIZER else _teacher_names
    return [
        InputFile(kind, f"{input_file.key}/{name}", f"{input_file.name}/{name}", str(path / name))
        for name in names(path)
    ]


def _identify(input_file: InputFile) -> FileIdentity | None:
    try:
        found = os.stat(input_file.path)  # noqa: PTH116
        with open_regular(input_file.path, buffering=0, holes=True) as file:
            checksum = _checksum(
                file, found.st_size, *(_OF_BIN if input_file.name.endswith(".bin") else _OF_OTHERS)
            )
    except (OSError, ValueError):
        return None
    origin = None
    if input_file.kind == DATA and input_file.name.endswith(SUFFIXES[0]):
        origin = _read_origin(Path(input_file.path), found.st_size, found.st_mtime_ns)
    return FileIdentity(
        input_file.kind, input_file.key, input_file.name, found.st_size, int(found.st_mtime), checksum, origin
    )


def _checksum(file: BinaryIO, size: int, whole: int, blocks: int) -> str:
    """Hash a file whole up to that size, a larger one in evenly spread blocks."""
    if size <= whole:
        sums = hashlib.sha256()
        while part := file.read(_READ):
            sums.update(part)
        return f"{_WHOLE}{sums.hexdigest()}"
    sums = hashlib.sha256()
    for number in range(blocks):
        # The first block is the file's first, the last its last.
        start = (size - _BLOCK) * number // (blocks - 1)
        sums.update(os.pread(file.fileno(), _BLOCK, start))
    return f"sha256-{blocks}x{_BLOCK}:{sums.hexdigest()}"


def _shorten(checksum: str) -> str:
    return checksum.rpartition(":")[2][:12]


def _format_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


if __name__ == "__main__":
    main()
