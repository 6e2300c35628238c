"""The run that a checkpoint is from: its training's launch, and the configuration that its job read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.runs.manifest import Manifest, read_manifest, read_yaml
from launcher.runs.paths import LAUNCHES, LaunchPaths, launch_numbers

TRAINING = "training"
# A checkpoint lies in RUN/checkpoints, and its parts below that.
_LEVELS = 3


@dataclass(frozen=True, slots=True)
class TrainingLaunch:
    """The newest launch of a run's training that has its configuration."""

    paths: LaunchPaths
    manifest: Manifest
    config: Mapping[str, Any]

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints, which `exp_manager` may have elsewhere."""
        node = self.config.get("exp_manager")
        callback = node.get("checkpoint_callback_params") if isinstance(node, Mapping) else None
        directory = callback.get("dirpath") if isinstance(callback, Mapping) else None
        return Path(str(directory)) if directory else self.paths.checkpoints

    @property
    def model_type(self) -> str:
        node = self.config.get("run")
        return str(node.get("model_type", "gpt")) if isinstance(node, Mapping) else "gpt"


def training_of(path: Path) -> TrainingLaunch | None:
    """Return the training of the run that a directory is, or lies in; None if there is none."""
    path = path.absolute()
    for run_dir in (path, *path.parents[:_LEVELS]):
        if (run_dir / LAUNCHES).is_dir():
            return _newest(run_dir)
    return None


def _newest(run_dir: Path) -> TrainingLaunch | None:
    for number in reversed(launch_numbers(run_dir)):
        try:
            manifest = read_manifest(run_dir / LAUNCHES / str(number))
            paths = LaunchPaths(run_dir, manifest.run, manifest.job_name, number)
            config = read_yaml(paths.config) if manifest.stage == TRAINING else None
        except (UserError, OSError, ValueError):
            continue  # damaged, or launched without a configuration
        if isinstance(config, dict):
            return TrainingLaunch(paths, manifest, config)
    return None
