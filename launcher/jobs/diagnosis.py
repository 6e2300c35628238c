"""The diagnosis of an ended attempt of a job: by its own judgement, or by its logs and marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from supervisor.evidence import evidence, left_by_ranks
from supervisor.judging import Facts, judge, rule_named
from supervisor.marks import JobAttempt

# The machine, or whoever ended the job, is the cause of these, and the errors of ranks explain nothing.
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
class Diagnosis:
    """The cause of the end of an attempt.

    Attributes
    ----------
    rule
        The name of the rule that matched.
    verdict
        The consequence for its chain.
    why
        The cause, in a sentence.
    nodes
        The nodes at fault.
    first
        The rank that failed first, and its error.
    advice
        What the user can do, if anything.
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


def diagnose(
    attempt: JobAttempt,
    logs: Sequence[Path] = (),
    failures: Path | None = None,
    *,
    state: str | None = None,
    reason: str | None = None,
    save: str | None = None,
    tasks_per_node: int = 1,
) -> Diagnosis | None:
    """Return why an attempt ended; ``None`` if it has not ended, as far as is known.

    Parameters
    ----------
    logs
        The job's logs, which are read only if it did not judge itself.
    failures
        The directory with the errors of its ranks.
    state, reason
        The scheduler's words for its end; ``None`` while it lives, or if they are not known.
    save
        The signal that tells its payload to save.
    """
    if attempt.verdict and attempt.why:
        diagnosis = _as_marked(attempt)
    elif attempt.is_over or state is not None:
        facts = Facts(attempt.exit_code, attempt.state or state, reason, signal=attempt.signal, save=save)
        hosts = attempt.nodes.split(",") if attempt.nodes else []
        judged = judge(facts, evidence(logs, failures, attempt.started or 0.0), hosts, tasks_per_node)
        rule = judged.rule
        diagnosis = Diagnosis(rule.name, judged.verdict, rule.means, judged.nodes, advice=rule.advice)
    else:
        return None
    if diagnosis.rule in _NOT_OF_RANKS:
        return diagnosis
    return replace(diagnosis, first=_first_failure(attempt, failures))


def _as_marked(attempt: JobAttempt) -> Diagnosis:
    rule = rule_named(attempt.rule)
    nodes = tuple(attempt.excluded.split(",")) if attempt.excluded else ()
    verdict = attempt.verdict if attempt.verdict in ("done", "exclude", "stop") else "continue"
    return Diagnosis(attempt.rule, verdict, attempt.why or "", nodes, advice=rule.advice if rule else None)


def _first_failure(attempt: JobAttempt, failures: Path | None) -> str | None:
    """Describe the rank that failed first: by its own error, else by the job's judgement."""
    # Marks have whole seconds; a rank of a later link overwrites the error of an earlier link.
    until = math.inf if attempt.ended is None else attempt.ended + 1
    for left in [] if failures is None else left_by_ranks(failures, attempt.started or 0.0, until):
        return f"rank {left.rank} on {left.host} failed first: {left.error}"
    if attempt.rank is None:
        return None
    return f"rank {attempt.rank}{f' on {attempt.host}' if attempt.host else ''} failed first"
