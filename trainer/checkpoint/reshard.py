"""A copy of a checkpoint for other parallel sizes: ``python -m trainer.checkpoint.reshard CHECKPOINT``.

A training saves its sharded optimizer states as they lie in the memory of its ranks (``dp_reshardable``):
nothing is gathered, and another number of data-parallel ranks may load them. For other tensor, pipeline and
virtual sizes, and other buckets, this step writes the states weight by weight (``fully_reshardable``), beside
the checkpoint. One process copies, without a GPU, and holds one shard of a weight at a time.

The copy is the newest checkpoint of its directory, from which the next launch continues. Nothing is changed
in the checkpoint that it was made of.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from trainer import requirements
from trainer.checkpoint import store
from trainer.checkpoint.bucket_index import INDEX, SHARDED, Piece
from trainer.checkpoint.files import mismatch
from trainer.checkpoint.lock import Lock
from trainer.checkpoint.marker import DP_RESHARDABLE, FULLY_RESHARDABLE
from trainer.checkpoint.store import Checkpoint
from trainer.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from trainer.logs import quiet

# Masters, and the moments of Adam.
_STATES = ("param", "exp_avg", "exp_avg_sq")
# Where the states of a weight lie, for megatron-core's DistributedOptimizer of any layout.
_WEIGHTS = "optimizer.state."
_COMMON, _INDEX_FILE, _FORMAT = "common.pt", ".metadata", "metadata.json"
# The keys by which megatron-core tells an optimizer's groups of parameters apart.
_GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_FILE_BYTES = 4 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Reshard; return the exit code: 0 done or nothing to do, 2 a mistake in the options."""
    quiet()
    try:
        options = _parse(arguments)
        requirements.check(requirements.TRAINING)
        source = _source(options.checkpoint)
        if source.marker.optimizer != DP_RESHARDABLE:
            print(f"{source.path}: nothing to do, all parallel sizes can load it")
            return EXIT_OK
        lock = Lock(source.path.parent)
        try:
            copy = reshard(source)
        finally:
            lock.release()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    print(f"{copy.path}: all parallel sizes can load it, and the next launch continues from it")
    return EXIT_OK


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = "Write a copy of a checkpoint that other tensor and pipeline parallel sizes can load."
    parser = argparse.ArgumentParser(prog="python -m trainer.checkpoint.reshard", description=summary)
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or a directory of checkpoints: its newest complete one"
    )
    return parser.parse_args(arguments)


def _source(path: Path) -> Checkpoint:
    """Return the checkpoint that a path names.

    Raises
    ------
    UserError
        If there is none, or its files are damaged.
    """
    source, wrong = store.open_checkpoint(path)
    if source is None and path.is_dir():
        newest, _ = store.newest(path)
        source, wrong = newest, wrong if newest is None else None
    if source is None:
        reason = wrong if path.is_dir() else "there is no such directory"
        raise UserError(f"{path} is no complete checkpoint, and holds none ({reason})")
    return source


def reshard(source: Checkpoint) -> Checkpoint:
    """Write the copy beside a checkpoint, and return it.

    Parameters
    ----------
    source
        A complete checkpoint in the format ``dp_reshardable``.

    Raises
    ------
    UserError
        If a file of it is damaged, its index is missing, or the file system has too little space.
    """
    for name, expected in source.marker.checksums.items():
        wrong = mismatch(source.path, name, expected)
        if wrong is not None:
            raise UserError(f"{source.path} is damaged: {wrong}")
    directory, name = source.path.parent, f"{source.path.name}-resharded"
    size, free = sum(source.marker.files.values()), shutil.disk_usage(directory).free
    if size > free:
        raise UserError(f"{directory}: the copy takes {size:,} bytes, and {free:,} are free")
    unfinished = store.begin(directory, name)
    with _Source(source.path) as reader, _Copy(unfinished) as copy:
        for item in reader.kept():
            copy.add(item, reader.raw(item), reader.entry(item))
        for number, item in enumerate(pieces := reader.pieces(), start=1):
            for state in _STATES:
                copy.add_tensor(f"{_WEIGHTS}{state}.{item.weight}", item, reader.tensor(item, state))
            if sys.stdout.isatty():
                end = "\n" if number == len(pieces) else "\r"
                print(f"{number} of {len(pieces)} parts of weights", end=end, flush=True)
        copy.finish(reader.common(), (source.path / _FORMAT).read_bytes())
    sizes, checksums = store.sync_part(unfinished, 0), store.checksum_part(unfinished, 0)
    marker = replace(source.marker, optimizer=FULLY_RESHARDABLE, files=sizes, checksums=checksums)
    return store.finish(unfinished, name, marker)


