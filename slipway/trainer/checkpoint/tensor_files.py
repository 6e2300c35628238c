"""Tensors in files of torch's distributed format (``torch_dist``), read and written by one process.

A directory has shards ``__<rank>_<number>.distcp`` and an index ``.metadata``. The index knows a tensor by
its whole shape, for any layout that saved it, and its chunks by their offsets in it. Chunks and objects
lie in the shards one behind the other, each as :func:`torch.save` writes it. Neither megatron-core nor the
model is needed; memory holds one chunk at a time in addition to the result.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slipway.common.errors import UserError, first_line
from slipway.common.files import open_regular
from slipway.trainer.checkpoint.files import is_absent, resolve_inside
from slipway.trainer.checkpoint.reader import read_index

COMMON, INDEX_FILE, FORMAT = "common.pt", ".metadata", "metadata.json"
_FILE_BYTES = 4 << 30
# A checkpoint may have more shards than a process may open files.
_OPEN_FILES = 64
# Memory for a tensor up to this size is allocated without a look at the sizes of the files.
_UNCHECKED_BYTES = 1 << 30
# Chunks of this size are read to their place in a tensor, and a block of them at a time.
_DIRECT_BYTES, _BLOCK_BYTES = 16 << 20, 4 << 20
Index = int | tuple[slice, ...] | None


@dataclass(frozen=True)
class TensorInfo:
    """The shape of a whole tensor, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Return the bytes that its elements take."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


