"""The judge of a job's end: the first rule that matches counts.

A job judges itself at its end. The next link judges a job that died before it could, or that an
older Slipway ran, which did not judge.
"""

import re
from typing import Mapping, NamedTuple, Optional, Sequence, Tuple

from slipway.common.node import failure_rules
from slipway.common.node.evidence import find_hosts
from slipway.common.node.failure_rules import FailureRule

RULES: Tuple[FailureRule, ...] = (
    *failure_rules.FIRST,
    *failure_rules.HARDWARE,
    *failure_rules.LIMITS,
    *failure_rules.TASKS,
    *failure_rules.LAST,
)
_BY_NAME: Mapping[str, FailureRule] = {rule.name: rule for rule in RULES}
_PATTERNS = [re.compile(rule.pattern) for rule in RULES]

UNKNOWN = FailureRule("unknown", "continue", "^code=", "nothing is known of its end")
_UNSAID = "-"
_NODE_FAILURE = "srun: error: Node failure on "


def find_rule(name: Optional[str]) -> Optional[FailureRule]:
    """Return the rule of a name; those of one name differ only in where they look."""
    return _BY_NAME.get(name) if name else None


class Facts(NamedTuple):
    """The end of a job, in Slurm's words; ``None`` is not known.

    Attributes
    ----------
    code
        The exit code of its tasks.
    state, reason, preempted
        ``JobState``, ``Reason`` and ``PreemptTime`` of ``scontrol show job``.
    requeue
        Slurm may requeue it: ``Requeue`` of ``scontrol show job``.
    progress
        There is a newer checkpoint than when it began.
    signal
        The signal that the job was sent while its tasks ran, such as ``USR1``.
    save
        The signal that its payload takes as: save now.
    """

    code: Optional[int] = None
    state: Optional[str] = None
    reason: Optional[str] = None
    preempted: Optional[str] = None
    requeue: Optional[bool] = None
    progress: Optional[bool] = None
    signal: Optional[str] = None
    save: Optional[str] = None

    @property
    def line(self) -> str:
        """The line that the rules of a job's end are matched with."""
        return " ".join(f"{name}={_word(value)}" for name, value in self._asdict().items())


def _word(value: object) -> str:
    text = str(int(value)) if isinstance(value, bool) else str(value)
    return _UNSAID if value is None or value == "" else text.replace(" ", "_")


class Judgement(NamedTuple):
    """The rule that a job's end is after, with the line that it matched, and the nodes at fault."""

    rule: FailureRule
    line: str
    nodes: Tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Return the consequence; nothing can be excluded if no node is known."""
        return "continue" if self.rule.verdict == "exclude" and not self.nodes else self.rule.verdict


def judge(
    facts: Facts,
    evidence: Sequence[str],
    hosts: Sequence[str] = (),
    tasks_per_node: int = 1,
    down: Sequence[str] = (),
) -> Judgement:
    """Find the first rule that matches.

    Parameters
    ----------
    evidence
        Lines, as `slipway.common.node.evidence` reads them.
    hosts
        The job's nodes, in the order of their ranks.
    down
        Those of them that Slurm calls down.
    """
    end = facts.line
    for rule, pattern in zip(RULES, _PATTERNS):
        line = next(filter(pattern.search, [end] if rule.of == "end" else evidence), None)
        if line is not None and rule.line:
            line = next(filter(re.compile(rule.line).search, evidence), None)
        if line is not None:
            return Judgement(rule, line, _blame(rule, line, evidence, hosts, tasks_per_node, down))
    return Judgement(UNKNOWN, end)


def _blame(
    rule: FailureRule,
    line: str,
    evidence: Sequence[str],
    hosts: Sequence[str],
    tasks_per_node: int,
    down: Sequence[str],
) -> Tuple[str, ...]:
    if rule.nodes == "line":
        return find_hosts(line, hosts, tasks_per_node)
    if rule.nodes == "down":
        failure = next((line for line in evidence if line.startswith(_NODE_FAILURE)), "")
        return tuple(host for host in hosts if host in down) or find_hosts(failure, hosts, tasks_per_node)
    return ()
