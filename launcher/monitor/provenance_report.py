"""The provenance of a launch: everything on record of it, and its changes since earlier launches."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import literal
from launcher.jobs.launches import Launch
from launcher.runs.manifest import Manifest
from launcher.runs.paths import display_path
from launcher.secrecy import recorded, redacted
from launcher.ui import tables
from launcher.ui.tables import moment
from slipway.common.files import names_in, open_regular, read_int, read_json
from slipway.common.node.marks import image_digest

_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Changes:
    """The overrides that were added, removed or changed; the values of secrets are masked."""

    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the changes as lines for people."""
        lines = [f"- {override}" for override in self.removed]
        lines += [f"+ {override}" for override in self.added]
        for key, (old, new) in self.changed.items():
            lines.append(f"{key}: {old} → {new}" if old != new else f"{key}: {new} (changed)")
        return lines


@dataclass(frozen=True, slots=True)
class Difference:
    """The keys by which a launch is a different training than an earlier one, with old and new values."""

    launch: int
    changes: Mapping[str, tuple[Any, Any]]

    def summary(self) -> str:
        """Return a phrase for a column of a table."""
        keys = [key.removeprefix("training.") for key in self.changes]
        more = f" and {len(keys) - 2} more" if len(keys) > 2 else ""
        return f"a different training than launch {self.launch}: {', '.join(keys[:2])}{more} changed"

    def lines(self) -> list[str]:
        """Return the difference as lines for people."""
        changes = [f"{key}: {literal(old)} → {literal(new)}" for key, (old, new) in self.changes.items()]
        more = [f"and {len(changes) - _MOST_SHOWN} more"] if len(changes) > _MOST_SHOWN else []
        first = f"a different training than launch {self.launch}:"
        return [first, *(f"  {line}" for line in (*changes[:_MOST_SHOWN], *more))]

    def to_json(self) -> dict[str, Any]:
        """Return the difference for programs; a number that is not finite is a string."""
        changes = [
            {"key": key, "old": encode(old), "new": encode(new)} for key, (old, new) in self.changes.items()
        ]
        return {"launch": self.launch, "changes": changes}


def encode(value: Any) -> Any:
    """Return a value as JSON can have it: a number that is not finite is a string, and stays visible."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def difference_of(manifest: Manifest) -> Difference | None:
    """Return the difference that a manifest records, or ``None``."""
    record = manifest.differs or {}
    launch, changes = read_int(record.get("launch"), 1), record.get("changes")
    if launch is None or not isinstance(changes, list):
        return None
    rows = [row for row in changes if isinstance(row, dict) and isinstance(row.get("key"), str)]
    by_key = {row["key"]: (row.get("old"), row.get("new")) for row in rows}
    return Difference(launch, by_key) if by_key else None


def changes_between(before: Iterable[str], after: Iterable[str]) -> Changes:
    """Compare the overrides of two launches; of a repeated key the last one counts, as for a launch."""
    old, new = ({word.partition("=")[0].strip(): word for word in words} for words in (before, after))
    changed = {key: (old[key], new[key]) for key in new if key in old and old[key] != new[key]}
    return Changes(
        added=[redacted(new[key]) for key in new if key not in old],
        removed=[redacted(old[key]) for key in old if key not in new],
        changed={key: (_value(earlier), _value(later)) for key, (earlier, later) in changed.items()},
    )


def _value(override: str) -> str:
    return redacted(override).partition("=")[2]


# The trainer's own record: its packages, and the commit of its code if it ran from a checkout.
_PACKAGES = "packages.json"
_GIT_INFO = "git-info.log"
_LONGEST_LINE = 4096


def provenance(launch: Launch) -> dict[str, Any]:
    """Return the manifest of a launch with secrets masked, and the job's own record, for programs."""
    manifest, directory = launch.manifest, launch.paths.directory
    content = asdict(manifest) | {
        "command": recorded(manifest.command),
        "overrides": recorded(manifest.overrides),
        "image_digest": manifest.image_digest or image_digest(directory),
        "jobs": list(launch.links.values()),
        "run_dir": str(launch.paths.run_dir),
        "directory": str(directory),
        "job_packages": _job_packages(launch),
        "job_git": _job_git(launch),
        # Those of the launch itself; the job's are in folders, except its logs.
        "files": [str(directory / name) for name in names_in(directory) if not name.startswith(".")],
    }
    return {key: value for key, value in content.items() if key != "launcher_pid"}


