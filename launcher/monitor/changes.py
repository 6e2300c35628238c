"""What was asked for differently from one launch to the next, and by what it is another training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import shown
from launcher.runs.manifest import Manifest
from launcher.secrecy import redacted
from supervisor.files import whole

_MOST_TOLD = 8


@dataclass(frozen=True, slots=True)
class Changes:
    """Overrides that came, went or have another value; the values of secrets are masked."""

    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        return [
            *(f"- {override}" for override in self.removed),
            *(f"+ {override}" for override in self.added),
            *(f"{key}: {_arrow(*values)}" for key, values in self.changed.items()),
        ]


@dataclass(frozen=True, slots=True)
class Difference:
    """By what a launch is another training than an earlier one of its run, as its manifest has it.

    `changes` has the old and the new value by each key.
    """

    launch: int
    changes: Mapping[str, tuple[Any, Any]]

    def summary(self) -> str:
        """For a column of a table."""
        keys = [key.removeprefix("training.") for key in self.changes]
        more = f" and {len(keys) - 2} more" if len(keys) > 2 else ""
        return f"another training than launch {self.launch}: other {', '.join(keys[:2])}{more}"

    def lines(self) -> list[str]:
        """For people."""
        told = [f"{key}: {shown(old)} → {shown(new)}" for key, (old, new) in self.changes.items()]
        more = [f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
        first = f"another training than launch {self.launch}:"
        return [first, *(f"  {one}" for one in (*told[:_MOST_TOLD], *more))]

    def to_json(self) -> dict[str, Any]:
        """For programs, as the manifest has it; a number that is not finite is a string."""
        values = {key: [_finite(value) for value in both] for key, both in self.changes.items()}
        changes = [{"key": key, "old": old, "new": new} for key, (old, new) in values.items()]
        return {"launch": self.launch, "changes": changes}


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def difference_of(manifest: Manifest) -> Difference | None:
    """Read by what a launch was another training; ``None`` where its manifest tells of nothing."""
    told = manifest.differs or {}
    launch, changes = whole(told.get("launch"), 1), told.get("changes")
    if launch is None or not isinstance(changes, list):
        return None
    rows = [row for row in changes if isinstance(row, dict) and isinstance(row.get("key"), str)]
    by_key = {row["key"]: (row.get("old"), row.get("new")) for row in rows}
    return Difference(launch, by_key) if by_key else None


def changes_between(before: Iterable[str], after: Iterable[str]) -> Changes:
    """Compare the overrides of two launches. Of one that is given twice the last counts, as for a launch."""
    old, new = _by_key(before), _by_key(after)
    return Changes(
        added=[redacted(new[key]) for key in new if key not in old],
        removed=[redacted(old[key]) for key in old if key not in new],
        changed={
            key: (_value(old[key]), _value(new[key])) for key in new if key in old and old[key] != new[key]
        },
    )


def _by_key(overrides: Iterable[str]) -> dict[str, str]:
    return {override.partition("=")[0].strip(): override for override in overrides}


def _value(override: str) -> str:
    return redacted(override).partition("=")[2]


def _arrow(before: str, after: str) -> str:
    return f"{before} → {after}" if before != after else f"{after} (another)"
