"""`slipway check`: what is wrong with a launch, before it is one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher import readiness
from launcher.cli.findings import MACHINE, SCHEDULER, add_no_check
from launcher.cli.launch import add_tree_options, request_of
from launcher.cli.printing import print_styled
from launcher.drafting import Draft, drafts
from launcher.errors import UserError
from launcher.inspection import as_mistakes, inspect_draft
from launcher.plan import Plan
from launcher.preflight.findings import Severity
from launcher.preflight.registry import CHECKS, require_known
from launcher.preflight.summary import Summary, summarize
from launcher.schedulers.commands import Unreachable
from launcher.schedulers.registry import scheduler_for

_EPILOG = """\
examples:
  slipway check training=gpt3/175b training.trainer.num_nodes=2     why that cannot run, and what can
  slipway check training=gpt3/5b --no-check schedule.warmup
  slipway check training=gpt3/5b --json | jq -r '.findings[] | "\\(.severity) \\(.id)"'

docs/checks.md has the ids of all checks. `launch` asks the same ones, and stops at errors.

exit code:
  0  nothing that would stop a launch
  2  errors
"""

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.SKIPPED: "dim"}


@dataclass(frozen=True, slots=True)
class Told:
    """A finding as it is printed; `source` is where the values that it is about are from."""

    severity: Severity
    id: str
    message: str
    key: str | None = None
    source: str | None = None
    fix: str | None = None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "check",
        help="what is wrong with a launch, before it is one",
        description="Compose the configuration, check it, look at what this machine has of what the launch "
        "needs, and show the script to `sbatch --test-only` where there is a Slurm. Nothing is written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="such as training=gpt3/126m")
    parser.add_argument("--json", action="store_true", help="print an object")
    add_no_check(parser)
    add_tree_options(parser)
    parser.set_defaults(run=run, launch_number=None, tag=None, stage=None)


def run(args: argparse.Namespace) -> int:
    """Check and tell; return the exit code."""
    require_known(args.no_check, (MACHINE, SCHEDULER))
    made = drafts(request_of(args, args.overrides))
    told = [_look(one, args.no_check) for one in made]
    if args.json:
        content = [_content(*both) for both in zip(made, told, strict=True)]
        print(json.dumps(content[0] if len(content) == 1 else content, indent=2))
    else:
        for one, items in zip(made, told, strict=True):
            if len(made) > 1:
                print_styled([((f"stage {one.plan.job.stage}", "bold"),)])
            _print(one, items)
    return 2 if any(item.severity is Severity.ERROR for items in told for item in items) else 0


def _look(made: Draft, skipped: Sequence[str]) -> list[Told]:
    """All that there is to tell of a draft, the worst first."""
    told = [*_found(made, skipped)]
    for name, look in ((MACHINE, _machine), (SCHEDULER, _scheduler)):
        if name not in skipped:
            told += look(made)
    return sorted(told, key=lambda item: list(Severity).index(item.severity))


def _found(made: Draft, skipped: Sequence[str]) -> Iterator[Told]:
    findings = inspect_draft(made, skipped)
    mistakes = as_mistakes(made, findings) if findings else []
    for finding, mistake in zip(findings, mistakes, strict=True):
        yield Told(finding.severity, finding.id, finding.message, finding.key, mistake.source, finding.fix)
    for name in skipped:
        yield Told(Severity.SKIPPED, name, f"--no-check={name}")


def _machine(made: Draft) -> Iterator[Told]:
    """What a launch would look at on this machine."""
    try:
        for warning in readiness.check(made):
            yield Told(Severity.WARNING, MACHINE, warning)
    except UserError as error:
        for mistake in error.mistakes:
            yield Told(Severity.ERROR, MACHINE, mistake.message, mistake.key, mistake.source, mistake.hint)


def _scheduler(made: Draft) -> Iterator[Told]:
    """What `sbatch --test-only` says of the script, where it can be asked."""
    plan = made.plan
    if plan.scheduler != "slurm":
        told = f"the script was not shown to Slurm: cluster.scheduler={plan.scheduler}"
        yield Told(Severity.SKIPPED, SCHEDULER, told)
        return
    try:
        waits = scheduler_for(plan.scheduler, plan.slurm_conf).validate(made.rendered.script)
    except Unreachable as error:
        told = f"the script was not shown to Slurm: {error.message}"
        yield Told(Severity.SKIPPED, SCHEDULER, told)
    except UserError as error:
        yield Told(Severity.ERROR, SCHEDULER, error.message, fix=error.hint)
    else:
        if waits is not None:
            yield Told(Severity.WARNING, SCHEDULER, waits)


def _content(made: Draft, told: Sequence[Told]) -> dict[str, Any]:
    least, most = _summaries(made.plan)
    return {
        "run": made.plan.paths.run_name,
        "choices": made.composition.choices,
        "layout": asdict(least) if least is not None else None,
        "layout_at_most": asdict(most) if most is not None else None,
        "errors": sum(item.severity is Severity.ERROR for item in told),
        "findings": [{**asdict(item), "severity": item.severity.value} for item in told],
    }


def _summaries(plan: Plan) -> tuple[Summary | None, Summary | None]:
    """The layout with the least nodes that the job may get, and with the most if these are others."""
    config, resources = plan.job.config or {}, plan.job.resources
    most = resources.max_nodes
    return summarize(config, resources.nodes), summarize(config, most) if most is not None else None


def _print(made: Draft, told: Sequence[Told]) -> None:
    lines: list[tuple[tuple[str, str], ...]] = []
    for summary, to in zip(_summaries(made.plan), ("", "up to "), strict=True):
        if summary is not None:
            lines.append(((f"{made.plan.paths.run_name}: ", "bold"), (f"{to}{summary}", "")))
    for item in told:
        lines.append(
            (
                (f"{item.severity.value}: ", _STYLES[item.severity]),
                (item.message, ""),
                (f" [{item.id}]", "dim"),
            )
        )
        below = [(item.source, "dim"), (item.fix, "green")]
        lines += [((f"  {line}", style),) for text, style in below if text for line in text.split("\n")]
    lines.append(((_verdict(told), "bold"),))
    print_styled(lines)


def _verdict(told: Sequence[Told]) -> str:
    counts = {severity: sum(item.severity is severity for item in told) for severity in Severity}
    parts = [
        f"{count} {severity.value}{'s' if count != 1 else ''}" for severity, count in counts.items() if count
    ]
    asked = {item.id for item in told}
    good = sum(check.id not in asked for check in CHECKS)
    return f"{good} of {len(CHECKS)} checks found nothing" + (f"; {', '.join(parts)}" if parts else "")
