"""The changes to a training that continues: the root node ``resume``, which is ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal

from slipway.arithmetic.interventions import DEFAULTS, was_made
from slipway.trainer.config.data import Data
from slipway.trainer.config.rows import COUNT, NUMBER, Row, optional, read_rows
from slipway.trainer.config.values import Values

Number = int | float
_RANGES = (
    "ranges of samples in ascending order, such as [[640, 960]]: the first sample of a range is passed over, "
    "its end is not"
)
_CHANGES = (
    "samples in ascending order, from 1, each with the weights of all data sets from there on, such as "
    "[[640, [0.7, 0.3]]], numbers of at least 0, and one above"
)


def _load_optimizer(values: Values, key: str) -> bool | Literal["masters"]:
    if values.raw(key) == "masters":
        return "masters"
    if type(values.raw(key)) not in (bool, type(None)):
        values.fail(key, "True or False, or masters for the fp32 weights alone")
    return values.flag(key, True)


def _skip_samples(values: Values, key: str) -> tuple[tuple[int, int], ...]:
    ranges = values.raw(key) or []
    ends = [end for pair in ranges for end in pair] if _are_pairs(ranges) else [None]
    if not _are_ascending(ends, 0) or any(first == end for first, end in ranges):
        values.fail(key, _RANGES)
    return tuple((first, end) for first, end in ranges)


def _data_weights(values: Values, key: str) -> tuple[tuple[int, tuple[Number, ...]], ...]:
    changes = values.raw(key) or []
    starts = [first for first, _ in changes] if _are_pairs(changes) else [None]
    if (
        not _are_ascending(starts, 1)
        or len(set(starts)) < len(starts)
        or not all(_are_weights(weights) for _, weights in changes)
    ):
        values.fail(key, _CHANGES)
    return tuple((first, tuple(weights)) for first, weights in changes)


def _are_pairs(items: object) -> bool:
    return isinstance(items, list) and all(isinstance(item, list) and len(item) == 2 for item in items)


def _are_ascending(samples: list[Any], least: int) -> bool:
    are_whole = all(type(sample) is int and least <= sample < 1 << 63 for sample in samples)
    return are_whole and samples == sorted(samples)


def _are_weights(weights: object) -> bool:
    return (
        isinstance(weights, list)
        and all(type(weight) in (int, float) and 0 <= weight < math.inf for weight in weights)
        and any(weights)
    )


def _owner(values: Values, key: str) -> str:
    value = values.raw(key)
    return str(value) if type(value) is int and value >= 0 else values.text(key)


@dataclass(frozen=True)
class Resume:
    """An intervention into a training.

    It is made once: by the first launch whose newest checkpoint was trained with another `resume`. Launches
    after that just continue.

    Attributes
    ----------
    checkpoint
        Name or path of the checkpoint to go back to; None for the newest.
    load_optimizer
        Whether the optimizer's states come from there too; otherwise they start anew. With ``masters`` the
        fp32 weights come from there, and Adam's moments and step count start anew.
    lr_scale
        The whole schedule of the learning rate is multiplied by it, for as long as it is given.
    lr_freeze_steps
        In so many steps after the intervention the learning rate is 0.
    data_generation
        Another one is another order of the data, for as long as it is given.
    skip_samples
        Ranges of the run's samples that are passed over, each without its end.
    data_weights
        From which samples on the data sets of a blend have other weights, and those weights.
    trust_owner
        The user, by name or number, whose checkpoints are loaded as if they were the caller's, if any.
        It is no part of the intervention.
    """

    checkpoint: Annotated[str | None, Row("resume.checkpoint", optional(Values.text))] = None
    load_optimizer: Annotated[bool | Literal["masters"], Row("resume.load_optimizer", _load_optimizer)] = True
    lr_scale: Annotated[float, Row("resume.lr_scale", partial(NUMBER, default=1.0))] = 1.0
    lr_freeze_steps: Annotated[int, Row("resume.lr_freeze_steps", COUNT)] = 0
    data_generation: Annotated[int, Row("resume.data_generation", COUNT)] = 0
    skip_samples: Annotated[tuple[tuple[int, int], ...], Row("resume.skip_samples", _skip_samples)] = ()
    data_weights: Annotated[
        tuple[tuple[int, tuple[Number, ...]], ...], Row("resume.data_weights", _data_weights)
    ] = ()
    trust_owner: Annotated[str | None, Row("resume.trust_owner", optional(_owner))] = None

    def record(self) -> dict[str, Any]:
        """Return the intervention as a marker records it."""
        return {name: _as_lists(value) for name, value in asdict(self).items() if name in DEFAULTS}

    def was_made(self, recorded: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint was trained with this; `recorded` is its marker's, of any version."""
        return was_made(self.record(), recorded)

    def pass_over(self, sample: int, count: int) -> int:
        """Return the sample that comes after `count` others from `sample` on, without those passed over."""
        at = sample + count
        for first, end in self.skip_samples:
            if first > at:
                break
            at += max(0, end - max(first, sample))
        return at

    def skipped_before(self, sample: int) -> list[tuple[int, int]]:
        """Return the ranges that are passed over before a sample that is not."""
        return [(first, end) for first, end in self.skip_samples if first < sample]

    def exact_weights(self) -> list[tuple[int, list[Fraction]]]:
        """Return `data_weights` as written: 0.1 is a tenth."""
        return [
            (first, [Fraction(Decimal(str(weight))) for weight in weights])
            for first, weights in self.data_weights
        ]


def read_resume(values: Values) -> Resume:
    """Read the node; by default nothing is changed.

    Raises
    ------
    UserError
        If a value is invalid, or contradicts another.
    """
    resume, key = read_rows(Resume, values), "resume.checkpoint"
    if resume.checkpoint is not None and not _is_one(resume.checkpoint):
        values.fail(key, "the name or the absolute path of one checkpoint, or null for the newest")
    if resume.checkpoint is not None and not values.flag("exp_manager.resume_if_exists", False):
        values.fail(key, "null with exp_manager.resume_if_exists=False, which starts at step 0")
    if resume.lr_scale == 0.0:
        values.fail(
            "resume.lr_scale", "a number above 0; resume.lr_freeze_steps has the rate 0 for some steps"
        )
    return resume


def check_data_weights(resume: Resume, values: Values, data: Data) -> None:
    """Hold the weights of an intervention against the data sets of the training.

    Raises
    ------
    UserError
        If they are not one for each data set.
    """
    count = len(data.training.prefixes) if data.training else 0
    if any(len(weights) != count for _, weights in resume.data_weights):
        values.fail(
            "resume.data_weights", f"{_CHANGES}; model.data.data_prefix names {count or 'no'} data sets"
        )


def _as_lists(value: object) -> object:
    """Return a value as JSON and YAML have it."""
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _is_one(checkpoint: str) -> bool:
    # A launch's own directory is not the next one's, nor is `latest` always the same.
    directory, _, name = checkpoint.rpartition("/")
    return (
        name not in ("", "latest")
        and not name.startswith(".")
        and (checkpoint.startswith("/") or not directory)
    )
