"""Write docs/failures.md: the table of rules by which the end of a job is judged.

python scripts/failures_page.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.generated_pages import main  # noqa: E402
from slipway.common.node import failure_rules  # noqa: E402
from slipway.common.node.failure_rules import FailureRule  # noqa: E402

_INTRODUCTION = """\
# Failure rules: why a job ended

<!-- Written by scripts/failures_page.py from slipway/common/node/failure_rules.py; change that. -->

The supervisor of each job judges it at its end, and writes into `marks/JOB.0.ended.json` what it found: exit
code, Slurm's state, the first rank that failed and its node, the last step, the *rule* that matched,
and the *verdict*. `slipway history` tells it, and what you can do. In a chain the verdict decides:

| verdict | the chain |
|---|---|
| done | has ended; the next link is cancelled |
| continue | goes on; if `resilience.max_failures` links in a row end without a new checkpoint, it stops |
| exclude | goes on without the nodes at fault, for `resilience.exclude_hours` |
| stop | has ended: the next link would end in the same way |

The first rule that matches counts. One of the *end* looks at the exit code, at what the script was sent, and
at what `scontrol show job` says; one of the *log* at what ranks left when they failed, and then at the
last MiB of the job's log. A rule with two patterns needs both: of the end, and of a line of the log. A log
can name no node but the job's own: if a line names several, the first counts, or the node of the rank that
it names.

Where a [detector](architecture.md#how-to-add-a-detector) ended the tasks, it names rule and reason, and the
verdict is continue or stop.
"""
_PARTS = (
    ("How it ended", failure_rules.FIRST),
    ("A broken machine", failure_rules.HARDWARE),
    ("A limit", failure_rules.LIMITS),
    ("Its tasks", failure_rules.TASKS),
    ("Nothing else tells", failure_rules.LAST),
)


def _rows(rules: Sequence[FailureRule]) -> list[str]:
    lines = ["| rule | of | verdict | what happened | what you can do |", "|---|---|---|---|---|"]
    for rule in rules:
        cells = (f"`{rule.name}`", rule.of, rule.verdict, rule.means, rule.advice or "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _patterns(rules: Sequence[FailureRule]) -> list[str]:
    """Return the patterns as a block: not in the table, whose cells end at each bar."""
    width = max(len(rule.name) for rule in rules)
    lines = [
        f"{rule.name:{width}}  {pattern}"
        for rule in rules
        for pattern in (rule.pattern, rule.line)
        if pattern
    ]
    return ["```text", *lines, "```"]


def text() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for title, rules in _PARTS:
        lines = ["", f"## {title}", "", *_rows(rules), "", "They look for:", "", *_patterns(rules), ""]
        parts.append("\n".join(lines))
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main("failures.md", lambda _: text()))
