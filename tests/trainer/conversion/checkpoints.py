"""Checkpoints of ours with random weights, written without a training."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.checkpoint.marker import FULLY_RESHARDABLE, Marker
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.checkpoint.tensor_files import TensorFilesWriter
from slipway.trainer.conversion.families import rows_of

Shape = tuple[int, ...]
# The chunks in which a tensor is saved: the place of each, and its shape.
Chunks = Callable[[str, Shape], Iterator[tuple[Shape, Shape]]]


def by_layer(name: str, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Yield the chunks of one rank: a layer each."""
    if ".layers." not in name:
        yield (0,) * len(shape), shape
        return
    for layer in range(shape[0]):
        yield (layer, *[0] * (len(shape) - 1)), (1, *shape[1:])


def weights_of(description: Description, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights under our names; a head's bias, which Hugging Face has not, is zero."""
    shapes: dict[str, Shape] = {}
    zeros = set()
    for row in rows_of(description):
        if row.ours is None:
            continue
        shape = (description.padded_vocabulary, *row.shape[1:]) if row.is_padded else row.shape
        shapes[row.ours] = shape if row.layer is None else (row.layer + 1, *shape)
        zeros |= set() if row.theirs else {row.ours}
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if description.precision == "bf16" else torch.float32
    return {
        name: torch.zeros(shape) if name in zeros else torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }


def write_checkpoint(
    directory: Path,
    description: Description,
    step: int = 2,
    seed: int = 0,
    chunks: Chunks = by_layer,
    with_model: bool = True,
    masters: dict[str, torch.Tensor] | None = None,
) -> Checkpoint:
    """Write a checkpoint, with moments of Adam as large as the weights.

    Parameters
    ----------
    directory
        The directory of checkpoints.
    description
        The model.
    step, seed
        The step of the training, and the seed of the weights.
    chunks
        The cuts of the tensors, as the ranks of a layout make them.
    with_model
        False for a marker that does not describe the model, as an earlier version's.
    masters
        The weights in 32 bits, which an optimizer has of those in 16.
    """
    name = f"megatron_gpt--step={step}"
    unfinished = store.begin(directory, name)
    weights = weights_of(description, seed)
    moments = {f"optimizer.state.exp_avg.{key}": torch.randn(value.shape) for key, value in weights.items()}
    with TensorFilesWriter(unfinished) as writer:
        copies = {f"optimizer.state.fp32_param.{key}": value for key, value in (masters or {}).items()}
        for key, value in {**weights, **moments, **copies}.items():
            for offset, shape in chunks(key, tuple(value.shape)):
                place = tuple(slice(a, a + size) for a, size in zip(offset, shape, strict=True))
                writer.add(key, value[place], value.shape, offset)
        writer.finish({"step": step}, b'{"sharded_backend": "torch_dist"}')
    marker = Marker(
        step=step,
        consumed_samples=8 * step,
        world_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        architecture={
            "padded_vocabulary": description.padded_vocabulary,
            "precision": description.precision,
        },
        files=store.sync_part(unfinished, 0),
        checksums=store.checksum_part(unfinished, 0),
        optimizer=FULLY_RESHARDABLE,
        model=description.to_json() if with_model else {},
    )
    return store.finish(unfinished, name, marker)


def grid(shape: Shape, cuts: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Yield the chunks of a tensor that is cut into as many parts along each axis."""
    sizes = [size // parts for size, parts in zip(shape, cuts, strict=True)]
    for places in itertools.product(*map(range, cuts)):
        yield tuple(place * size for place, size in zip(places, sizes, strict=True)), tuple(sizes)


def digest(directory: Path) -> str:
    """Return a digest of all safetensors files of a directory, by name."""
    total = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors*")):
        total.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def contents(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory, hidden ones too."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
