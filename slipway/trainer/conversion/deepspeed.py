"""Checkpoints of DeepSpeed's ZeRO stages 1, 2 and 3, read tensor by tensor.

A directory ``global_stepN`` has for each rank a file with its part of the fp32 masters:

- Stages 1 and 2: the parameters of a group, one behind the other, are one vector. The ranks hold its parts
  (``single_partition_of_fp32_groups``), whose lengths may differ, the last with or without padding.
- Stage 3: each parameter is cut into as many equal parts as there are ranks, the last is padded; a rank holds
  its parts of all parameters, in order, in one or several vectors (``fp32_flat_groups``).

Names and shapes (``param_shapes``), frozen parameters, buffers and tied names (``shared_params``) are in the
model's file. The files are mapped: memory holds only the parts of a parameter that are read.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.tensor_files import TensorInfo
from slipway.trainer.conversion.foreign import checkpoint_of_step, plain_names, read_tracker, step_of
from slipway.trainer.conversion.pickled_files import load

LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_STATE = "optimizer_state_dict"
_PARTITIONS, _FLAT_GROUPS = "single_partition_of_fp32_groups", "fp32_flat_groups"


# A tensor of the checkpoint, and how it is read.
_Weight = tuple[TensorInfo, Callable[[], torch.Tensor]]


class DeepSpeedFiles:
    """The weights of a checkpoint: fp32 masters, frozen parameters and buffers, under the model's names.

    Parameters
    ----------
    directory
        ``global_stepN``, or the directory that holds it.
    step
        Which one of several; None: the one that ``latest`` names.

    Raises
    ------
    UserError
        If files are missing or damaged, do not belong together, or are of a kind that is not supported
        (tensor or pipeline parallelism of Megatron-DeepSpeed, experts).
    """

    def __init__(self, directory: Path, step: int | None = None) -> None:
        is_chosen = step is not None and step_of(directory) != step
        tracked = read_tracker(directory / LATEST) or directory
        self.directory = checkpoint_of_step(directory, step) if is_chosen else tracked
        self._models = self._files(_MODEL, "*_model_states.pt")
        weights = self._weights(load(self._models[0]))
        names = plain_names(weights, self.directory)
        self._of = {plain: weights[name] for name, plain in names.items()}

    def __enter__(self) -> DeepSpeedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._of.clear()

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return all tensors by name."""
        return {name: info for name, (info, _) in self._of.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return one of :meth:`tensors`."""
        return self._of[name][1]()

    def _files(self, pattern: re.Pattern[str], words: str) -> list[Path]:
        """Return the files of a kind in the order of their ranks."""
        matches = [match for path in self.directory.iterdir() if (match := pattern.fullmatch(path.name))]
        if any(int(match[2]) for match in matches) or any(self.directory.glob("layer_*_model_states.pt")):
            raise UserError(
                f"{self.directory}: tensor and pipeline parallelism, and experts, are not supported"
            )
        if not matches:
            raise UserError(f"{self.directory}: no {words}, so it is not a checkpoint of DeepSpeed's")
        return [self.directory / match.string for match in sorted(matches, key=lambda m: int(m[1] or 0))]

    def _weights(self, model: Any) -> dict[str, _Weight]:
        if not isinstance(model, dict) or not isinstance(model.get("module"), dict):
            raise UserError(f"{self._models[0]}: no states of a model ('module') in it")
        if model.get("autoep_layers") or model.get("ds_autoep_layers"):
            raise UserError(f"{self.directory}: experts are not supported")
        module = model["module"]
        if not any(self.directory.glob("*_optim_states.pt")) or not model.get("param_shapes"):
            # Without ZeRO the model's file has all of it.
            return {name: _wrap(tensor) for name, tensor in module.items() if torch.is_tensor(tensor)}
        names = [name for name in model.get("buffer_names") or () if torch.is_tensor(module.get(name))]
        weights = {name: _wrap(_restore(module[name])) for name in names}
        shapes = _shapes(self._models[0], model["param_shapes"])
        paths = self._files(_OPTIMIZER, "*_optim_states.pt")
        states = [self._state(path, len(paths)) for path in paths]
        is_stage_3 = _FLAT_GROUPS in states[0]
        key = _FLAT_GROUPS if is_stage_3 else _PARTITIONS
        parts = [_vectors(path, state, key) for path, state in zip(paths, states, strict=True)]
        weights |= self._read_frozen(model, self._models if is_stage_3 else self._models[:1])
        weights |= (
            self._read_scattered(shapes, parts) if is_stage_3 else self._read_partitioned(shapes, parts)
        )
        for alias, name in dict(model.get("shared_params") or {}).items():
            if name in weights:
                weights[alias] = weights[name]
        return weights if is_stage_3 else weights | _read_others(module, weights)

    def _state(self, path: Path, count: int) -> dict[str, Any]:
        """Return a rank's optimizer state, which knows how many ranks there were."""
        content = load(path)
        state = content.get(_STATE) if isinstance(content, dict) else None
        if not isinstance(state, dict):
            raise UserError(f"{path}: no {_STATE} in it")
        partitions = state.get("partition_count", count)
        counts = set(partitions) if isinstance(partitions, list | tuple) else {partitions}
        if len(counts) > 1:
            raise UserError(f"{path}: groups of {sorted(counts)} ranks, as with experts, are not supported")
        if counts != {count}:
            raise UserError(
                f"{self.directory}: {count} of {counts.pop()} *_optim_states.pt are there; "
                "a rank did not save, or its file was not copied"
            )
        return state

    def _read_partitioned(
        self, groups: list[dict[str, tuple[int, ...]]], ranks: list[list[torch.Tensor]]
    ) -> dict[str, _Weight]:
        """Return the parameters of stages 1 and 2."""
        weights = {}
        if any(len(parts) != len(groups) for parts in ranks):
            raise UserError(
                f"{self.directory}: the groups of its files are not the {len(groups)} of the model"
            )
        for number, shapes in enumerate(groups):
            parts = [parts[number] for parts in ranks]
            begin = 0
            for name, shape in shapes.items():
                weights[name] = _pieces(shape, parts, _cut(parts, begin, begin + math.prod(shape)))
                begin += math.prod(shape)
            # The vector is padded to a multiple of twice the number of ranks.
            self._check_length(sum(map(len, parts)), begin, begin + 2 * len(ranks))
        return weights

    def _read_scattered(
        self, groups: list[dict[str, tuple[int, ...]]], ranks: list[list[torch.Tensor]]
    ) -> dict[str, _Weight]:
        """Return the parameters of stage 3."""
        weights, begin = {}, 0
        for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
            end = begin + -(-math.prod(shape) // len(ranks))
            weights[name] = _pieces(
                shape,
                [part for parts in ranks for part in parts],
                [piece for parts in ranks for piece in _cut(parts, begin, end)],
            )
            begin = end
        for parts in ranks:
            self._check_length(sum(map(len, parts)), begin, begin + 1)
        return weights

    def _check_length(self, elements: int, fewest: int, beyond: int) -> None:
        if not fewest <= elements < beyond:
            raise UserError(
                f"{self.directory}: {elements:,} elements of masters, and the parameters take {fewest:,}: "
                "its files are not of one checkpoint"
            )

    def _read_frozen(self, model: Mapping[str, Any], paths: Sequence[Path]) -> dict[str, _Weight]:
        """Return the parameters that were not trained: whole, or in stage 3 a part in each rank's file."""
        frozen = model.get("frozen_param_shapes") or {}
        if not frozen:
            return {}
        (shapes,) = _shapes(paths[0], frozen)
        fragments = [load(path).get("frozen_param_fragments") for path in paths]
        weights = {}
        for name, shape in shapes.items():
            parts = [part.get(name) if isinstance(part, dict) else None for part in fragments]
            if not all(torch.is_tensor(part) for part in parts):
                raise UserError(f"{self.directory}: not all parts of the frozen {name} are there")
            flat = [part.detach().reshape(-1) for part in parts if part is not None]
            self._check_length(sum(map(len, flat)), math.prod(shape), math.prod(shape) + len(flat))
            weights[name] = _pieces(shape, flat, _cut(flat, 0, math.prod(shape)))
        return weights


def _read_others(module: Mapping[str, Any], weights: Mapping[str, _Weight]) -> dict[str, _Weight]:
    """Return the tensors of the model's file alone: frozen ones (stage 1), in old versions tied names."""
    tensors = {name: tensor for name, tensor in module.items() if torch.is_tensor(tensor)}
    owners = {(tensor.data_ptr(), tensor.shape): name for name, tensor in tensors.items() if name in weights}
    others = {name: tensor for name, tensor in tensors.items() if name not in weights}
    return {
        name: weights[owner] if (owner := owners.get((tensor.data_ptr(), tensor.shape))) else _wrap(tensor)
        for name, tensor in others.items()
    }


def _shapes(path: Path, groups: Any) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of parameters by name, by group of the optimizer."""
    groups = [groups] if isinstance(groups, dict) else groups
    shapes = [{name: tuple(shape) for name, shape in dict(group).items()} for group in groups]
    for name, shape in itertools.chain.from_iterable(group.items() for group in shapes):
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise UserError(f"{path}: the shape of {name} is {shape}")
    return shapes


def _vectors(path: Path, state: Mapping[str, Any], key: str) -> list[torch.Tensor]:
    vectors = state.get(key)
    vectors = [vectors] if torch.is_tensor(vectors) else vectors
    if not isinstance(vectors, list | tuple) or not all(torch.is_tensor(v) and v.dim() == 1 for v in vectors):
        raise UserError(
            f"{path}: no masters ({key}) in it, as with weights that were swapped to another device"
        )
    return [vector.detach() for vector in vectors]


def _cut(parts: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """Return views of what lies from `begin` to `end` in vectors that follow one another."""
    pieces, first = [], 0
    for part in parts:
        if first < end and first + len(part) > begin:
            pieces.append(part[max(begin - first, 0) : end - first])
        first += len(part)
    return pieces


def _pieces(shape: tuple[int, ...], vectors: Sequence[torch.Tensor], pieces: list[torch.Tensor]) -> _Weight:
    """Return a weight that is joined of pieces when it is read; the last may end in padding."""
    count, kind = math.prod(shape), vectors[0].dtype if vectors else torch.float32
    return (
        TensorInfo(shape, kind),
        lambda: torch.cat(pieces)[:count].reshape(shape) if pieces else torch.empty(shape, dtype=kind),
    )


def _wrap(tensor: torch.Tensor) -> _Weight:
    return TensorInfo(tuple(tensor.shape), tensor.dtype), tensor.detach


def _restore(tensor: torch.Tensor) -> torch.Tensor:
    """Return a buffer with the precision of the masters, as DeepSpeed's own conversion has it."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
