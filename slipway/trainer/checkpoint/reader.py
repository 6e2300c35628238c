"""Reading checkpoint files: held against their checksums, and unpickled without executing anything.

torch's format has the index of all tensors in ``.metadata``, small values in ``common.pt``, and objects
between the tensors of the shards. All of them are pickles, which may name any function to be called when they
are read. Here they make what checkpoints are made of, and nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import importlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, metadata

from slipway.common.errors import first_line
from slipway.trainer.checkpoint.files import is_absent, mismatch, read_inside, read_regular, share
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.distributed import RankContext, broadcast_from_rank0
from slipway.trainer.logs import LOGGER

_INDEX, _COMMON = ".metadata", "common.pt"
# Whose records and enumerations an index is made of.
_MODULES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
_ENUMERATIONS = [
    kind
    for module in _MODULES
    for kind in vars(importlib.import_module(module)).values()
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and kind.__module__ == module
]
# Elements and bytes of a checkpoint.
_MOST = 1 << 50


def _member(kind: Any, name: Any) -> enum.Enum:
    """Return the member of an enumeration that has a name: never any other attribute of anything."""
    kind = getattr(kind, "target", kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"{name!r} of {kind!r} is nothing that a checkpoint holds")


# Larger than the index of a checkpoint of a hundred thousand shards.
_INDEX_BYTES = 1 << 30
_ALLOWED = {
    # A checkpoint's path, which torch keeps if it is saved by an object.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # As Python 3.11.0 to 3.11.3 write the members of an enumeration.
    ("builtins", "getattr"): _member,
}
_FORCED = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}

# Transformer Engine's extra states; later versions of megatron-core say so themselves.
torch.serialization.add_safe_globals([io.BytesIO])


@dataclasses.dataclass(frozen=True)
class _Finding:
    """A rank's finding about a file: that it is damaged, or that it cannot be read, which is no damage."""

    name: str
    damage: str | None = None
    error: str | None = None


def verify(checkpoint: Checkpoint, rank_context: RankContext) -> str | None:
    """Return the defect in the content of a checkpoint's files, or None; every rank calls this.

    Each rank reads a share of them. Another rank's finding counts if rank 0 confirms it: the fault may be in
    the file system of a node, and not in the checkpoint.

    Raises
    ------
    RuntimeError
        On every rank, if a file cannot be read, or reads differently on two nodes.
    """
    expected = checkpoint.marker.checksums
    if not expected and rank_context.is_main:
        LOGGER.warning(
            "%s has no checksums, as an earlier version wrote it: its files are known by their sizes alone",
            checkpoint.path,
        )
    sizes = {name: size for name, size in checkpoint.marker.files.items() if name in expected}
    mine = share(sizes, rank_context.world.rank, rank_context.layout.world)
    findings: list[Any] = [None] * rank_context.layout.world
    dist.all_gather_object(findings, _find_first(checkpoint, mine))
    for rank, finding in enumerate(findings):
        if finding is not None:
            return _confirm(checkpoint, rank, finding)
    finding = broadcast_from_rank0(lambda: _unreadable(checkpoint.path))
    return None if finding is None else _confirm(checkpoint, 0, finding)


@contextlib.contextmanager
def restrict_pickles() -> Iterator[None]:
    """Have torch's reader of checkpoints unpickle nothing but what checkpoints hold.

    In this block :class:`pickle.UnpicklingError` is raised for anything else, before it is called.
    """
    before = {name: os.environ.get(name) for name in _FORCED}
    module: Any = filesystem
    module.pickle = SimpleNamespace(**{**vars(pickle), "load": lambda file: _IndexUnpickler(file).load()})
    os.environ.update(_FORCED)
    try:
        yield
    finally:
        module.pickle = pickle
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def read_index(path: Path) -> Any:
    """Return what an index (``.metadata``) holds: torch's `Metadata`, and nothing that is executed.

    Raises
    ------
    OSError
        If the file cannot be read.
    Exception
        If it is damaged, or holds anything else: of any kind, as unpickling may raise.
    """
    index = _IndexUnpickler(io.BytesIO(read_inside(path, _INDEX_BYTES))).load()
    if not _is_index(index):
        raise ValueError("it is no index, or a part of it is of another type")
    return index


