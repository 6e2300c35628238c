"""What `slipway check` has found: for people, and for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.checks.findings import Severity
from launcher.checks.summary import Summary, summarize
from launcher.cli.estimate_views import amount_lines, cost_lines, headline, plain_lines, print_table
from launcher.drafting import Draft
from launcher.estimates.overview import Overview
from launcher.plan import Plan
from launcher.ui.tables import print_styled

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.SKIPPED: "dim"}

Line = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Told:
    """A finding as it is printed.

    `source` is where the values that it is about are from; `why` is why a check was skipped, where others may
    have been for the same reason.
    """

    severity: Severity
    id: str
    message: str
    key: str | None = None
    source: str | None = None
    fix: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """A draft, what it will take, the ids of the checks that looked at it, and all that there is to tell.

    `told` has the worst first.
    """

    draft: Draft
    overview: Overview
    asked: Sequence[str]
    told: Sequence[Told]

    @property
    def plan(self) -> Plan:
        return self.draft.plan

    @property
    def errors(self) -> int:
        return sum(item.severity is Severity.ERROR for item in self.told)


def content(looked: Looked) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    least, most = _summaries(looked.plan)
    memory, amount, cost = looked.overview.memory, looked.overview.amount, looked.overview.cost
    return {
        "run": looked.plan.paths.run_name,
        "choices": looked.draft.composition.choices,
        "layout": asdict(least) if least is not None else None,
        "layout_at_most": asdict(most) if most is not None else None,
        "memory": memory.to_json() if memory is not None else None,
        "amount": asdict(amount) if amount is not None else None,
        "cost": asdict(cost) if cost is not None else None,
        "errors": looked.errors,
        "findings": [{**asdict(item), "severity": item.severity.value} for item in looked.told],
    }


def print_screen(looked: Looked) -> None:
    """Print the layout, the estimates, the findings, and the verdict last: nearest to the prompt."""
    print_styled(_layout_lines(looked.plan), wrap=True)
    _print_memory(looked.overview)
    print_styled(_cost_lines(looked), wrap=True)
    print_styled(_finding_lines(looked.told))
    print_styled([((_verdict(looked), "bold"),)], wrap=True)


def _summaries(plan: Plan) -> tuple[Summary | None, Summary | None]:
    """Return the layout with the least nodes of the job, and that with the most if they differ."""
    config, resources = plan.job.config or {}, plan.job.resources
    most = resources.max_nodes
    return summarize(config, resources.nodes), summarize(config, most) if most is not None else None


def _layout_lines(plan: Plan) -> list[Line]:
    return [
        ((f"{plan.paths.run_name}: ", "bold"), (f"{to}{summary}", ""))
        for summary, to in zip(_summaries(plan), ("", "up to "), strict=True)
        if summary is not None
    ]


def _print_memory(overview: Overview) -> None:
    memory = overview.memory
    if memory is None:
        return
    print_styled([(("memory: ", "bold"), (headline(memory), ""))], wrap=True)
    if not sys.stdout.isatty() or not print_table(memory):
        print_styled([((f"  {line}", ""),) for line in plain_lines(memory)], wrap=True)


def _cost_lines(looked: Looked) -> list[Line]:
    amount, cost = looked.overview.amount, looked.overview.cost
    lines = cost_lines(looked.plan, cost) if cost is not None else amount_lines(amount) if amount else ()
    return [((f"{name}: ", "bold"), (text, "")) for name, text in lines]


def _finding_lines(told: Sequence[Told]) -> list[Line]:
    lines: list[Line] = []
    for item in together(told):
        lines.append(
            (
                (f"{item.severity.value}: ", _STYLES[item.severity]),
                (item.message, ""),
                (f" [{item.id}]", "dim"),
            )
        )
        below = [(item.source, "dim"), (item.fix, "green")]
        lines += [((f"  {line}", style),) for text, style in below if text for line in text.split("\n")]
    return lines


def together(told: Sequence[Told]) -> list[Told]:
    """Merge checks that were skipped for the same reason, such as a cluster that cannot be asked."""
    found: list[Told] = []
    for item in told:
        same = [other for other in told if item.why is not None and other.why == item.why]
        if len(same) < 2:
            found.append(item)
        elif item is same[0]:
            ids = ", ".join(other.id for other in same)
            found.append(replace(item, id=ids, message=f"not checked: {item.why}"))
    return found


def _verdict(looked: Looked) -> str:
    told = looked.told
    counts = {severity: sum(item.severity is severity for item in told) for severity in Severity}
    parts = [
        f"{count} {severity.value}{'s' if count != 1 and severity is not Severity.SKIPPED else ''}"
        for severity, count in counts.items()
        if count
    ]
    good = len({*looked.asked} - {item.id for item in told})
    return f"{good} of {len(looked.asked)} checks passed" + (f"; {', '.join(parts)}" if parts else "")
