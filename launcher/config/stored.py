"""Configurations as text: the YAML that a job reads, and the whole configuration stored with a launch.

The stored one plans the launch again without its trees. Everything in it is resolved except the environment's
secrets: these stay references, such as ``${oc.env:HF_TOKEN}``, and are looked up again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.config.overrides import escape_interpolation
from launcher.config.schema import RunConfig, parse
from launcher.config.values import map_texts
from launcher.errors import UserError, escape
from launcher.runs.manifest import parse_yaml
from launcher.secrecy import hidden, is_secret_name

_REFERENCE = re.compile(r"\$\{oc\.env:\w+\}")
_UNESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# A shorter value of a secret is recognized where it is the whole value of a key, and not within another text.
_SHORTEST_WITHIN, _SHORTEST = 8, 4
_HEADING = "# The whole configuration of this launch: `slipway render --launch-dir` plans from it.\n"


def stored_text(config: RunConfig, environment: Mapping[str, str]) -> str:
    """Return a configuration as YAML, with references in place of an environment's secrets."""
    secrets = {
        name: value
        for name, value in environment.items()
        if len(value) >= _SHORTEST and _NAME.fullmatch(name) and is_secret_name(name)
    }
    node = map_texts(config.model_dump(), lambda key, text: _kept(key, text, secrets))
    # Not libyaml's dumper, which takes no path that is not UTF-8.
    return _HEADING + str(yaml.safe_dump(node, sort_keys=False))


def read_stored(text: str, where: str, untrusted: str | None = None) -> RunConfig:
    """Read a configuration; raise UserError for another text, or a reference to an unset variable.

    `untrusted` names others who could have written it: references are refused then, as they would print the
    caller's values.
    """
    try:
        node = parse_yaml(text)
        if not isinstance(node, dict):
            raise ValueError("it holds no keys")
        if untrusted is not None:
            map_texts(node, lambda key, value: _require_text(key, value, where, untrusted))
        if "${" in text:
            node = OmegaConf.to_container(OmegaConf.create(node), resolve=True)
        return parse(RunConfig, node)
    except (ValueError, TypeError, OmegaConfBaseException) as error:
        raise UserError(f"{where}: not a configuration of a launch: {escape(str(error))}") from error


def _require_text(key: str, value: str, where: str, untrusted: str) -> str:
    if _UNESCAPED.search(value):
        raise UserError(
            f"{escape(where)}: {escape(key)} refers to your environment or to other keys, and the file "
            f"is not trusted: {escape(untrusted)}",
            hint="read it; then copy the run to a directory that only you may write, and use the copy",
        )
    return value


def _kept(key: str, text: str, secrets: Mapping[str, str]) -> str:
    """Return a value for storage: secrets of the environment as references, others masked."""
    escaped = escape_interpolation(text)
    for name, value in secrets.items():
        if value in text and (value == text or len(value) >= _SHORTEST_WITHIN):
            escaped = escaped.replace(escape_interpolation(value), f"${{oc.env:{name}}}")
    bare = _REFERENCE.sub("", escaped) if escaped != escape_interpolation(text) else escaped
    return escaped if not bare or hidden(key, bare) == bare else str(hidden(key, escaped))


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
