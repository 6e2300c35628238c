"""Safetensors files as Hugging Face's libraries keep them: one file, or shards with an index.

The header of a file has the position of each tensor, so that a file is written from front to back: memory
holds one tensor at a time. The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from slipway.common.errors import UserError
from slipway.common.files import write_atomic
from slipway.trainer.checkpoint.files import read_mapping, resolve_inside
from slipway.trainer.checkpoint.tensor_files import TensorInfo

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_BLOCK_BYTES = 32 << 20
# The longest header that the library reads.
_HEADER_BYTES = 100_000_000


class Entry(NamedTuple):
    """A tensor to be written.

    Attributes
    ----------
    info
        Its shape, and the type in which it is written.
    read
        Returns it, in any type; called once, when its turn has come.
    """

    name: str
    info: TensorInfo
    read: Callable[[], torch.Tensor]


def write(
    directory: Path,
    entries: Iterable[Entry],
    shard_bytes: int,
    report: Callable[[int], None] = lambda _: None,
) -> None:
    """Write tensors into a directory, and have the files on disk.

    Parameters
    ----------
    directory
        Without such files.
    entries
        The tensors, in the order in which they are written.
    shard_bytes
        The size beyond which a shard takes no further tensor. As in transformers, tensors that fit one shard
        are in ``model.safetensors``, and a tensor is never cut.
    report
        Called with the bytes that were written, again and again.

    Raises
    ------
    UserError
        If a tensor has another shape than its entry says, or a value that its type cannot hold.
    """
    shards = _shards(entries, shard_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = [SINGLE] if count == 1 else names
    for name, shard in zip(names, shards, strict=True):
        _write_file(directory / name, shard, report)
    if len(shards) > 1:
        _write_index(directory / INDEX, dict(zip(names, shards, strict=True)))


class SafetensorsFiles:
    """The tensors of a directory with safetensors files; a context manager that closes them.

    Parameters
    ----------
    directory
        With ``model.safetensors``, or with shards and their index.

    Raises
    ------
    UserError
        If the directory has no such files, a shard is missing, or a header is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        names = _files_of(directory)
        self._files = {name: _open(directory / name) for name in sorted(set(names.values()))}
        self._infos: dict[str, TensorInfo] = {}
        self._names: dict[str, str] = {}
        for name, file in self._files.items():
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                if part.get_dtype() not in _BY_NAME:
                    raise UserError(f"{directory / name}: {key} is of an unknown type, {part.get_dtype()}")
                self._infos[key] = TensorInfo(tuple(part.get_shape()), _BY_NAME[part.get_dtype()])
                self._names[key] = name
        missing = [name for name in names if name not in self._infos]
        if missing and list(names) != [""]:
            raise UserError(f"{directory / names[missing[0]]} has no {missing[0]}, which {INDEX} says it has")
        if not self._infos:
            raise UserError(f"{directory} holds no tensor")

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return all tensors by name."""
        return self._infos

    def read(self, name: str) -> torch.Tensor:
        """Return one of :meth:`tensors`; its bytes are mapped, not copied."""
        tensor: torch.Tensor = self._files[self._names[name]].get_tensor(name)
        return tensor


def _shards(entries: Iterable[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if entry.info.dtype not in _DTYPES:
            kind = str(entry.info.dtype).removeprefix("torch.")
            raise UserError(
                f"{entry.name} is of the type {kind}, which is not written into safetensors files"
            )
        if shards[-1] and size + entry.info.size_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.info.size_bytes
    return shards


def _write_file(path: Path, entries: list[Entry], report: Callable[[int], None]) -> None:
    # Wide types first, as the library orders them: every tensor is aligned.
    entries = sorted(entries, key=lambda entry: -entry.info.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.info.size_bytes
        header[entry.name] = {
            "dtype": _DTYPES[entry.info.dtype],
            "shape": list(entry.info.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_BYTES:
        raise UserError(f"{path.name}: too many tensors for a file; choose a smaller conversion.shard_bytes")
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            _write_tensor(file, entry, report)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, entry: Entry, report: Callable[[int], None]) -> None:
    tensor, (_, dtype) = entry.read().detach(), (entry.info.shape, entry.info.dtype)
    if tuple(tensor.shape) != entry.info.shape:
        raise UserError(f"{entry.name} has the shape {list(tensor.shape)}, not {list(entry.info.shape)}")
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    row_bytes = max(1, math.prod(rows.shape[1:]) * max(dtype.itemsize, tensor.dtype.itemsize))
    # A block at a time: converting or transposing a tensor takes little additional memory.
    for block in rows.split(max(1, _BLOCK_BYTES // row_bytes)):
        values = block.to(dtype)
        if values.dtype != block.dtype and not _holds(values, block):
            raise UserError(
                f"conversion.dtype={str(dtype).removeprefix('torch.')}: {entry.name} has values that it "
                f"cannot hold, such as {float(block.abs().max()):.6g}; expected float32 or bfloat16"
            )
        content = values.contiguous().flatten().view(torch.uint8).numpy()
        file.write(memoryview(content))
        report(content.nbytes)


def _holds(values: torch.Tensor, original: torch.Tensor) -> bool:
    """Return whether no finite value has become infinite."""
    return not values.is_floating_point() or bool((values.isfinite() | ~original.isfinite()).all())


def _write_index(path: Path, shards: Mapping[str, list[Entry]]) -> None:
    entries = [entry for shard in shards.values() for entry in shard]
    metadata = {
        "total_parameters": sum(math.prod(entry.info.shape) for entry in entries),
        "total_size": sum(entry.info.size_bytes for entry in entries),
    }
    names = {entry.name: name for name, shard in shards.items() for entry in shard}
    content = {"metadata": metadata, "weight_map": dict(sorted(names.items()))}
    write_atomic(path, json.dumps(content, indent=2) + "\n")


def _files_of(directory: Path) -> dict[str, str]:
    """Return the file of each tensor; of a single file, under an empty name, since its header alone knows."""
    if os.path.lexists(directory / SINGLE):
        return {"": SINGLE}
    path = directory / INDEX
    if not os.path.lexists(path):
        message = f"{directory}: neither {SINGLE} nor {INDEX} is there"
        for name in sorted(path.name for path in directory.glob("*.bin"))[:1]:
            message += (
                f"; {name} is a pickle, which is not read: transformers writes it as safetensors with "
                "AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(ANOTHER)"
            )
        raise UserError(message)
    names = read_mapping(path).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(name, str) and Path(name).name == name != "" and name != ".." for name in names.values()
    ):
        raise UserError(f"{path} is no index of safetensors files, or is damaged")
    return names


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(resolve_inside(path), framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or incomplete: {error}") from None
    except (OSError, MemoryError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
