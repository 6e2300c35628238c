"""Why a life of a job ended, for the user: as the job itself judged, or as its traces say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from supervisor.evidence import evidence, left_by_ranks
from supervisor.judging import Facts, judge, rule_named
from supervisor.marks import Life

# Of these the machine or whoever ended it is to blame, and what ranks said of it explains nothing.
_NOT_OF_RANKS = (
    "done",
    "saved",
    "cancelled",
    "ended_by_user",
    "deadline",
    "preempted",
    "node_failed",
    "time_limit",
    "lost",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What became of a life.

    Attributes
    ----------
    rule
        The name of the rule that it is after.
    verdict
        What follows for its chain.
    why
        What happened, in a sentence.
    nodes
        Those at fault.
    first
        Which rank failed first, and what it said.
    advice
        What the user can do about it, if anything.
    """

    rule: str | None
    verdict: str
    why: str
    nodes: tuple[str, ...] = ()
    first: str | None = None
    advice: str | None = None

    def lines(self) -> list[str]:
        """Return it in up to three lines."""
        why = f"{self.why} (at fault: {', '.join(self.nodes)})" if self.nodes else self.why
        return [why, *filter(None, [self.first, self.advice])]

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "verdict": self.verdict,
            "why": self.why,
            "nodes_at_fault": list(self.nodes),
            "first_failure": self.first,
            "advice": self.advice,
        }


def read_life(
    life: Life,
    logs: Sequence[Path] = (),
    failures: Path | None = None,
    *,
    state: str | None = None,
    reason: str | None = None,
    save: str | None = None,
    tasks_per_node: int = 1,
) -> Reading | None:
    """Read why a life ended; ``None`` where it has not, as far as anybody can tell.

    Parameters
    ----------
    logs
        The job's own, which are looked into only if it did not judge itself.
    failures
        The directory with what its ranks left when they failed.
    state, reason
        The scheduler's words for it, now that it has ended; ``None`` while it lives, or if it is not known.
    save
        The signal that its payload takes as: save now.
    """
    if life.verdict and life.why:
        found = _as_marked(life)
    elif life.is_over or state is not None:
        facts = Facts(life.exit_code, life.state or state, reason, signal=life.signal, save=save)
        hosts = life.nodes.split(",") if life.nodes else []
        told = judge(facts, evidence(logs, failures, life.started or 0.0), hosts, tasks_per_node)
        found = Reading(told.rule.name, told.verdict, told.rule.means, told.nodes, advice=told.rule.advice)
    else:
        return None
    return found if found.rule in _NOT_OF_RANKS else replace(found, first=_first(life, failures))


def _as_marked(life: Life) -> Reading:
    rule = rule_named(life.rule)
    nodes = tuple(life.excluded.split(",")) if life.excluded else ()
    verdict = life.verdict if life.verdict in ("done", "exclude", "stop") else "continue"
    return Reading(life.rule, verdict, life.why or "", nodes, advice=rule.advice if rule else None)


def _first(life: Life, failures: Path | None) -> str | None:
    """Say which rank failed first: as it said itself, else as the job found."""
    # Marks have whole seconds; a rank of a later link writes over what one of an earlier link left.
    until = math.inf if life.ended is None else life.ended + 1
    for left in [] if failures is None else left_by_ranks(failures, life.started or 0.0, until):
        return f"rank {left.rank} on {left.host} failed first: {left.error}"
    if life.rank is None:
        return None
    return f"rank {life.rank}{f' on {life.host}' if life.host else ''} failed first"
