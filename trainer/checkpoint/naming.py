"""Checkpoint names in NeMo's style."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.errors import UserError, suggest

_KEY = "exp_manager.checkpoint_callback_params.filename"
_FIELD = re.compile(r"\{(?P<name>\w*)(?::(?P<format>[^{}]*))?\}")
FIELDS = ("val_loss", "reduced_train_loss", "step", "epoch", "consumed_samples")
LAST = "-last"


def check_template(template: str) -> None:
    """Hold a template against the fields that can be filled in.

    Raises
    ------
    UserError
        If it names an unknown field, holds a path separator, or lacks ``{step}``.
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
    try:
        name = render(template, {field: 1.0 if field.endswith("loss") else 1 for field in FIELDS})
    except ValueError as error:
        raise UserError(f"{_KEY}={template!r}: {error}") from None
    if "step=" not in name:
        raise UserError(f"{_KEY}={template!r}: expected a field {{step}}, which tells checkpoints apart")


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
    return _FIELD.sub(fill, template).strip("-") + LAST
