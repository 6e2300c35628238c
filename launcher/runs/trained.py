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
        return checkpoints_of(self.config, self.paths)

    @property
    def model_type(self) -> str:
        return str(node(self.config, "run").get("model_type", "gpt"))


def node(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the keys of a node of a stored configuration, in which anything may stand."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def checkpoints_of(config: Mapping[str, Any], paths: LaunchPaths) -> Path:
    """Return the directory of a training's checkpoints; the run's directory may have been moved since."""
    callback = node(node(config, "exp_manager"), "checkpoint_callback_params")
    directory = Path(str(callback.get("dirpath") or paths.checkpoints))
    run_dir = Path(str(node(config, "run").get("results_dir") or paths.run_dir))
    return paths.run_dir / directory.relative_to(run_dir) if directory.is_relative_to(run_dir) else directory


def newest_training(path: Path) -> TrainingLaunch | None:
    """Return the training of the run that a directory is, or lies in; None if there is none."""
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
