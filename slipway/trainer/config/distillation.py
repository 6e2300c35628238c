"""Distillation: a student learns the distributions of a frozen teacher, ``model.teacher``.

Hinton et al. 2015 (arXiv 1503.02531), equations 1 to 4; the cosine of hidden states: Sanh et al. 2019,
DistilBERT (arXiv 1910.01108), section 3. The defaults are those of DistilGPT2's program
(huggingface/transformers, examples/research_projects/distillation/train.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from slipway.trainer.config.rows import OFF, Reader, Row, path, read_rows
from slipway.trainer.config.values import Values

TEACHER, NODE = "model.teacher", "model.distillation"
# The teacher's, which the launcher reads from its files.
SIZES = f"{NODE}.teacher_model"
SIZE_NAMES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "max_position_embeddings", "vocabulary"),
)


def _teacher(values: Values, key: str) -> Path:
    teacher = path(values, key)
    if not teacher.is_absolute():
        values.fail(key, "the absolute path of a checkpoint, or of a directory of Hugging Face's format")
    return teacher


def _temperature(values: Values, key: str) -> float:
    temperature = values.number(key, 2.0, minimum=0.0)
    if temperature == 0.0:
        values.fail(key, "a number above 0")
    return temperature


def _weight(default: float) -> Reader:
    return partial(Values.number, default=default, minimum=0.0)


@dataclass(frozen=True)
class Distillation:
    """A teacher, and the weights of the terms of the loss.

    Attributes
    ----------
    temperature
        The divisor of both models' logits in the divergence.
    cross_entropy, divergence, cosine
        The weights of the loss on the text; of the Kullback-Leibler divergence from the teacher's
        distribution, times the temperature squared; and of one minus the cosine of the last hidden states.
    starts_from_teacher
        Whether a new student starts with the teacher's embeddings, and with as many of its layers as it has,
        spread evenly from the first to the last.
    sizes
        The teacher's sizes, as far as the configuration has them.
    """

    teacher: Annotated[Path, Row(TEACHER, _teacher)]
    temperature: Annotated[float, Row(f"{NODE}.temperature", _temperature)]
    cross_entropy: Annotated[float, Row(f"{NODE}.cross_entropy", _weight(0.5))]
    divergence: Annotated[float, Row(f"{NODE}.divergence", _weight(0.5))]
    cosine: Annotated[float, Row(f"{NODE}.cosine", _weight(0.0))]
    starts_from_teacher: Annotated[bool, Row(f"{NODE}.start_from_teacher", OFF)]
    sizes: Mapping[str, int]


def read_distillation(values: Values) -> Distillation | None:
    """Read the keys; None without a teacher, when the others say nothing.

    Raises
    ------
    UserError
        If a value is invalid, or contradicts another.
    """
    if not values.is_set(TEACHER):
        return None
    names = (name for name in SIZE_NAMES if values.is_set(f"{SIZES}.{name}"))
    sizes = {name: values.integer(f"{SIZES}.{name}", minimum=1) for name in names}
    distillation = read_rows(Distillation, values, sizes=sizes)
    if distillation.divergence == distillation.cosine == 0.0:
        values.fail(f"{NODE}.divergence", f"a number above 0: without it {TEACHER} teaches nothing")
    if distillation.starts_from_teacher and values.is_set("restore_from_path"):
        values.fail(f"{NODE}.start_from_teacher", "False with restore_from_path, which has the first weights")
    return distillation
