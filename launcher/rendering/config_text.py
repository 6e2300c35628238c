"""The text of the configuration that a job reads."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml


def config_text(config: Mapping[str, Any]) -> str:
    """Return a job's configuration as YAML, one key to a line, so that lines differ where values do."""
    return yaml.dump(
        dict(config), Dumper=_LineByLine, sort_keys=False, default_flow_style=False, width=sys.maxsize
    )


class _LineByLine(yaml.SafeDumper):
    """Lists stay in one line."""

    def as_one_line(self, data: Sequence[Any]) -> yaml.SequenceNode:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_LineByLine.add_representer(list, _LineByLine.as_one_line)
