"""Where a result comes from: all that is on record of one launch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.jobs.launches import Launch
from launcher.monitor import formatting
from launcher.monitor.moments import moment
from launcher.runs.paths import short
from launcher.secrecy import recorded
from supervisor.files import open_regular, read_json
from supervisor.marks import image_digest

# What the trainer writes of itself: its packages, and the commit of its code where it ran from a checkout.
_PACKAGES = "packages.json"
_GIT_INFO = "git-info.log"
_LONGEST_LINE = 4096


def origin(launch: Launch) -> dict[str, Any]:
    """The manifest of a launch without the secrets in it, and what the job found out, for programs."""
    manifest = launch.manifest
    content = asdict(manifest) | {
        "command": recorded(manifest.command),
        "overrides": recorded(manifest.overrides),
        "image_digest": manifest.image_digest or image_digest(launch.paths.directory),
        "jobs": list(launch.jobs),
        "run_dir": str(launch.paths.run_dir),
        "directory": str(launch.paths.directory),
        "job_packages": _job_packages(launch),
        "job_git": _job_git(launch),
        "files": [str(path) for path in _files(launch)],
    }
    return {key: value for key, value in content.items() if key != "launcher_pid"}


def rows(launch: Launch) -> list[tuple[str, str]]:
    """The same for people: names and values."""
    manifest, told = launch.manifest, origin(launch)
    pairs = [
        ("run", f"{manifest.run}, launch {launch.paths.number}"),
        ("job", f"{', '.join(launch.jobs) or formatting.UNKNOWN}, {manifest.stage}, {_size(launch)}"),
        ("launched", f"{moment(manifest.created)} by {manifest.user} on {manifest.host}"),
        ("command", shlex.join(told["command"])),
        *(("override", override) for override in told["overrides"]),
        *(("choice", f"{group}={choice}") for group, choice in sorted(manifest.choices.items())),
        ("code", _checkout(manifest.git_commit, manifest.git_dirty)),
        ("not committed", _diff(launch, manifest.git_diff)),
        *(("avoids", _avoided(node)) for node in manifest.excluded),
        *_config_rows(launch, manifest.config_git),
        ("image", formatting.text(manifest.image)),
        ("image's digest", formatting.text(told["image_digest"])),
        ("launcher", _versions(manifest.packages or {"slipway": manifest.version})),
        ("in the job", _versions(told["job_packages"])),
        ("job's code", formatting.text(told["job_git"])),
        ("tag", manifest.tag),
        ("refused", formatting.text(manifest.error)),
        ("directory", short(launch.paths.directory)),
        *(("file", path.name) for path in _files(launch)),
    ]
    shown = [(name, value) for name, value in pairs if value != formatting.UNKNOWN]
    names = ["", *(name for name, _ in shown)]
    # Of a list the name stands in front of its first line alone.
    return [("" if name == names[index] else name, value) for index, (name, value) in enumerate(shown)]


_CHANGES = {
    True: "with changes that were not committed",
    False: "without changes",
    None: "changes not known",
}


def _checkout(commit: str | None, dirty: bool | None) -> str:
    changes = _CHANGES[dirty if isinstance(dirty, bool) else None]
    return formatting.UNKNOWN if commit is None else f"commit {commit}, {changes}"


def _config_rows(launch: Launch, told: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not told:
        return []
    where = f"{_checkout(told.get('commit'), told.get('dirty'))}, in {told.get('directory')}"
    return [("configuration", where), ("not committed", _diff(launch, told.get("diff")))]


def _diff(launch: Launch, name: str | None) -> str:
    return short(launch.paths.directory / name) if isinstance(name, str) else formatting.UNKNOWN


def _size(launch: Launch) -> str:
    return formatting.tasks(launch.nodes, launch.manifest.tasks_per_node)


def _avoided(node: Mapping[str, Any]) -> str:
    """A node that failed under this run before, and until when the run stays away from it."""
    until = moment(node.get("until"))
    return f"{node.get('node')} until {until}, since job {node.get('job')}: {node.get('why')}"


def _versions(packages: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (packages or {}).items()) or formatting.UNKNOWN


def _job_packages(launch: Launch) -> dict[str, str] | None:
    try:
        content = read_json(launch.paths.results / _PACKAGES)
    except (OSError, ValueError):
        return None
    return {str(name): str(version) for name, version in content.items()}


def _job_git(launch: Launch) -> str | None:
    """What the trainer wrote first of its checkout."""
    try:
        with open_regular(launch.paths.results / _GIT_INFO) as lines:
            return lines.readline(_LONGEST_LINE).decode("utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _files(launch: Launch) -> list[Path]:
    """The files of the launch itself; what the job wrote is in folders, but for its logs."""
    try:
        return sorted(path for path in launch.paths.directory.iterdir() if path.name[0] != ".")
    except OSError:
        return []
