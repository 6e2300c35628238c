"""The data sets that a training reads, looked for and held against their index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.checks.gathering.indexed_data import why_no_data_set
from launcher.checks.gathering.path_resolver import Ground, opened, told
from launcher.checks.path_facts import Lack
from launcher.errors import nearest_files
from launcher.estimates.values import Values

_PREFIX = "model.data.data_prefix"
_SUFFIXES = (".bin", ".idx")
_MAKE = "`slipway data tokenize` makes one from text files; data_impl=mock makes data of its own"


def data_sets(ground: Ground) -> list[tuple[str, str]]:
    """Keys and prefixes of the data sets, each once; what is no list of them is for the check of its form."""
    values = Values(ground.plan.job.config or {})
    if values.raw("model.data.data_impl") != "mmap":
        return []
    given = values.raw(_PREFIX)
    named = {_PREFIX: given}
    if isinstance(given, Mapping):
        named = {f"{_PREFIX}.{split}": value for split, value in given.items()}
    return list(dict.fromkeys((key, prefix) for key, value in named.items() for prefix in _prefixes(value)))


def _prefixes(given: Any) -> Iterator[str]:
    for item in [given] if isinstance(given, str) else given if isinstance(given, list) else ():
        # Buckets are not looked into.
        if isinstance(item, str) and item.strip() and not _is_number(item) and "://" not in item:
            yield item


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def lost_data(ground: Ground) -> tuple[Lack, ...] | None:
    """What is wrong with the data sets; ``None`` if the job reads none."""
    named = data_sets(ground)
    if not named:
        return None
    looked = [_looked_at(ground, key, prefix) for key, prefix in named]
    return tuple(lack for lack in looked if lack is not None)


def _looked_at(ground: Ground, key: str, given: str) -> Lack | None:
    prefix = ground.input(key, given, f"by its whole path: {Path(given).absolute()}")
    if not isinstance(prefix, Path):
        return prefix
    files = {suffix: prefix.with_name(f"{prefix.name}{suffix}") for suffix in _SUFFIXES}
    sizes: dict[str, int] = {}
    wrong: dict[str, str] = {}
    for suffix, path in files.items():
        try:
            sizes[suffix] = _size(path)
        except OSError as error:
            wrong[suffix] = told(error)
    certain = all(ground.tells_of(path) for path in files.values())
    if wrong:
        return ground.lost(key, given, _why_lost(wrong), certain=certain, fix=_instead(prefix))
    try:
        why = why_no_data_set(files[".idx"], sizes[".bin"])
    except OSError as error:
        why = f"its .idx: {told(error)}"
    return ground.lost(key, given, why, certain=certain, fix=_MAKE) if why is not None else None


def _size(path: Path) -> int:
    """Bytes of a file that one may read."""
    with opened(path) as stream:
        return stream.seek(0, 2)


def _why_lost(wrong: Mapping[str, str]) -> str:
    reasons = set(wrong.values())
    if len(reasons) == 1:
        return f"its {' and '.join(wrong)}: {reasons.pop()}"
    return "; ".join(f"its {suffix}: {why}" for suffix, why in wrong.items())


def _instead(prefix: Path) -> str:
    if prefix.suffix in _SUFFIXES:
        return "without the suffix: a prefix names both files"
    near = nearest_files(prefix.with_name(f"{prefix.name}.idx"), ".idx")
    return f"{near}\n{_MAKE}"
