"""Which rule the end of a job is after: what its script decides at its end, decided by who looks back.

The script may not have come to its end, or be of a Slipway that did not judge. What both say is the same:
``templates/judging.sh`` has this in bash.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.failures.rule import Rule, Verdict
from launcher.failures.rules import RULES

UNKNOWN = Rule("unknown", "end", "continue", "-", "", "nothing is known of its end")
_UNSAID = "-"
_NODE_FAILURE = "srun: error: Node failure on "
_RANK = re.compile(r"[Rr]ank\"?:? ?([0-9]{1,7})(?:[^0-9]|$)")


@dataclass(frozen=True, slots=True)
class Facts:
    """How a job ended, in Slurm's words; ``None`` is not known.

    Attributes
    ----------
    code
        The exit code of its tasks.
    state, reason, preempted
        ``JobState``, ``Reason`` and ``PreemptTime`` of ``scontrol show job``.
    signal
        What the script was sent while its tasks ran, such as ``USR1``.
    save
        The signal that its payload takes as: save now.
    """

    code: int | None = None
    state: str | None = None
    reason: str | None = None
    preempted: str | None = None
    signal: str | None = None
    save: str | None = None

    def __str__(self) -> str:
        """The line that the rules of a job's end are matched with."""
        code = _UNSAID if self.code is None else self.code
        state, reason, preempted, signal, save = (
            told.replace(" ", "_") if told else _UNSAID
            for told in (self.state, self.reason, self.preempted, self.signal, self.save)
        )
        return f"code={code} state={state} reason={reason} preempted={preempted} signal={signal} save={save}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The rule that a job's end is after, with the line that it matched, and the nodes at fault."""

    rule: Rule
    line: str
    nodes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """What follows; there is nothing to exclude where no node is known."""
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
        Lines, as `launcher.failures.evidence` reads them.
    hosts
        The job's nodes, in the order of their ranks.
    down
        Those of them that Slurm calls down.
    """
    end = str(facts)
    for rule in RULES:
        pattern = re.compile(rule.pattern)
        line = next(filter(pattern.search, [end] if rule.of == "end" else evidence), None)
        if line is not None:
            return Judgement(rule, line, _at_fault(rule, line, evidence, hosts, tasks_per_node, down))
    return Judgement(UNKNOWN, end)


def _at_fault(
    rule: Rule,
    line: str,
    evidence: Sequence[str],
    hosts: Sequence[str],
    tasks_per_node: int,
    down: Sequence[str],
) -> tuple[str, ...]:
    if rule.nodes == "line":
        return named_in(line, hosts, tasks_per_node)
    if rule.nodes == "down":
        failure = next((told for told in evidence if told.startswith(_NODE_FAILURE)), "")
        return tuple(host for host in hosts if host in down) or named_in(failure, hosts, tasks_per_node)
    return ()


def named_in(line: str, hosts: Sequence[str], tasks_per_node: int) -> tuple[str, ...]:
    """The first of the hosts that a line names, else that of the rank that it names."""
    names = "|".join(map(re.escape, sorted(hosts, key=len, reverse=True)))
    if names and (named := re.search(f"(?:^|[^A-Za-z0-9_.-])({names})(?:[^A-Za-z0-9_-]|$)", line)):
        return (named[1],)
    if rank := _RANK.search(line):
        node = int(rank[1]) // tasks_per_node  # srun deals ranks out node by node
        return (hosts[node],) if node < len(hosts) else ()
    return ()
