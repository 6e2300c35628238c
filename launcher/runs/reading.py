"""Reading the YAML that lies in a run directory: the data of whoever wrote it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from supervisor.files import read_text

# A YAML parser takes a second for that much.
_YAML_LIMIT = 1 << 19
_YAML_DEPTH = 64
# How a path that is not UTF-8 is written: libyaml does not read that, and the parser in Python is slow.
_ODD_ESCAPE = re.compile(r"\\uD[89A-F]", re.IGNORECASE)
_SLOW_YAML_LIMIT = 1 << 17


def read_stored_text(path: Path) -> str:
    """Read the text of a configuration that the launcher wrote, in which a path may not be UTF-8."""
    return read_text(path, _YAML_LIMIT, "surrogateescape")


def read_yaml(path: Path) -> Any:
    """Read a configuration that the launcher wrote; see `parse_yaml`."""
    return parse_yaml(read_text(path, _YAML_LIMIT))


def parse_yaml(text: str) -> Any:
    """Parse YAML that the launcher wrote, which has no aliases: these can blow up what is read.

    Raises
    ------
    ValueError
        If it is no YAML, or not such.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) <= _SLOW_YAML_LIMIT and _ODD_ESCAPE.search(text):
        loader = yaml.SafeLoader
    try:
        depth = 0
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _YAML_DEPTH:
                raise ValueError("it has aliases, or is nested too deeply")
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
