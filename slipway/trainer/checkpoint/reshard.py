"""A checkpoint copied for other parallel sizes: ``python -m slipway.trainer.checkpoint.reshard CHECKPOINT``.

A training saves its sharded optimizer states as they lie in the memory of its ranks (``dp_reshardable``):
nothing is gathered, and another number of data-parallel ranks may load them. For other tensor, pipeline and
virtual sizes, and other buckets, this step writes the states weight by weight (``fully_reshardable``) into a
copy of the checkpoint. One process copies, without a GPU, and holds one shard of a weight at a time.

The copy is the newest checkpoint of its directory, from which the next launch continues. Nothing is changed
in the checkpoint that it was made of.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.common.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.trainer import requirements
from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.bucket_index import INDEX, SHARDED, Piece
from slipway.trainer.checkpoint.lock import Lock
from slipway.trainer.checkpoint.marker import DP_RESHARDABLE, FULLY_RESHARDABLE
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.logs import silence_warnings

if TYPE_CHECKING:
    from slipway.trainer.checkpoint.tensor_files import TensorFiles

# Masters, and the moments of Adam.
_STATES = ("param", "exp_avg", "exp_avg_sq")
# Where the states of a weight lie, for megatron-core's DistributedOptimizer of any layout.
_WEIGHTS = "optimizer.state."
# The keys by which megatron-core distinguishes an optimizer's groups of parameters.
_GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def main(arguments: Sequence[str] | None = None) -> int:
    """Reshard; return the exit code: 0 done or nothing to do, 2 a mistake in the options."""
    silence_warnings()
    try:
        options = _parse(arguments)
        requirements.check(requirements.TRAINING)
        source = store.open_named(options.checkpoint)
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
    parser = argparse.ArgumentParser(prog="python -m slipway.trainer.checkpoint.reshard", description=summary)
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or a directory of checkpoints: its newest complete one"
    )
    return parser.parse_args(arguments)


def reshard(source: Checkpoint) -> Checkpoint:
    """Write the copy next to a checkpoint, and return it.

    Parameters
    ----------
    source
        A complete checkpoint in the format ``dp_reshardable``.

    Raises
    ------
    UserError
        If a file of it is damaged, its index is missing, or the file system has too little space.
    """
    from slipway.trainer.checkpoint.tensor_files import FORMAT, TensorFiles, TensorFilesWriter

    store.check_content(source)
    directory, name = source.path.parent, f"{source.path.name}-resharded"
    size, free = sum(source.marker.files.values()), shutil.disk_usage(directory).free
    if size > free:
        raise UserError(f"{directory}: the copy takes {size:,} bytes, and {free:,} are free")
    unfinished = store.begin(directory, name)
    with (
        TensorFiles(source.path, is_checked=bool(source.marker.checksums)) as files,
        TensorFilesWriter(unfinished) as copy,
    ):
        # All items but the DistributedOptimizers' are taken over.
        for item in files.items():
            if not item.fqn.startswith(SHARDED):
                copy.add_raw(item, files.raw(item), files.entry(item.fqn))
        for number, piece in enumerate(pieces := _pieces(files), start=1):
            place = slice(piece.start, piece.start + math.prod(piece.shape))
            for state in _STATES:
                tensor = files.read(f"{piece.bucket}.{state}", (place,)).reshape(piece.shape)
                copy.add(f"{_WEIGHTS}{state}.{piece.weight}", tensor, piece.whole, piece.offset)
            if sys.stdout.isatty():
                end = "\n" if number == len(pieces) else "\r"
                print(f"{number} of {len(pieces)} parts of weights", end=end, flush=True)
        copy.finish(_common(files), (source.path / FORMAT).read_bytes())
    sizes, checksums = store.sync_part(unfinished, 0), store.checksum_part(unfinished, 0)
    marker = replace(source.marker, optimizer=FULLY_RESHARDABLE, files=sizes, checksums=checksums)
    return store.finish(unfinished, name, marker)


def _pieces(files: TensorFiles) -> list[Piece]:
    """Return the pieces of all buckets.

    Raises
    ------
    UserError
        If they do not make up all weights that have states, as in another program's checkpoint.
    """
    found = [Piece(*piece) for part in _objects(files, INDEX) for piece in part]
    known: dict[str, int] = {}
    for piece in found:
        known[piece.weight] = known.get(piece.weight, 0) + math.prod(piece.shape)
    whole = {piece.weight: math.prod(piece.whole) for piece in found}
    if not found or known != whole:
        raise UserError(f"{files.directory}: it has no complete index of its optimizer's buckets ({INDEX})")
    return found


def _common(files: TensorFiles) -> dict[str, Any]:
    """Return what all ranks share, with the groups of parameters of all DistributedOptimizers."""
    import torch

    from slipway.trainer.checkpoint.tensor_files import COMMON

    content: dict[str, Any] = torch.load(files.directory / COMMON, map_location="cpu", weights_only=True)
    groups: dict[tuple[Any, ...], Any] = {}
    for part in _objects(files, "optimizer"):
        for group in part["param_groups"]:
            groups.setdefault(tuple(group.get(key) for key in _GROUP), group)
    content["optimizer"] = {
        "optimizer": {"param_groups": list(groups.values())},
        "param_state_sharding_type": FULLY_RESHARDABLE,
    }
    return content


def _objects(files: TensorFiles, name: str) -> Iterator[Any]:
    # A key ends with the place of an object among its like: `…optimizer/shard_0_1`.
    for item in files.items():
        key = item.fqn.partition("/")[0]
        if key.startswith(SHARDED) and key.rpartition(".")[2] == name:
            # megatron-core keeps an object as a list of one.
            yield files.load(item)[0]


if __name__ == "__main__":
    sys.exit(main())