class TensorFiles:
    """The tensors and objects of a directory; a context manager that closes the shards.

    Parameters
    ----------
    directory
        A checkpoint of ours, or what `torch.distributed.checkpoint` wrote.
    is_checked
        Whether the files' checksums were verified. If not, each item is compared with the checksum that
        torch writes next to it, and does not verify itself.

    Raises
    ------
    UserError
        If the index is missing, cannot be read, or names what no checkpoint holds.
    """

    def __init__(self, directory: Path, is_checked: bool = False) -> None:
        self.directory = directory
        self._is_checked = is_checked
        with _name_unreadable(directory / INDEX_FILE):
            self._index = read_index(directory / INDEX_FILE)
        self._infos = {
            name: TensorInfo(tuple(entry.size), entry.properties.dtype)
            for name, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return all tensors by name, in the order of the index."""
        return self._infos

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        """Return a tensor, or a part of it; read only the chunks that it needs.

        Parameters
        ----------
        index
            A place on the first axis, which is then left out (a layer of stacked layers); or slices of step 1
            for the first axes; or None: all of it.

        Raises
        ------
        UserError
            If a chunk cannot be read, or the chunks do not cover the requested part.
        """
        entry = self._index.state_dict_metadata[name]
        begin, end = _bounds(tuple(entry.size), index)
        shape = [stop - start for start, stop in zip(begin, end, strict=True)]
        whole, filled = None, 0
        for chunk in entry.chunks:
            first = [max(*pair) for pair in zip(chunk.offsets, begin, strict=True)]
            last = [
                min(offset + size, stop)
                for offset, size, stop in zip(chunk.offsets, chunk.sizes, end, strict=True)
            ]
            if any(start >= stop for start, stop in zip(first, last, strict=True)):
                continue
            extent = [stop - start for start, stop in zip(first, last, strict=True)]
            filled += math.prod(extent)
            place = _slices(first, last, chunk.offsets)
            if whole is None and extent == shape:
                whole = self._chunk(name, chunk, entry)[place]
                continue
            if whole is None:
                self._check_size(name, math.prod(shape) * entry.properties.dtype.itemsize)
                whole = torch.empty(shape, dtype=entry.properties.dtype)
            target = whole[_slices(first, last, begin)]
            if extent != list(chunk.sizes) or not self._fill(MetadataIndex(name, chunk.offsets), target):
                target.copy_(self._chunk(name, chunk, entry)[place])
        if filled != math.prod(shape):
            raise UserError(f"{self.directory / INDEX_FILE}: the chunks of {name} do not make up the tensor")
        whole = torch.empty(shape, dtype=entry.properties.dtype) if whole is None else whole
        return whole[0] if isinstance(index, int) else whole

    def _check_size(self, name: str, size_bytes: int) -> None:
        """Refuse a large tensor that takes more than all files have, before memory is taken for it."""
        if size_bytes > _UNCHECKED_BYTES and size_bytes > sum(
            path.stat().st_size for path in self.directory.iterdir()
        ):
            raise UserError(
                f"{self.directory / INDEX_FILE}: {name} takes {size_bytes:,} bytes, more than all files have"
            )

    def keys(self, name: str) -> tuple[str | int, ...]:
        """Return the keys that lead to a tensor in the nested dictionary that was saved."""
        paths = self._index.planner_data
        path = paths.get(name) if isinstance(paths, dict) else None
        return tuple(path) if path else (name,)

    def items(self) -> list[Any]:
        """Return the keys of all items; only a tensor's chunk has an `offset`."""
        return list(self._index.storage_data)

    def entry(self, name: str) -> Any:
        """Return the index entry of a tensor or an object."""
        return self._index.state_dict_metadata[name]

    def raw(self, item: Any) -> bytes:
        """Return the bytes of an item, as :func:`torch.save` wrote them."""
        return self._view(item).readall()

    def load(self, item: Any) -> Any:
        """Return the tensor or the object that an item is.

        Raises
        ------
        UserError
            If it cannot be read, or holds what torch does not load without executing it.
        """
        with self._name_item(item):
            if not self._is_checked:
                _check_archive(self._view(item))
            return torch.load(self._view(item), map_location="cpu", weights_only=True)

    def _fill(self, item: Any, target: torch.Tensor) -> bool:
        """Read a large chunk to its place in a tensor, without a copy of it; return whether that can be."""
        if (
            target.nbytes < _DIRECT_BYTES
            or not target.is_contiguous()
            or item not in self._index.storage_data
        ):
            return False
        with self._name_item(item):
            # Nothing but the description of the tensor is read.
            content = torch.load(self._view(item), map_location="meta", weights_only=True)
            is_plain = isinstance(content, torch.Tensor) and content.is_contiguous()
            if not is_plain or content.dtype != target.dtype or content.nbytes != target.nbytes:
                return False
            with zipfile.ZipFile(self._view(item)) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                order, data = records.get("byteorder"), records.get("data/0")
                if data is None or data.file_size != target.nbytes:
                    return False
                if order is None or archive.read(order).decode() != sys.byteorder:
                    return False
                buffer = memoryview(target.flatten().view(torch.uint8).numpy())
                # At its end the record is held against its checksum.
                with archive.open(data) as file:
                    while block := file.read(_BLOCK_BYTES):
                        buffer[: len(block)] = block
                        buffer = buffer[len(block) :]
        return True

    def _name_item(self, item: Any) -> contextlib.AbstractContextManager[None]:
        return _name_unreadable(
            f"{self.directory / self._index.storage_data[item].relative_path}: {item.fqn}"
        )

    def _chunk(self, name: str, chunk: Any, entry: Any) -> torch.Tensor:
        key = MetadataIndex(name, chunk.offsets)
        if key not in self._index.storage_data:
            raise UserError(f"{self.directory / INDEX_FILE}: no shard has {name} at {tuple(chunk.offsets)}")
        content = self.load(key)
        shape = tuple(chunk.sizes)
        if not isinstance(content, torch.Tensor) or content.numel() != math.prod(shape):
            raise UserError(
                f"{self.directory}: {name} at {tuple(chunk.offsets)} is no tensor of shape {shape}"
            )
        if content.dtype != entry.properties.dtype:
            raise UserError(
                f"{self.directory}: {name} is of {content.dtype}, not of {entry.properties.dtype}"
            )
        return content.detach().reshape(shape)

    def _view(self, item: Any) -> _View:
        info = self._index.storage_data[item]
        if info.transform_descriptors:
            raise UserError(
                f"{self.directory}: {item.fqn} is packed ({', '.join(info.transform_descriptors)})"
            )
        return _View(self._open(info.relative_path), info.offset, info.length)

    def _open(self, name: str) -> Any:
        file = self._files.pop(name, None)
        if file is None:
            if Path(name).name != name or "\0" in name:
                raise UserError(f"{self.directory / INDEX_FILE} names a file of another directory: {name}")
            while len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            with _name_unreadable(self.directory / name):
                file = open_regular(resolve_inside(self.directory / name), holes=True)
        # The one used last is the last to be closed.
        self._files[name] = file
        return file


class _View(io.RawIOBase):
    """A part of a file, read like a whole file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}
        self._position = max(0, origins[whence] + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        left = max(0, self._length - self._position)
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(memoryview(buffer).cast("B")[:left])  # type: ignore[attr-defined]
        self._position += count
        return int(count)


class TensorFilesWriter:
    """Writes a directory of the format: items are appended to files of a few gigabytes, the index comes last.

    Parameters
    ----------
    directory
        An empty one, such as :func:`slipway.trainer.checkpoint.store.begin` makes.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries: dict[str, Any] = {}
        self._items: dict[Any, Any] = {}
        self._number = 0
        self._file = self._open()

    def __enter__(self) -> TensorFilesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        whole_shape: Iterable[int] | None = None,
        offset: Iterable[int] | None = None,
    ) -> None:
        """Append a tensor, or a chunk of it.

        Parameters
        ----------
        name
            The tensor's name; its chunks are added one by one.
        tensor
            The chunk, with as many axes as the whole (a layer of stacked ones: ``[1, ...]``).
        whole_shape
            The shape of the whole tensor; None: this is all of it.
        offset
            The place of the chunk in it.
        """
        whole = torch.Size(tensor.shape if whole_shape is None else whole_shape)
        place = torch.Size([0] * len(whole) if offset is None else offset)
        entry = self._entries.get(name)
        if entry is None:
            entry = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), whole, [])
        entry.chunks.append(ChunkStorageMetadata(place, tensor.shape))
        tensor = tensor.detach().contiguous()
        # torch.save writes the whole storage, and this may be a view.
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
        with self._item(MetadataIndex(name, place), entry) as file:
            torch.save(tensor, file)

    def add_raw(self, item: Any, content: bytes, entry: Any) -> None:
        """Append an item of other files as it is: its key, its bytes, and its index entry."""
        with self._item(item, entry) as file:
            file.write(content)

    def finish(self, common: Mapping[str, Any], file_format: bytes) -> None:
        """Write what all ranks share, the format (the content of ``metadata.json``) and the index."""
        torch.save(dict(common), self._directory / COMMON)
        (self._directory / FORMAT).write_bytes(file_format)
        index = Metadata(self._entries, planner_data={}, storage_data=self._items)
        (self._directory / INDEX_FILE).write_bytes(pickle.dumps(index))

    @contextlib.contextmanager
    def _item(self, key: Any, entry: Any) -> Iterator[BinaryIO]:
        if self._file.tell() > _FILE_BYTES:
            self._file.close()
            self._number += 1
            self._file = self._open()
        begin = self._file.tell()
        yield self._file
        length = self._file.tell() - begin
        self._items[key] = _StorageInfo(Path(self._file.name).name, begin, length)
        self._entries[key.fqn] = entry

    def _open(self) -> BinaryIO:
        return (self._directory / f"__0_{self._number}.distcp").open("xb")


@contextlib.contextmanager
def _name_unreadable(what: object) -> Iterator[None]:
    """Name the file that the block cannot read; another error of the system is raised as it is."""
    try:
        yield
    except OSError as error:
        if is_absent(error):
            raise UserError(f"{what} is missing") from None
        raise
    except (MemoryError, UserError):
        raise
    except Exception as error:
        # A damaged pickle or archive may raise anything.
        raise UserError(f"{what} cannot be read: {first_line(error)}") from None


def _check_archive(view: Any) -> None:
    with zipfile.ZipFile(view) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} is not as it was written")


def _bounds(shape: tuple[int, ...], index: Index) -> tuple[list[int], list[int]]:
    """Return the first and the last place, exclusive, on each axis."""
    if isinstance(index, int):
        index = (slice(index, index + 1),)
    ranges = [range(size)[part] for size, part in zip(shape, index or (), strict=False)]
    ranges += [range(size) for size in shape[len(ranges) :]]
    return [part.start for part in ranges], [part.stop for part in ranges]


def _slices(first: list[int], last: list[int], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a - zero, b - zero) for a, b, zero in zip(first, last, origin, strict=True))
