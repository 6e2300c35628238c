"""The nodes to avoid: ``excluded_nodes.tsv`` in a run's directory, and a file that a team shares.

A line is a node, until when it is avoided (Unix seconds), the job that it failed under, and why, with tabs
between. In a team's file (``resilience.exclude_file``) the third column says who wrote the line, and when.
Lines are only appended: the last one of a node counts there, and one that has expired says nothing any more.
"""

import os
import re
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from slipway.common.files import RECORD_LIMIT, AnyPath, append_line, read_text, to_printable

EXCLUDED_NODES = "excluded_nodes.tsv"

# A node's name, as Slurm takes it: an odd word, of a file that the group can write, is passed over.
_NODE = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class ExcludedNode(NamedTuple):
    """A node to avoid until then, in Unix seconds; `job` is the one that it failed under, or who wrote it."""

    node: str
    until: int
    job: str
    why: str


def read_excluded(run_dir: AnyPath, now: float) -> Tuple[ExcludedNode, ...]:
    """Return the nodes that a run avoids now, in the order in which they failed first; each once.

    A line that is not whole is passed over: its writer was killed.
    """
    nodes: Dict[str, ExcludedNode] = {}
    for excluded in read_lines_of_run(run_dir):
        earlier = nodes.get(excluded.node)
        if excluded.until > now and (earlier is None or excluded.until >= earlier.until):
            nodes[excluded.node] = excluded
    return tuple(nodes.values())


def read_lines_of_run(run_dir: AnyPath) -> List[ExcludedNode]:
    """Return all whole lines of a run, also those that have expired."""
    try:
        return list(_parse_lines(read_text(os.path.join(run_dir, EXCLUDED_NODES), errors="replace")))
    except OSError:
        return []


def read_exclude_file(path: AnyPath, now: float) -> Tuple[ExcludedNode, ...]:
    """Return the nodes that a team's file excludes now, each by its last line.

    Raises
    ------
    OSError, ValueError
        If it cannot be read, or is larger than a list of nodes can be.
    """
    return parse_exclude_file(read_text(path, RECORD_LIMIT, errors="replace"), now)


def parse_exclude_file(text: str, now: float) -> Tuple[ExcludedNode, ...]:
    """Return the nodes that the text of a team's file excludes now, each by its last line."""
    nodes = {excluded.node: excluded for excluded in _parse_lines(text)}
    return tuple(excluded for excluded in nodes.values() if excluded.until > now)


def append_excluded(run_dir: AnyPath, nodes: Sequence[ExcludedNode]) -> None:
    """Let a run avoid nodes from now on.

    Raises
    ------
    OSError
        If that cannot be written.
    """
    for excluded in nodes:
        append_line(os.path.join(run_dir, EXCLUDED_NODES), format_excluded(excluded))


def format_excluded(excluded: ExcludedNode) -> str:
    """Return the line of a node."""
    words = [excluded.node, str(excluded.until), excluded.job, excluded.why]
    return "\t".join(map(to_printable, words))


def is_node_name(text: str) -> bool:
    """Return True for a single node's name, as Slurm takes it."""
    return re.fullmatch(_NODE, text) is not None


def _parse_lines(text: str) -> Iterator[ExcludedNode]:
    return (excluded for excluded in map(_parse, text.split("\n")) if excluded is not None)


def _parse(line: str) -> Optional[ExcludedNode]:
    node, *rest = line.split("\t", 3)
    if len(rest) < 3 or not is_node_name(node) or not re.fullmatch(r"[0-9]{1,12}", rest[0], re.ASCII):
        return None
    return ExcludedNode(node, int(rest[0]), rest[1], to_printable(rest[2]))
