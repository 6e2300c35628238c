"""The weights of a teacher by the names of our checkpoints: of one of them, or of Hugging Face's files.

Each rank reads its own part of them, in any layout, and nothing is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipway.common.errors import UserError
from slipway.trainer.checkpoint import reader, store
from slipway.trainer.checkpoint.choice import check_owners
from slipway.trainer.checkpoint.description import Description, description_from_json, model_keys
from slipway.trainer.checkpoint.files import read_mapping
from slipway.trainer.checkpoint.tensor_files import TensorFiles
from slipway.trainer.config.architecture import Architecture
from slipway.trainer.config.distillation import TEACHER
from slipway.trainer.config.layout import check_teacher
from slipway.trainer.config.settings import Settings
from slipway.trainer.conversion.config_options import CONFIG
from slipway.trainer.conversion.families import description_of, rows_of
from slipway.trainer.conversion.importing import Weights, check_names
from slipway.trainer.conversion.safetensors_files import SafetensorsFiles
from slipway.trainer.data.vocabulary import Vocabulary
from slipway.trainer.distributed import RankContext, broadcast_from_rank0
from slipway.trainer.logs import LOGGER

# Returns a part of one of our tensors, a slice for each of its axes.
Read = Callable[[str, tuple[slice, ...]], Any]


@dataclass(frozen=True)
class Teacher:
    """A model whose weights are at hand; `is_ours` tells its two formats apart."""

    path: Path
    description: Description
    is_ours: bool

    def shape_for(self, student: Settings) -> Architecture:
        """Return the shape with which the teacher computes beside its student."""
        kernels = {name: getattr(student.architecture, name) for name in _OF_STUDENT}
        plain: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "recompute": None}
        return replace(self.description.decoder, **kernels, **plain)

    def fill(self, state: dict[str, Any], layers: Sequence[int]) -> None:
        """Copy weights into a model.

        Parameters
        ----------
        state
            The model's sharded state, in megatron-core's form.
        layers
            For each of its layers the number of the teacher's.
        """
        with torch.no_grad(), self._open() as read:
            for part in _parts(state):
                place = zip(part.global_offset, (1,) * part.prepend_axis_num + part.local_shape, strict=True)
                slices = [slice(begin, begin + size) for begin, size in place]
                if part.prepend_axis_num:
                    number = layers[slices[0].start]
                    slices[0] = slice(number, number + 1)
                weight = read(part.key, tuple(slices)).reshape(-1, *part.local_shape[1:])
                # A vocabulary that is padded otherwise has fewer rows here.
                part.data[: len(weight)].copy_(weight)
                part.data[len(weight) :].zero_()

    @contextlib.contextmanager
    def _open(self) -> Iterator[Read]:
        if self.is_ours:
            with TensorFiles(self.path, is_checked=True) as tensors:
                yield tensors.read
            return
        with SafetensorsFiles(self.path) as files:
            weights = Weights(files)
            rows = {
                (name, row.layer): row
                for row in rows_of(self.description)
                for name in (row.ours, *row.copies)
            }

            def read(name: str, slices: tuple[slice, ...]) -> Any:
                if row := rows.get((name, None)):
                    return row.to_ours(*map(weights.read, row.theirs))[slices]
                row = rows[name, slices[0].start]
                return row.to_ours(*map(weights.read, row.theirs))[slices[1:]]

            yield read


_OF_STUDENT = (
    *("seq_length", "vocab_divisor", "transformer_engine", "attention_backend"),
    *("bias_activation_fusion", "bias_dropout_fusion"),
)


def _parts(state: dict[str, Any]) -> Iterator[Any]:
    # Late: it takes seconds to import.
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, _ = extract_sharded_tensors_and_factories(state)
    for item in nested_values(sharded):
        # A gated MLP's matrix is two of the checkpoint's, one behind the other.
        yield from nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item]


def open_teacher(settings: Settings, rank_context: RankContext, vocabulary: Vocabulary) -> Teacher | None:
    """Return the teacher that a configuration names, if any; every rank calls this.

    Raises
    ------
    UserError
        If there is no model, it is damaged, or it does not fit its student.
    """
    if settings.distillation is None:
        return None
    path = settings.distillation.teacher
    teacher, checkpoint = broadcast_from_rank0(lambda: _look(path, settings, vocabulary))
    damage = reader.verify(checkpoint, rank_context) if checkpoint else None
    if damage is not None:
        raise UserError(f"{TEACHER}={path}: it is damaged ({damage})")
    if rank_context.is_main:
        LOGGER.info("learning from %s, a model of %d layers", path, teacher.description.decoder.num_layers)
    return teacher


def _look(path: Path, settings: Settings, vocabulary: Vocabulary) -> tuple[Teacher, store.Checkpoint | None]:
    try:
        teacher, checkpoint = _describe(path, settings)
    except UserError as error:
        raise UserError(f"{TEACHER}={path}: {error}") from None
    except OSError as error:
        raise UserError(f"{TEACHER}={path}: it cannot be read: {error.strerror}") from None
    description = teacher.description
    if description.encoder is not None:
        raise UserError(f"{TEACHER}={path}: it is a T5: expected a GPT, as its student is")
    size = description.vocabulary.size
    if size != vocabulary.size:
        raise UserError(
            f"{TEACHER}={path}: it has {size:,} tokens, and model.tokenizer {vocabulary.size:,} "
            f"({vocabulary.origin}): expected the teacher's tokenizer"
        )
    check_teacher(settings, sizes_of(description.decoder))
    return teacher, checkpoint


def sizes_of(shape: Architecture) -> dict[str, int]:
    """Return the sizes that `check_teacher` compares."""
    sizes = {name: value for name, value in model_keys(shape).items() if type(value) is int}
    if shape.position != "learned_absolute":
        sizes.pop("max_position_embeddings")
    return sizes


def _describe(path: Path, settings: Settings) -> tuple[Teacher, store.Checkpoint | None]:
    if not path.is_dir():
        raise UserError("there is no such directory")
    if (path / CONFIG).exists():
        config = read_mapping(path / CONFIG)
        with SafetensorsFiles(path) as files:
            weights = Weights(files)
            description = description_of(config, weights.has_head(config))
            check_names(path, weights, list(rows_of(description)))
        return Teacher(path, description, is_ours=False), None
    checkpoint, wrong = store.open_checkpoint(path)
    if checkpoint is None or not checkpoint.marker.model:
        raise UserError(
            f"{wrong or 'its version describes no model'}; expected a checkpoint, or Hugging Face's files"
        )
    check_owners(path, None, settings.resume.trust_owner)
    return Teacher(path, description_from_json(checkpoint.marker.model, str(path)), True), checkpoint


def spread_layers(student: int, teacher: int) -> list[int]:
    """Return which of the teacher's layers a student starts with: from the first to the last, evenly spread.

    Of 12 for 6 they are 0, 2, 4, 7, 9, 11, as DistilGPT2's program chooses them
    (huggingface/transformers, examples/research_projects/distillation/scripts/extract.py).
    """
    return [round(layer * (teacher - 1) / max(student - 1, 1)) for layer in range(student)]
