"""The conversion that a configuration asks for: its root key `conversion`, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.common import sections
from slipway.common.errors import UserError, suggest
from slipway.common.section_types import Place, load
from slipway.common.sections import Target, TrainedRun
from slipway.trainer.config.load import load_yaml

ROOT = "conversion"
# Replaced in `output` by the step of a checkpoint.
STEP = "{step}"


@dataclass(frozen=True)
class Conversion(sections.Conversion):
    """A conversion whose source is known."""

    source: Place = field()
    to: Target = field()
    output: Place = field()
    training: TrainedRun = field(default_factory=TrainedRun)

    def output_of(self, step: int) -> Path:
        """Return the directory for a checkpoint of a step."""
        return Path(str(self.output).replace(STEP, str(step)))


def load_conversion(directory: Path, name: str) -> Conversion:
    """Read the conversion of a configuration file, whose name may omit ``.yaml``.

    Raises
    ------
    UserError
        If there is no such file, or no node `conversion` in it, or as :func:`read_conversion`.
    """
    path = directory / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    content: Any = load_yaml(path)
    node = content.get(ROOT) if isinstance(content, Mapping) else None
    if not isinstance(node, Mapping):
        hint = suggest(ROOT, map(str, content)) if isinstance(content, Mapping) else ""
        raise UserError(f"configuration {path}: missing root key '{ROOT}'{hint}")
    return read_conversion(node)


def read_conversion(node: Mapping[str, Any]) -> Conversion:
    """Read the node `conversion` of a configuration.

    Raises
    ------
    UserError
        Naming the key that is unknown, missing or invalid, its value, and the valid ones.
    """
    conversion = load(Conversion, node, ROOT)
    if conversion.every and STEP not in str(conversion.output):
        raise UserError(
            f"{ROOT}.output={conversion.output}: with {ROOT}.every={conversion.every} it needs {STEP}"
        )
    return conversion
