"""The origin of a checkpoint of ours: the model that it is of, and the training that wrote it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.arithmetic.parameters import padded_vocabulary
from slipway.common.errors import UserError
from slipway.common.files import open_regular
from slipway.trainer.checkpoint.description import (
    Description,
    Precision,
    description_from_json,
    description_of_model,
)
from slipway.trainer.checkpoint.files import read_mapping
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.load import flatten, load_yaml
from slipway.trainer.conversion.spec import Conversion
from slipway.trainer.report.metrics import FILE_NAME as METRICS

_T5 = "model.mcore_t5"
# The overrides that a model card shows.
_SHOWN = ("training=", "training.model.", "training.trainer.")


def describe(conversion: Conversion, checkpoint: Checkpoint) -> Description:
    """Return the description of a checkpoint's model: its own, or that of the configuration.

    Raises
    ------
    UserError
        If there is neither, or the tokenizer of the configuration is not the checkpoint's.
    """
    marker = checkpoint.marker
    if marker.model:
        return description_from_json(marker.model, str(checkpoint.path))
    flat = _configuration(conversion, checkpoint)
    padded = int(marker.architecture["padded_vocabulary"])
    precision: Precision = "bf16" if marker.architecture.get("precision") == "bf16" else "fp32"
    description = description_of_model(flat, padded, precision)
    size = description.vocabulary.size
    divisor = description.decoder.vocab_divisor
    expected = padded_vocabulary(size, divisor, marker.tensor_model_parallel_size)
    if padded != expected:
        raise UserError(
            f"conversion.model: its tokenizer has {size:,} tokens ({description.vocabulary.origin}), "
            f"{expected:,} with padding, and {checkpoint.path} has {padded:,}: it was trained with another"
        )
    return description


def _configuration(conversion: Conversion, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the dotted keys of the training's `model`, from `conversion.model`."""
    node = conversion.model
    if node is None:
        raise UserError(
            f"{checkpoint.path} does not describe its model, as an earlier version wrote it: expected "
            "conversion.model=FILE, the configuration of its training (launches/N/NAME_hydra.yaml)"
        )
    if conversion.model_type == "bert":
        raise UserError("conversion.model_type='bert': expected gpt or t5, which our trainer has")
    if isinstance(node, str):
        content = load_yaml(Path(node))
        node = content.get("model") if isinstance(content, dict) else None
        if not isinstance(node, Mapping):
            raise UserError(f"conversion.model={conversion.model}: it has no key `model`")
    flat = flatten({"model": dict(node)})
    return {**flat, _T5: True} if conversion.model_type == "t5" else flat


def provenance(conversion: Conversion, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the known facts about a checkpoint's training, from its marker and the launcher's records."""
    marker = checkpoint.marker
    # results/RUN/checkpoints/NAME
    directory = conversion.training.directory or checkpoint.path.parent.parent
    known = {
        "run": conversion.training.run,
        "step": marker.step,
        "consumed_samples": marker.consumed_samples,
        "training": marker.training,
        "checkpoint": checkpoint.path.name,
        "data": marker.data,
    }
    try:
        content = read_mapping(_launch_of(directory, checkpoint.path.name) / "launcher.json")
        known["run"] = known["run"] or content["run"]
        known |= {name: content.get(name) for name in ("git_commit", "git_dirty")}
        known["versions"] = content.get("packages")
        # A card is for others: it does not say where a training ran.
        known["overrides"] = [item for item in content["overrides"] if item.lstrip("+~").startswith(_SHOWN)]
    except (OSError, UserError, KeyError, TypeError, AttributeError):
        # A training that was not launched by the launcher, or whose records were removed.
        pass
    return known


def _launch_of(directory: Path, name: str) -> Path:
    """Return the launch of a run that wrote a checkpoint of this name last; the only one without a look."""
    launches = [path for path in (directory / "launches").iterdir() if path.name.isdigit()]
    if len(launches) == 1:
        return launches[0]
    launches.sort(key=lambda path: int(path.name), reverse=True)
    return next((path for path in launches if _has_saved(path / "results" / METRICS, name)), directory)


def _has_saved(metrics: Path, name: str) -> bool:
    """Return True if the events of a launch name this checkpoint."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError), open_regular(metrics) as lines:
        events = (json.loads(line) for line in lines if b'"kind": "checkpoint"' in line)
        return any(Path(event["path"]).name == name for event in events)
    return False
