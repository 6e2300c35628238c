"""The checkpoints that a stage reads, and their training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import explain_os_error, literal, setting_error
from launcher.runs.manifest import read_yaml
from launcher.runs.trained import TrainingLaunch, newest_training

# In paths, replaced by the step of each checkpoint.
STEP = "{step}"


def find_source_training(source: Path | None) -> TrainingLaunch | None:
    """Return the training that wrote the checkpoints of a source, if that is of a run."""
    return newest_training(source) if source is not None else None


def read_configuration(value: str | dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    """Return the keys of a node that may be the path of a file with them."""
    if not isinstance(value, str):
        return value
    try:
        return read_yaml(Path(value))
    except OSError as error:
        raise explain_os_error(error, Path(value), key, verb="read") from error
    except ValueError as error:
        raise setting_error(f"{key}={literal(value)}: {error}") from error


def require_source(source: Path | None, stage: str) -> None:
    """Raise UserError if a stage that reads checkpoints has no source."""
    if source is None:
        raise setting_error(
            f"{stage}.source=null: there is no training before it to make checkpoints",
            hint=f"{stage}.source=results/RUN/checkpoints, or stages=[training,{stage}]",
        )


def directory_of(path: Path) -> Path:
    """Return the directory above the part of a path that depends on the step, or else its parent."""
    parts = [part for part in path.parents if STEP not in str(part)]
    return parts[0]


def tokenizer_directories(model: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the directories of a model's tokenizer, with the keys of its files."""
    tokenizer = model.get("tokenizer")
    for name, value in tokenizer.items() if isinstance(tokenizer, Mapping) else ():
        if isinstance(value, str) and Path(value).is_absolute():
            yield Path(value).parent, f"training.model.tokenizer.{name}"
