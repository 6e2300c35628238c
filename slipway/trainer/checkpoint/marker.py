"""``complete.json``, the record in a complete checkpoint. Imports no torch.

Its last line is the checksum of all lines before it: each byte of the file is covered, or is part of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from slipway import __version__
from slipway.arithmetic.indexed import FIRST_SPLIT_RULE, SPLIT_RULE
from slipway.common.files import write_atomic
from slipway.trainer.checkpoint.files import is_absent, read_regular, text_checksum

MARKER = "complete.json"
# The formats of an optimizer's states: whole on each rank; in shards by megatron-core's buckets, which other
# data- and context-parallel sizes alone can load; and in shards that all parallel sizes can load.
NOT_SHARDED, DP_RESHARDABLE, FULLY_RESHARDABLE = "not_sharded", "dp_reshardable", "fully_reshardable"
_OWN_CHECKSUM = ',\n "checksum": '


@dataclass(frozen=True)
class Marker:
    """The marker of a checkpoint.

    Attributes
    ----------
    step, consumed_samples
        How far the training had come.
    world_size, tensor_model_parallel_size, pipeline_model_parallel_size
        The processes that wrote it, ...
    virtual_pipeline_model_parallel_size, context_parallel_size
        ... and the other ways in which they shared the model; 0 in the first version.
    architecture
        The sizes its weights have.
    metrics
        The training's metrics then, by the names that ``monitor`` may have.
    training
        Names the training over all of its launches; one that starts from step 0 in the same directory has
        another, and so has one that goes back to an earlier checkpoint.
    resume
        The ``resume`` node with which it was trained: the intervention that it comes after.
    intervention_step
        The step after which that intervention was made; 0 without one.
    serial
        Counts the checkpoints of a directory upwards.
    files
        Its other files, and their sizes in bytes.
    checksums
        Those of the same files; none in a checkpoint of an earlier version.
    data
        The identity of the data that it was trained on (:mod:`slipway.trainer.data.identity`).
    optimizer
        The format of its optimizer states, such as :data:`DP_RESHARDABLE`; empty in an earlier version's.
    model
        The description of its model (:mod:`slipway.trainer.checkpoint.description`); empty in an earlier
        version's.
    split_rule
        How its data were divided into splits (:func:`slipway.arithmetic.indexed.split_documents`).
    version, slipway
        The version of this format, 0 if it is not recorded, and of the program that wrote it.
    configuration
        The dotted keys of the training's configuration; none in an imported checkpoint.
    """

    step: int
    consumed_samples: int
    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    architecture: dict[str, Any]
    virtual_pipeline_model_parallel_size: int = 0
    context_parallel_size: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    training: str = ""
    resume: dict[str, Any] = field(default_factory=dict)
    intervention_step: int = 0
    serial: int = 0
    files: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    data: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    split_rule: str = SPLIT_RULE
    version: int = 1
    slipway: str = __version__
    configuration: dict[str, Any] = field(default_factory=dict)

    def write(self, checkpoint: Path) -> None:
        """Write the marker into a checkpoint's directory and have it on disk."""
        # YAML has dates, too.
        text = json.dumps(asdict(self), indent=1, default=str).removesuffix("\n}")
        write_atomic(checkpoint / MARKER, f"{text}{_OWN_CHECKSUM}{_format_checksum(text)}")


def read_marker(checkpoint: Path) -> Marker | None:
    """Return the marker of a checkpoint's directory, or None if it is missing or damaged."""
    try:
        return examine_marker(checkpoint)[0]
    except OSError:
        return None


def examine_marker(checkpoint: Path) -> tuple[Marker | None, str | None]:
    """Return the marker of a checkpoint's directory, or None and its defect.

    Raises
    ------
    OSError
        If the file cannot be read, as when a file system does not answer: that is no damage.
    """
    try:
        content = read_regular(checkpoint / MARKER)
    except OSError as error:
        if is_absent(error):
            return None, f"no {MARKER}"
        raise
    return parse_marker(content)


def parse_marker(content: bytes) -> tuple[Marker | None, str | None]:
    """Return the marker that a file holds, or None and its defect."""
    try:
        text = content.decode()
        body, mark, own = text.rpartition(_OWN_CHECKSUM)
        values = json.loads(text)
        # A later version's marker may say more, and an earlier one's less.
        marker = Marker(**{**_EARLIER, **{name: values[name] for name in _NAMES if name in values}})
    except (ValueError, TypeError, RecursionError):
        return None, f"{MARKER} cannot be read"
    is_intact = own == _format_checksum(body) if mark else not marker.checksums
    if not is_intact or not _is_well_formed(marker):
        return None, f"{MARKER} is not as it was written"
    return marker, None


def _format_checksum(text: str) -> str:
    return f'"{text_checksum(text)}"\n}}\n'


def _is_well_formed(marker: Marker) -> bool:
    """Return whether the values have the types that the code relies on."""
    numbers = (marker.step, marker.consumed_samples, marker.intervention_step, marker.serial)
    mappings = (
        *(marker.architecture, marker.model, marker.metrics),
        *(marker.resume, marker.files, marker.checksums, marker.configuration),
    )
    return all(type(number) is int for number in (*numbers, *_values(marker.files))) and all(
        isinstance(mapping, dict) for mapping in mappings
    )


def _values(mapping: object) -> tuple[object, ...]:
    return tuple(mapping.values()) if isinstance(mapping, dict) else ()


_NAMES = tuple(item.name for item in fields(Marker))
# What holds where a marker does not say it.
_EARLIER = {"split_rule": FIRST_SPLIT_RULE, "version": 0, "slipway": ""}
