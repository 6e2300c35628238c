"""The data that a training reads, as far as its names tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.checks.findings import Finding, error
from launcher.estimates.values import Values, is_number

_PREFIX = "model.data.data_prefix"
_FORMS = (
    "[prefix], [prefix, prefix, ...] or [weight, prefix, weight, prefix, ...], the weights above 0; "
    "data_impl=mock makes data of its own"
)
_SPLITS = ("train", "validation", "test")


def prefix_problems(values: Values) -> Iterator[Finding]:
    """There is data to read, and weights go with prefixes.

    megatron/core/datasets/utils.py, get_blend_from_list: an odd number of names is read as one without
    weights. blended_dataset.py: each weight is above 0. NeMo (megatron_gpt_model.py) takes a mapping of the
    three splits too.
    """
    if values.raw("model.data.data_impl") != "mmap":
        return
    given = values.raw(_PREFIX)
    if not isinstance(given, Mapping):
        yield from _problems(_PREFIX, given)
        return
    for split in given:
        if split not in _SPLITS:
            told = "expected the splits train, validation and test"
            yield error("data.prefix", f"{_PREFIX}.{split}", given[split], told, _FORMS)
    for split in _SPLITS:
        if split == "train" or given.get(split) is not None:
            yield from _problems(f"{_PREFIX}.{split}", given.get(split))


def _problems(key: str, given: Any) -> Iterator[Finding]:
    wrong = _wrong(given)
    if wrong is not None:
        yield error("data.prefix", key, given, wrong, _FORMS)


def _wrong(given: Any) -> str | None:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return "expected a list of prefixes"
    if not names:
        return "no data is named"
    if not all((isinstance(name, str) and name.strip()) or is_number(name) for name in names):
        return "expected prefixes, and numbers for their weights"
    weights = [_weight(name) for name in names]
    if all(weight is None for weight in weights):
        return None
    if [weight is not None for weight in weights] != [True, False] * (len(names) // 2):
        return "weights and prefixes do not come in pairs"
    if not all(is_number(weight) and weight > 0 for weight in weights[::2] if weight is not None):
        return "a weight is not above 0; leave out data that is not wanted"
    return None


def _weight(name: Any) -> float | None:
    try:
        return float(name)
    except ValueError:
        return None
