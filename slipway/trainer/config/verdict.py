"""``python -m slipway.trainer.config.verdict``: the trainer's verdict on a configuration, before a job.

Reads ``{"config": {...}, "worlds": [N, ...]}`` from stdin, JSON, and writes ``{"mistake": "..."}``, the first
one, or ``{"mistake": null}``; of several, each in a line, a line each. ``{"model": {...}, "type": "t5"}`` in
place of a configuration is a model that is to be converted to Hugging Face's format. Nothing is read but
that: no file, and no torch is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.config.architecture import read_architecture
from slipway.trainer.config.check import check_keys
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.config.t5 import is_t5, read_stacks
from slipway.trainer.config.values import Values


def find_mistake(config: dict[str, Any], world: int) -> str | None:
    """Return the first mistake in a configuration for `world` processes, or None."""
    flat = flatten(config)
    try:
        check_keys(flat)
        make_layout(read_settings(flat), world)
    except UserError as error:
        return str(error)
    return None


def find_conversion_mistake(model: dict[str, Any], kind: str | None) -> str | None:
    """Return why a model cannot be converted once it is trained; None if it can, or is no model at all."""
    from slipway.trainer.conversion.families import check_trained

    flat = {**flatten({"model": model}), **({"model.mcore_t5": True} if kind == "t5" else {})}
    values = Values(flat)
    try:
        encoder, decoder = read_stacks(values) if is_t5(flat) else (None, read_architecture(values))
    except UserError:
        return None
    try:
        check_trained(decoder, encoder)
    except UserError as error:
        return f"{error}; conversion.to=safetensors keeps the weights under our names"
    return None


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "model" in request:
            print(json.dumps({"mistake": find_conversion_mistake(request["model"], request["type"])}))
            continue
        mistakes = (find_mistake(request["config"], world) for world in request["worlds"])
        print(json.dumps({"mistake": next(filter(None, mistakes), None)}))


if __name__ == "__main__":
    main()