def _is_index(index: Any) -> bool:
    """Return whether all parts of an index that are used are of the types that torch writes."""
    if not isinstance(index, metadata.Metadata):
        return False
    entries, items = index.state_dict_metadata, index.storage_data
    if not isinstance(entries, dict) or not isinstance(items, dict):
        return False
    places: list[tuple[int, ...]] = []
    for name, entry in entries.items():
        if not isinstance(name, str):
            return False
        if not isinstance(entry, metadata.TensorStorageMetadata):
            continue
        is_typed = isinstance(entry.properties, metadata.TensorProperties) and isinstance(entry.chunks, list)
        if not is_typed or not isinstance(entry.properties.dtype, torch.dtype):
            return False
        places += [entry.size, *(part for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes))]
        if any(len(part) != len(entry.size) for part in places[-2 * len(entry.chunks) :]):
            return False
    places += [(item.offset, item.length) for item in items.values()]
    return (
        all(isinstance(key, metadata.MetadataIndex) and isinstance(key.fqn, str) for key in items)
        and all(isinstance(item.relative_path, str) for item in items.values())
        and all(type(number) is int and 0 <= number < _MOST for place in places for number in place)
    )


class _StandIn(type):
    """The metaclass of stand-ins for a class or a function in a pickle, which may set attributes on them."""

    target: Any

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return cls.target(*arguments, **options)


class _IndexUnpickler(pickle.Unpickler):
    def load(self) -> Any:
        """Unpickle the file; the members of enumerations, which are shared, stay as they are."""
        members = [member for kind in _ENUMERATIONS for member in kind]
        before = [dict(vars(member)) for member in members]
        try:
            return super().load()
        finally:
            for member, attributes in zip(members, before, strict=True):
                vars(member).clear()
                vars(member).update(attributes)

    def find_class(self, module: str, name: str) -> Any:
        target = self._target(module, name)
        if isinstance(target, torch.dtype):
            return target

        def new(_: Any, *arguments: Any, **options: Any) -> Any:
            return target.__new__(target, *arguments, **options)

        return _StandIn(name, (), {"__new__": new, "target": staticmethod(target)})

    def _target(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        # A name with dots would lead on to a module's imports.
        if "." not in name:
            if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return dtype
            if module in _MODULES:
                kind = getattr(__import__(module, fromlist=[name]), name, None)
                if isinstance(kind, type) and kind.__module__ == module and _is_record(kind):
                    return kind
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that a checkpoint holds")


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)


def _confirm(checkpoint: Checkpoint, rank: int, finding: _Finding) -> str:
    """Return the damage that a rank found, if rank 0 finds the same file damaged."""
    if finding.error is not None:
        raise RuntimeError(f"rank {rank} cannot read {checkpoint.path / finding.name}: {finding.error}")
    if rank > 0:
        seen = broadcast_from_rank0(lambda: _find_first(checkpoint, [finding.name]))
        if seen is None or seen.damage is None:
            raise RuntimeError(
                f"rank {rank} finds that {finding.damage} in {checkpoint.path}, and rank 0 does not: "
                "the file system of its node shows something else"
            )
    return str(finding.damage)


def _find_first(checkpoint: Checkpoint, names: list[str]) -> _Finding | None:
    for name in names:
        try:
            wrong = mismatch(checkpoint.path, name, checkpoint.marker.checksums[name])
        except OSError as error:
            return _Finding(name, error=error.strerror or str(error))
        if wrong is not None:
            return _Finding(name, wrong)
    return None


def _unreadable(checkpoint: Path) -> _Finding | None:
    """Return the defect in the pickles that every rank reads; None if they are a checkpoint's."""
    for name in (_INDEX, _COMMON):
        try:
            if name == _INDEX:
                read_index(checkpoint / name)
            else:
                content = io.BytesIO(read_regular(checkpoint / name, _INDEX_BYTES))
                torch.load(content, map_location="cpu", weights_only=True)
        except OSError as error:
            if is_absent(error):
                return _Finding(name, f"{name} is missing")
            return _Finding(name, error=error.strerror or str(error))
        except Exception as error:
            # A damaged pickle may raise anything.
            return _Finding(name, f"{name} cannot be read: {first_line(error)}")
    return None
