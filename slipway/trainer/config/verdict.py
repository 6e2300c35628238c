"""``python -m slipway.trainer.config.verdict``: the trainer's verdict on a configuration, before a job.

Reads ``{"config": {...}, "worlds": [N, ...]}`` from stdin, JSON, and writes ``{"mistake": "..."}``, the first
one, or ``{"mistake": null}``; of several, each in a line, a line each. Nothing is read but that: no file, and
no torch is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.config.check import check_keys
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings


def mistake_in(config: dict[str, Any], world: int) -> str | None:
    """Return the first mistake in a configuration for `world` processes, None if there is none."""
    flat = flatten(config)
    try:
        check_keys(flat)
        make_layout(read_settings(flat), world)
    except UserError as error:
        return str(error)
    return None


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        mistakes = (mistake_in(request["config"], world) for world in request["worlds"])
        print(json.dumps({"mistake": next(filter(None, mistakes), None)}))


if __name__ == "__main__":
    main()
