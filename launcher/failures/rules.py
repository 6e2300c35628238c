"""The rule table: what is known of how jobs end, and what follows. The first rule that matches is the one.

The job itself judges with it at its end (``templates/judging.sh``): it has no Python of ours, and so the
table goes along as a file, `rules_file`, whose patterns mean the same to ``grep -E`` and to `re`: no ``\\d``,
``\\b`` or ``(?...)``.

A rule is of the job's ``end``, a line of facts::

    code=143 state=COMPLETING reason=TimeLimit preempted=None signal=TERM save=USR1

which are the exit code of its tasks, ``JobState``, ``Reason`` and ``PreemptTime`` of ``scontrol show job``,
what the script was sent while they ran, and by which signal its payload is told to save; ``-`` is not known.
While the script of a job lives that Slurm ends, its state is COMPLETING, and only the reason tells why; of a
job that leaves in time at a preemption not even that, but ``PreemptTime`` does.

Or it is of its ``log``, where the first line counts that matches; what ranks left when they failed comes
before. Anything may stand in a log: no rule of it excludes a node but one of the job's own, and none ends a
chain but that of Slurm's own notice.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.failures import ends, signs
from launcher.failures.rule import Rule

RULES: tuple[Rule, ...] = (*ends.FIRST, *signs.HARDWARE, *ends.LIMITS, *signs.TASKS, *ends.LAST)
_BY_NAME: Mapping[str, Rule] = {rule.name: rule for rule in RULES}


def rule_named(name: str | None) -> Rule | None:
    """The rule of a name; those of one name differ only in where they look."""
    return _BY_NAME.get(name) if name else None


def rules_file() -> str:
    """The table as the job reads it: a line for each rule, all but its advice, parted by tabs."""
    rows = ([rule.name, rule.of, rule.verdict, rule.nodes, rule.pattern, rule.means] for rule in RULES)
    return "".join("\t".join(row) + "\n" for row in rows)
