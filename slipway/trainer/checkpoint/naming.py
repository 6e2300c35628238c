"""Checkpoint names in NeMo's style."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slipway.common.errors import UserError, suggest

_KEY = "exp_manager.checkpoint_callback_params.filename"
_FIELD = re.compile(r"\{(?P<name>\w*)(?::(?P<format>[^{}]*))?\}")
FIELDS = ("val_loss", "reduced_train_loss", "step", "epoch", "consumed_samples")


def check_template(template: str) -> None:
    """Hold a template against the fields that can be filled in.

    Raises
    ------
    UserError
        If it names an unknown field, holds a path separator, has no ``{step}``, or is hidden.
    """
    for match in _FIELD.finditer(template):
        name = match["name"]
        if name not in FIELDS:
            raise UserError(
                f"{_KEY}={template!r}: unknown field '{name}'; valid are {', '.join(FIELDS)}"
                f"{suggest(name, FIELDS)}"
            )
    if "/" in template:
        raise UserError(f"{_KEY}={template!r}: expected a name without '/'; dirpath says where")
    values: dict[str, float | int | None] = {field: 1.0 if field.endswith("loss") else 1 for field in FIELDS}
    try:
        name = render(template, values)
        unvalidated = render(template, {**values, "val_loss": None})
    except ValueError as error:
        raise UserError(f"{_KEY}={template!r}: {error}") from None
    if "step=" not in name:
        raise UserError(f"{_KEY}={template!r}: expected a field {{step}}, which distinguishes checkpoints")
    if name.startswith(".") or unvalidated.startswith("."):
        raise UserError(f"{_KEY}={template!r}: expected a name without a dot in front, which would hide it")


def render(template: str, values: Mapping[str, float | int | None]) -> str:
    """Fill in a template: ``{x:.2f}`` becomes ``x=value``, as in Lightning.

    A field without a value (a validation loss when nothing was validated) is left out, and a hyphen with it.
    """

    def fill(match: re.Match[str]) -> str:
        value = values.get(match["name"])
        return "" if value is None else f"{match['name']}={value:{match['format'] or ''}}"

    missing = [name for name in FIELDS if values.get(name) is None]
    for name in missing:
        template = re.sub(rf"\{{{name}(:[^{{}}]*)?\}}-?", "", template)
    return _FIELD.sub(fill, template).strip("-")