class _Source:
    """The checkpoint that is copied: its items, each a tensor's chunk or an object, and its buckets."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        from trainer.checkpoint.reader import restricted_pickles

        self._path = path
        with restricted_pickles():
            self._index = FileSystemReader(str(path)).read_metadata()
        self._items = dict(self._index.storage_data)
        self._files: dict[str, BinaryIO] = {}
        self._chunks: dict[str, list[tuple[int, int, Any]]] = {}
        for item in self._items:
            if item.fqn.startswith(SHARDED) and item.offset is not None:
                self._chunks.setdefault(item.fqn, []).append(self._range(item))

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def kept(self) -> list[Any]:
        """Return the items that the copy takes over: all but the DistributedOptimizers'."""
        return [item for item in self._items if not item.fqn.startswith(SHARDED)]

    def raw(self, item: Any) -> bytes:
        """Return the bytes of an item, as torch stores it."""
        info = self._items[item]
        file = self._files.get(info.relative_path)
        if file is None:
            file = self._files[info.relative_path] = (self._path / info.relative_path).open("rb")
        file.seek(info.offset)
        return file.read(info.length)

    def entry(self, item: Any) -> Any:
        """Return what the index says of the tensor or object to which an item belongs."""
        return self._index.state_dict_metadata[item.fqn]

    def pieces(self) -> list[Piece]:
        """Return the pieces of all buckets.

        Raises
        ------
        UserError
            If they do not make up all weights of which there are states, as in another program's checkpoint.
        """
        found = [Piece(*piece) for part in self._objects(INDEX) for piece in part]
        known: dict[str, int] = {}
        for piece in found:
            known[piece.weight] = known.get(piece.weight, 0) + math.prod(piece.shape)
        whole = {piece.weight: math.prod(piece.whole) for piece in found}
        if not found or known != whole:
            raise UserError(f"{self._path}: it has no complete index of its optimizer's buckets ({INDEX})")
        return found

    def tensor(self, piece: Piece, state: str) -> Any:
        """Return a piece's masters or moments, in the shape of the piece."""
        import torch

        begin, end = piece.start, piece.start + math.prod(piece.shape)
        parts = []
        for start, stop, item in sorted(self._chunks[f"{piece.bucket}.{state}"], key=lambda part: part[:2]):
            if start < end and stop > begin:
                parts.append(self._loaded(item)[max(begin - start, 0) : end - start])
        return torch.cat(parts).reshape(piece.shape)

    def common(self) -> dict[str, Any]:
        """Return what all ranks share, with the groups of parameters of all DistributedOptimizers."""
        import torch

        content: dict[str, Any] = torch.load(self._path / _COMMON, map_location="cpu", weights_only=True)
        groups: dict[tuple[Any, ...], Any] = {}
        for part in self._objects("optimizer"):
            for group in part["param_groups"]:
                groups.setdefault(tuple(group.get(key) for key in _GROUP), group)
        content["optimizer"] = {
            "optimizer": {"param_groups": list(groups.values())},
            "param_state_sharding_type": FULLY_RESHARDABLE,
        }
        return content

    def _objects(self, name: str) -> Iterator[Any]:
        # A key ends with the place of an object among its like: `…optimizer/shard_0_1`.
        for item in self._items:
            key = item.fqn.partition("/")[0]
            if key.startswith(SHARDED) and key.rpartition(".")[2] == name:
                # megatron-core keeps an object as a list of one.
                yield self._loaded(item)[0]

    def _loaded(self, item: Any) -> Any:
        import torch

        return torch.load(io.BytesIO(self.raw(item)), map_location="cpu", weights_only=True)

    def _range(self, item: Any) -> tuple[int, int, Any]:
        (start,) = item.offset
        chunks = self._index.state_dict_metadata[item.fqn].chunks
        return start, start + next(chunk.sizes[0] for chunk in chunks if chunk.offsets[0] == start), item


class _Copy:
    """The copy: items are appended to files of a few gigabytes, and the index is written last."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries: dict[str, Any] = {}
        self._items: dict[Any, Any] = {}
        self._number = 0
        self._file = self._open()

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, item: Any, content: bytes, entry: Any) -> None:
        """Append an item as torch stores it; `entry` is what the index says of its tensor or object."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        if self._file.tell() > _FILE_BYTES:
            self._file.close()
            self._number += 1
            self._file = self._open()
        self._items[item] = _StorageInfo(Path(self._file.name).name, self._file.tell(), len(content))
        self._entries[item.fqn] = entry
        self._file.write(content)

    def add_tensor(self, name: str, piece: Piece, tensor: Any) -> None:
        """Append a part of a whole tensor, such as the moments of a tensor-parallel rank's weight."""
        import torch
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        entry = self._entries.get(name)
        if entry is None:
            properties = TensorProperties(dtype=tensor.dtype)
            entry = TensorStorageMetadata(properties, torch.Size(piece.whole), [])
        offset, stream = torch.Size(piece.offset), io.BytesIO()
        entry.chunks.append(ChunkStorageMetadata(offset, torch.Size(piece.shape)))
        torch.save(tensor, stream)
        self.add(MetadataIndex(name, offset), stream.getvalue(), entry)

    def finish(self, common: dict[str, Any], file_format: bytes) -> None:
        """Write what all ranks share, the format and the index."""
        import torch
        from torch.distributed.checkpoint.metadata import Metadata

        torch.save(common, self._directory / _COMMON)
        (self._directory / _FORMAT).write_bytes(file_format)
        index = Metadata(self._entries, planner_data={}, storage_data=self._items)
        (self._directory / _INDEX_FILE).write_bytes(pickle.dumps(index))

    def _open(self) -> BinaryIO:
        return (self._directory / f"__0_{self._number}.distcp").open("xb")


if __name__ == "__main__":
    sys.exit(main())
