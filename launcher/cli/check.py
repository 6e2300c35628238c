"""`slipway check`: what is wrong with a launch, before it is one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.checks.findings import Severity
from launcher.checks.gate import CheckReport, as_mistakes, check_drafts, show_to_scheduler
from launcher.checks.registry import CHECKS
from launcher.checks.rules.memory import why_not_told
from launcher.checks.rules.resources import CHECK as GPUS
from launcher.checks.runner import has_all, is_applicable, require_known
from launcher.cli.check_views import Looked, Told, content, print_screen
from launcher.cli.requests import add_no_check, add_tree_options, request_of
from launcher.drafting import Draft, drafts
from launcher.errors import UserError
from launcher.estimates.gpus import gpu_of
from launcher.estimates.overview import overview
from launcher.ui.tables import print_styled

_EPILOG = """\
examples:
  slipway check training=gpt3/175b training.trainer.num_nodes=2     why that cannot run, and what can
  slipway check training=gpt3/5b --estimate cluster.gpu=b200        on a laptop: no files, disks, clusters
  slipway check training=gpt3/5b --no-check schedule.warmup
  slipway check training=gpt3/5b --plot memory.png                  the memory of each stage as a picture
  slipway check training=gpt3/5b --json | jq -r '.findings[] | "\\(.severity) \\(.id)"'

docs/checks.md has the ids of all checks. `launch` asks the same ones, and stops at errors.

exit code:
  0  nothing that would stop a launch
  2  errors, or nothing to draw for --plot
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "check",
        help="what is wrong with a launch, before it is one",
        description="Compose the configuration, check it, estimate the memory, the time and the space that "
        "it takes, look at what this machine and the cluster have of what the launch needs, and show the "
        "script to `sbatch --test-only` where there is a Slurm. Nothing is written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="such as training=gpt3/126m")
    parser.add_argument("--json", action="store_true", help="print an object")
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="only what arithmetic says: look at no file, disk, interpreter and cluster; cluster.gpu names "
        "the GPU",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the memory of each stage: a .png, .svg or .pdf"
    )
    add_no_check(parser)
    add_tree_options(parser)
    parser.set_defaults(run=run, launch_number=None, tag=None, stage=None, launch_dir=None)


def run(args: argparse.Namespace) -> int:
    """Check and tell; return the exit code."""
    require_known(args.no_check)
    if args.plot is not None:
        from launcher.cli.estimate_views import require_suffix

        require_suffix(args.plot)
    drafted = drafts(request_of(args, args.overrides))
    reports = (
        _estimates(_training(drafted), args.no_check)
        if args.estimate
        else [show_to_scheduler(report, must_answer=False) for report in check_drafts(drafted, args.no_check)]
    )
    looked = [_looked(report, args.no_check, only_plan=args.estimate) for report in reports]
    if args.json:
        text = [content(one) for one in looked]
        print(json.dumps(text[0] if len(text) == 1 else text, indent=2))
    else:
        for one in looked:
            if len(looked) > 1:
                print_styled([((f"stage {one.draft.stage_name}", "bold"),)])
            print_screen(one)
    drawn = args.plot is None or _draw(args.plot, looked)
    return 2 if not drawn or any(one.errors for one in looked) else 0


def _training(made: Sequence[Draft]) -> list[Draft]:
    """Return the drafts that there is something to estimate of."""
    training = [one for one in made if one.plan.job.config is not None]
    if not training:
        stages = ",".join(one.plan.job.stage for one in made)
        raise UserError(
            f"--estimate: stages=[{stages}] trains nothing", key="stages", hint="stages=[training]"
        )
    return training


def _estimates(drafted: Sequence[Draft], skipped: Sequence[str]) -> list[CheckReport]:
    """Apply the checks that need to know of nothing but the plan."""
    # Who plans on a laptop has not chosen an image yet: the one that is there is the cluster's default.
    reports = check_drafts(drafted, skipped, look=False, image=None)
    known = {check.id for report in reports for check in CHECKS if has_all(check, report.facts)}
    return [
        replace(report, findings=tuple(finding for finding in report.findings if finding.id in known))
        for report in reports
    ]


def _looked(report: CheckReport, skipped: Sequence[str], *, only_plan: bool) -> Looked:
    plan, facts = report.draft.plan, report.facts
    applied = [check.id for check in CHECKS if (has_all if only_plan else is_applicable)(check, facts)]
    mistakes = as_mistakes(report.draft, report.findings)
    text = [
        Told(one.severity, one.id, one.message, one.key, mistake.source, one.fix, one.why)
        for one, mistake in zip(report.findings, mistakes, strict=True)
    ]
    text += [Told(Severity.SKIPPED, name, f"--no-check={name}") for name in skipped]
    counted, estimates = gpu_of(plan.job.resources, facts.gpu_types), overview(plan, facts.gpu_types)
    if only_plan and counted.is_assumed and not counted.is_unclear and (estimates.memory or estimates.cost):
        message, fix = f"cluster.gpu=null: the estimates count with {counted.gpu.name}", counted.gpu.name
        text.append(Told(Severity.WARNING, GPUS, message, "cluster.gpu", fix=f"cluster.gpu={fix}"))
    order = list(Severity)
    return Looked(report.draft, estimates, applied, sorted(text, key=lambda one: order.index(one.severity)))


def _draw(path: Path, looked: Sequence[Looked]) -> bool:
    """Draw the memory of the stage that has one; say so if none has."""
    from launcher.cli.estimate_views import write_figure

    for one in looked:
        if one.overview.memory is not None:
            write_figure(path, one.plan.paths.run_name, one.overview.memory)
            print(f"plot: {path}", file=sys.stderr)
            return True
    why = next((text for one in looked if (text := why_not_told(one.plan)) is not None), None)
    text = f" ({why})" if why is not None else ""
    print(f"slipway: --plot {path}: not drawn: the memory cannot be told{text}", file=sys.stderr)
    return False
