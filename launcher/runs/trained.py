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


# Our keys of a GPT's sizes, by Hugging Face's names for them in GPT-2's files and in those of other families.
_SIZES = {
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "ffn_hidden_size",
    "n_positions": "max_position_embeddings",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocabulary",
}
_ALIKE = (*_SIZES.values(), "hidden_size", "num_attention_heads", "num_query_groups")


def read_model_sizes(path: Path) -> dict[str, Any]:
    """Return the sizes of a GPT that a checkpoint, or a directory of Hugging Face's format, holds.

    They have NeMo's keys below `model`, and `vocabulary` for the tokens; a size that is not told is left out.
    """
    with suppress(OSError, ValueError):
        config = read_json(path / "config.json")
        sizes = {_SIZES.get(name, name): value for name, value in config.items()}
        sizes.setdefault("ffn_hidden_size", None)
        if sizes["ffn_hidden_size"] is None and isinstance(sizes.get("hidden_size"), int):
            sizes["ffn_hidden_size"] = 4 * sizes["hidden_size"]
        if "n_positions" not in config:  # rotary ones have no parameters
            sizes.pop("max_position_embeddings", None)
        return _select_sizes(sizes, config.get("tie_word_embeddings"))
    if (saved := read_marked_checkpoint(path)) is None:
        return {}
    model = node(saved.content, "model")
    shape = dict(node(model, "decoder"))
    if shape.get("position") == "learned_absolute":
        shape["max_position_embeddings"] = shape.get("max_positions")
    shape["vocabulary"] = node(model, "vocabulary").get("size")
    return _select_sizes(shape, shape.get("tied_embeddings"))


def _select_sizes(sizes: Mapping[str, Any], is_tied: object) -> dict[str, Any]:
    whole = {name: read_int(sizes.get(name), 1) for name in _ALIKE}
    tied = {"share_embeddings_and_output_weights": is_tied} if isinstance(is_tied, bool) else {}
    return {**{name: size for name, size in whole.items() if size is not None}, **tied}


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
