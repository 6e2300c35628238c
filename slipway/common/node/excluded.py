"""The nodes that a run avoids because they failed, ``excluded_nodes.tsv`` in its directory.

Its jobs append a line for each: the node, until when it is avoided (Unix seconds), the job that it failed
under, and why, with tabs between. Nothing is ever removed: a line that has expired says nothing any more.
"""

import os
import re
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

from slipway.common.files import AnyPath, append_line, read_text, to_printable

EXCLUDED_NODES = "excluded_nodes.tsv"

# A node's name, as Slurm takes it: an odd word, of a file that the group can write, is passed over.
_NODE = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class ExcludedNode(NamedTuple):
    """A node that a run avoids until then, in Unix seconds; `job` is the one that it failed under."""

    node: str
    until: int
    job: str
    why: str


def read_excluded(run_dir: AnyPath, now: float) -> Tuple[ExcludedNode, ...]:
    """Return the nodes that a run avoids now, in the order in which they failed first; each once.

    A line that is not whole is passed over: its writer was killed.
    """
    try:
        text = read_text(os.path.join(run_dir, EXCLUDED_NODES), errors="replace")
    except OSError:
        return ()
    nodes: Dict[str, ExcludedNode] = {}
    for line in text.split("\n"):
        excluded = _parse(line)
        if excluded is None or excluded.until <= now:
            continue
        earlier = nodes.get(excluded.node)
        if earlier is None or excluded.until >= earlier.until:
            nodes[excluded.node] = excluded
    return tuple(nodes.values())


def append_excluded(run_dir: AnyPath, nodes: Sequence[ExcludedNode]) -> None:
    """Let a run avoid nodes from now on.

    Raises
    ------
    OSError
        If that cannot be written.
    """
    for excluded in nodes:
        words = [excluded.node, str(excluded.until), excluded.job, excluded.why]
        append_line(os.path.join(run_dir, EXCLUDED_NODES), "\t".join(map(to_printable, words)))


def _parse(line: str) -> Optional[ExcludedNode]:
    node, *rest = line.split("\t", 3)
    if len(rest) < 3 or not re.fullmatch(_NODE, node) or not re.fullmatch(r"[0-9]{1,12}", rest[0], re.ASCII):
        return None
    return ExcludedNode(node, int(rest[0]), rest[1], to_printable(rest[2]))
