"""What was asked for differently from one launch to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.secrecy import redacted


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
