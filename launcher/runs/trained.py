"""The run that a checkpoint is from: its training's launch, the configuration of its job, its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import UserError
from launcher.runs.manifest import Manifest, read_manifest, read_yaml
from launcher.runs.paths import LAUNCHES, LaunchPaths, launch_numbers
from slipway.common.files import read_int, read_json
from slipway.common.node.checkpoints import MARKER

TRAINING = "training"
# A checkpoint lies in RUN/checkpoints, and its parts below that.
_LEVELS = 3
# Largest marker of our trainer, in bytes: one of thousands of ranks lists as many files.
_LARGEST_MARKER = 64 << 20


class TrainingLaunch(NamedTuple):
    """The newest launch of a run's training that has its configuration."""

    paths: LaunchPaths
    manifest: Manifest
    config: Mapping[str, Any]

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints, which `exp_manager` may have elsewhere."""
        return checkpoints_of(self.config, self.paths)

    @property
    def model_type(self) -> str:
        return str(node(self.config, "run").get("model_type", "gpt"))


def node(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a node of a stored configuration, which may hold any value."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def checkpoints_of(config: Mapping[str, Any], paths: LaunchPaths) -> Path:
    """Return the directory of a training's checkpoints; the run's directory may have been moved since."""
    callback = node(node(config, "exp_manager"), "checkpoint_callback_params")
    directory = Path(str(callback.get("dirpath") or paths.checkpoints))
    run_dir = Path(str(node(config, "run").get("results_dir") or paths.run_dir))
    return paths.run_dir / directory.relative_to(run_dir) if directory.is_relative_to(run_dir) else directory


class MarkedCheckpoint(NamedTuple):
    """A marked checkpoint of our trainer: the marker's time and content."""

    serial: int
    step: int
    time: float
    path: Path
    content: Mapping[str, Any]

    @property
    def damage(self) -> str | None:
        """The first file that is not as the marker lists it, by name and size, and why; None if all are."""
        for name, size in node(self.content, "files").items():
            try:
                there = (self.path / name).stat().st_size
            except (OSError, ValueError):
                return f"{name} is missing"
            if isinstance(size, int) and there != size:
                return f"{name} has {there:,} bytes of {size:,}"
        return None


def read_marked_checkpoint(path: Path) -> MarkedCheckpoint | None:
    """Return the checkpoint of a directory; None without the marker of a finished one."""
    with suppress(OSError, ValueError):
        content = read_json(path / MARKER, _LARGEST_MARKER)
        if (step := read_int(content.get("step"), 0)) is not None:
            serial, time = read_int(content.get("serial"), 0) or 0, (path / MARKER).stat().st_mtime
            return MarkedCheckpoint(serial, step, time, path, content)
    return None


def find_marked_checkpoints(directory: Path) -> list[MarkedCheckpoint]:
    """Return the checkpoints of our trainer that have a marker, the newest last."""
    visible = [path for path in directory.iterdir() if not (path.is_symlink() or path.name.startswith("."))]
    return sorted(filter(None, map(read_marked_checkpoint, visible)), key=lambda saved: saved[:3])


def newest_training(path: Path) -> TrainingLaunch | None:
    """Return the newest training of the run that is, or contains, a directory; None without one."""
    path = path.absolute()
    above = (path, *path.parents[:_LEVELS])
    run_dir = next((directory for directory in above if (directory / LAUNCHES).is_dir()), path)
    for number in reversed(launch_numbers(run_dir)):
        try:
            manifest = read_manifest(run_dir / LAUNCHES / str(number))
            paths = LaunchPaths(run_dir, manifest.run, manifest.job_name, number)
            config = read_yaml(paths.config) if manifest.stage == TRAINING else None
        except (UserError, OSError, ValueError):
            continue  # damaged, or launched without a configuration
        if config is not None:
            return TrainingLaunch(paths, manifest, config)
    return None
