"""The data that a training reads, as far as its names tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.preflight.findings import Finding, error
from launcher.preflight.values import Values, is_number

_PREFIX = "model.data.data_prefix"
_FORMS = "[prefix] or [weight, prefix, weight, prefix, ...]; data_impl=mock makes data of its own"


def prefix_problems(values: Values) -> Iterator[Finding]:
    """There is data to read, and weights go with prefixes.

    megatron/core/datasets/utils.py, get_blend_from_list: an odd number of names is read as one without
    weights. NeMo (megatron_gpt_model.py) takes a mapping of the three splits too.
    """
    if values.raw("model.data.data_impl") != "mmap":
        return
    given = values.raw(_PREFIX)
    parts = given if isinstance(given, Mapping) else {None: given}
    for split, part in parts.items():
        if part is None and split in ("validation", "test"):
            continue
        wrong = _wrong(part)
        if wrong is not None:
            yield error(
                "data.prefix", _PREFIX if split is None else f"{_PREFIX}.{split}", part, wrong, _FORMS
            )


def _wrong(given: Any) -> str | None:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return "expected a list of prefixes"
    if not names:
        return "no data is named"
    if not all((isinstance(name, str) and name) or is_number(name) for name in names):
        return "expected prefixes, and numbers for their weights"
    weights = [_is_weight(name) for name in names]
    if any(weights) and weights != [True, False] * (len(names) // 2):
        return "weights and prefixes do not come in pairs"
    return None


def _is_weight(name: Any) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True
