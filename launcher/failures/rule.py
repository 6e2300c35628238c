"""What a rule about the end of a job says: a row of the table in `launcher.failures.rules`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Of = Literal["end", "log"]
Verdict = Literal["done", "continue", "exclude", "stop"]
# line: those of the job's nodes that the line names, else the one of the rank that it names;
# down: those that Slurm calls down, else those that the line names.
Nodes = Literal["-", "line", "down"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row.

    Attributes
    ----------
    of
        What the pattern is looked for in.
    verdict
        What follows for the chain; ``exclude`` goes on without the nodes, ``continue`` where there are none.
    nodes
        Which nodes are at fault.
    means
        What happened, as a sentence for the user without its full stop.
    advice
        What the user can do; ``None`` where nothing is to be done.
    """

    name: str
    of: Of
    verdict: Verdict
    nodes: Nodes
    pattern: str
    means: str
    advice: str | None = None