def provenance_rows(launch: Launch) -> list[tuple[str, str]]:
    """Return the provenance for people: names and values."""
    manifest, record = launch.manifest, provenance(launch)
    configuration: list[tuple[str, str]] = []
    if tree := manifest.config_git:
        commit = _checkout(tree.get("commit"), tree.get("dirty"))
        configuration = [("configuration", f"{commit}, in {tree.get('directory')}")]
        configuration += [("not committed", _diff(launch, tree.get("diff")))]
    size = tables.tasks(launch.nodes, manifest.tasks_per_node)
    pairs = [
        ("run", f"{manifest.run}, launch {launch.paths.number}"),
        ("job", f"{', '.join(record['jobs']) or tables.UNKNOWN}, {manifest.stage}, {size}"),
        ("launched", f"{moment(manifest.created)} by {manifest.user} on {manifest.host}"),
        ("command", shlex.join(record["command"])),
        *(("override", override) for override in record["overrides"]),
        *(("choice", f"{group}={choice}") for group, choice in sorted(manifest.choices.items())),
        ("code", _checkout(manifest.git_commit, manifest.git_dirty)),
        ("not committed", _diff(launch, manifest.git_diff)),
        *(("excluded node", _excluded(node)) for node in manifest.excluded),
        *configuration,
        ("image", tables.text(manifest.image)),
        ("image digest", tables.text(record["image_digest"])),
        ("launcher", _versions(manifest.packages or {"slipway": manifest.version})),
        ("in the job", _versions(record["job_packages"])),
        ("job's code", tables.text(record["job_git"])),
        ("tag", manifest.tag),
        ("refused", tables.text(manifest.error)),
        ("directory", display_path(launch.paths.directory)),
        *(("file", Path(path).name) for path in record["files"]),
    ]
    known = [(name, value) for name, value in pairs if value != tables.UNKNOWN]
    names = ["", *(name for name, _ in known)]
    # Only the first line of a list has its name.
    return [("" if name == names[index] else name, value) for index, (name, value) in enumerate(known)]


def _checkout(commit: str | None, dirty: bool | None) -> str:
    known = "with uncommitted changes" if dirty else "without changes"
    changes = known if isinstance(dirty, bool) else "uncommitted changes unknown"
    return tables.UNKNOWN if commit is None else f"commit {commit}, {changes}"


def _diff(launch: Launch, name: str | None) -> str:
    return display_path(launch.paths.directory / name) if isinstance(name, str) else tables.UNKNOWN


def _excluded(node: Mapping[str, Any]) -> str:
    """Return a node that failed under this run before, with the time until which the run excludes it."""
    until = moment(node.get("until"))
    return f"{node.get('node')} until {until}, since job {node.get('job')}: {node.get('why')}"


def _versions(packages: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (packages or {}).items()) or tables.UNKNOWN


def _job_packages(launch: Launch) -> dict[str, str] | None:
    with contextlib.suppress(OSError, ValueError):
        content = read_json(launch.paths.results / _PACKAGES)
        return {name: str(version) for name, version in content.items()}
    return None


def _job_git(launch: Launch) -> str | None:
    """Return the first line of the trainer's record of its checkout."""
    with contextlib.suppress(OSError), open_regular(launch.paths.results / _GIT_INFO) as lines:
        return lines.readline(_LONGEST_LINE).decode("utf-8", errors="replace").strip() or None
    return None
