"""`slipway check`: what is wrong with a launch, before it is one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.checks.facts import Facts
from launcher.checks.findings import Severity
from launcher.checks.gate import as_mistakes
from launcher.checks.gathering.gather import gather
from launcher.checks.gathering.host import check_host
from launcher.checks.registry import CHECKS
from launcher.checks.rules.memory import why_not_told
from launcher.checks.rules.resources import CHECK as GPUS
from launcher.checks.runner import has_all, is_asked, require_known, run_checks
from launcher.cli.check_views import Looked, Told, content, print_screen
from launcher.cli.findings import MACHINE, SCHEDULER, add_no_check
from launcher.cli.requests import add_tree_options, is_workspace, request_of
from launcher.drafting import Draft, drafts
from launcher.errors import UserError
from launcher.estimates.gpus import gpu_of
from launcher.estimates.overview import overview
from launcher.rendering.sbatch_flags import empty_script
from launcher.schedulers import scheduler_for
from launcher.slurm.commands import NO_SLURM, Unreachable, says_no_slurm
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
    require_known(args.no_check, (MACHINE, SCHEDULER))
    if args.plot is not None:
        from launcher.cli.memory_figure import require_suffix

        require_suffix(args.plot)
    made = drafts(request_of(args, args.overrides))
    for stage in made:
        _ = stage.rendered  # a mistake in a template is a mistake of the launch
    looked = (
        [_estimate(one, args.no_check) for one in _training(made)]
        if args.estimate
        else [_look(one, args.no_check) for one in made]
    )
    if args.json:
        told = [content(one) for one in looked]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=2))
    else:
        for one in looked:
            if len(looked) > 1:
                print_styled([((f"stage {one.plan.job.stage}", "bold"),)])
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


def _estimate(made: Draft, skipped: Sequence[str]) -> Looked:
    """Ask the checks that need to know of nothing but the plan."""
    # Who plans on a laptop has not chosen an image yet: the one that is there is the cluster's default.
    facts = replace(gather(made, look=False), image=None)
    asked = [check.id for check in CHECKS if has_all(check, facts)]
    blind = [check.id for check in CHECKS if check.id not in asked]
    told = [*_found(made, facts, skipped, blind)]
    counted, estimates = (
        gpu_of(made.plan.job.resources, facts.gpu_types),
        overview(made.plan, facts.gpu_types),
    )
    if counted.is_assumed and not counted.is_unclear and (estimates.memory or estimates.cost):
        message = f"cluster.gpu=null: the estimates count with {counted.gpu.name}"
        told.append(
            Told(Severity.WARNING, GPUS, message, "cluster.gpu", fix=f"cluster.gpu={counted.gpu.name}")
        )
    return Looked(made, estimates, asked, _worst_first(told))


def _worst_first(told: Sequence[Told]) -> list[Told]:
    return sorted(told, key=lambda item: list(Severity).index(item.severity))


def _look(made: Draft, skipped: Sequence[str]) -> Looked:
    facts = gather(made)
    told = [*_found(made, facts, skipped)]
    for name, look in ((MACHINE, _machine), (SCHEDULER, _scheduler)):
        if name not in skipped:
            told += look(made)
    asked = [check.id for check in CHECKS if is_asked(check, facts)]
    return Looked(made, overview(made.plan, facts.gpu_types), asked, _worst_first(told))


def _found(made: Draft, facts: Facts, skipped: Sequence[str], blind: Sequence[str] = ()) -> Iterator[Told]:
    """Ask the checks; nothing is told of those in `blind`."""
    findings = run_checks(made.plan, facts, [*skipped, *blind])
    mistakes = as_mistakes(made, findings) if findings else []
    for finding, mistake in zip(findings, mistakes, strict=True):
        source, fix, why = mistake.source, finding.fix, finding.why
        yield Told(finding.severity, finding.id, finding.message, finding.key, source, fix, why)
    for name in skipped:
        yield Told(Severity.SKIPPED, name, f"--no-check={name}")


def _machine(made: Draft) -> Iterator[Told]:
    """What a launch would look at on this machine."""
    try:
        for warning in check_host(made):
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
        # Of a workspace what it asks for is shown: salloc itself cannot be asked beforehand.
        script = empty_script(plan) if is_workspace([made]) else made.rendered.script
        waits = scheduler_for(plan.scheduler, plan.slurm_conf).validate(script)
    except Unreachable as error:
        # Where the commands looked for a configuration is long, and the checks of the cluster have said why.
        why = NO_SLURM if says_no_slurm(error.message) else error.message
        yield Told(Severity.SKIPPED, SCHEDULER, f"the script was not shown to Slurm: {why}", why=why)
    except UserError as error:
        yield Told(Severity.ERROR, SCHEDULER, error.message, fix=error.hint)
    else:
        if waits is not None:
            yield Told(Severity.WARNING, SCHEDULER, waits)


def _draw(path: Path, looked: Sequence[Looked]) -> bool:
    """Draw the memory of the stage that has one; say so if none has."""
    from launcher.cli.memory_figure import write_figure

    for one in looked:
        if one.overview.memory is not None:
            write_figure(path, one.plan.paths.run_name, one.overview.memory)
            print(f"plot: {path}", file=sys.stderr)
            return True
    why = next((told for one in looked if (told := why_not_told(one.plan)) is not None), None)
    told = f" ({why})" if why is not None else ""
    print(f"slipway: --plot {path}: not drawn: the memory cannot be told{told}", file=sys.stderr)
    return False
