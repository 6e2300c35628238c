"""The nodes that a run avoids because they failed, ``excluded_nodes.tsv`` in its directory.

Its jobs append a line for each: the node, until when it is avoided (Unix seconds), the job that it failed
under, and why, with tabs between. Nothing is ever removed: a line that has expired says nothing any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.errors import one_line
from launcher.runs.paths import EXCLUDED_NODES
from launcher.runs.reading import read_text

# What Slurm takes for a node: an odd word, of a file that anybody of the group can write, is passed over.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class ExcludedNode:
    """A node that a run avoids until then, in Unix seconds; `job` is the one that it failed under."""

    node: str
    until: int
    job: str
    why: str

    def to_json(self) -> dict[str, Any]:
        """As the manifest has it."""
        return asdict(self)


def read_excluded(run_dir: Path, now: float) -> tuple[ExcludedNode, ...]:
    """The nodes that a run avoids now, in the order in which they failed first; each once.

    A line that is not whole is passed over: its writer was killed.
    """
    try:
        text = read_text(run_dir / EXCLUDED_NODES, errors="replace")
    except OSError:
        return ()
    found: dict[str, ExcludedNode] = {}
    for line in text.split("\n"):
        one = _parse(line)
        if one is not None and one.until > now and one.until >= _until(found.get(one.node)):
            found[one.node] = one
    return tuple(found.values())


def excluded_from_json(items: Iterable[Any]) -> tuple[ExcludedNode, ...]:
    """What a manifest has of them; what is none is passed over."""
    found = []
    for item in items:
        if isinstance(item, dict) and _NODE.fullmatch(str(item.get("node", ""))):
            until = item.get("until")
            whole = until if isinstance(until, int) else 0
            found.append(
                ExcludedNode(item["node"], whole, str(item.get("job", "")), str(item.get("why", "")))
            )
    return tuple(found)


def _parse(line: str) -> ExcludedNode | None:
    node, *rest = line.split("\t", 3)
    if len(rest) < 3 or not _NODE.fullmatch(node) or not re.fullmatch(r"[0-9]{1,12}", rest[0], re.ASCII):
        return None
    return ExcludedNode(node, int(rest[0]), rest[1], one_line(rest[2]))


def _until(node: ExcludedNode | None) -> int:
    return node.until if node is not None else 0
