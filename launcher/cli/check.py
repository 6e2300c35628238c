"""`slipway check`: what is wrong with a launch, before it is one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from arithmetic.layout import fits
from launcher.checks.findings import Severity
from launcher.checks.gate import CheckReport, as_mistakes, check_drafts, show_to_scheduler
from launcher.checks.registry import CHECKS, require_known
from launcher.checks.rules.model import why_not_told
from launcher.checks.rules.resources import GPUS
from launcher.cli.estimate_views import (
    amount_lines,
    cost_lines,
    headline,
    plain_lines,
    print_table,
    require_suffix,
    write_figure,
)
from launcher.cli.options import Verbs, add_option, add_overrides, add_tree_options, add_verb
from launcher.cli.requests import add_no_check, request_of
from launcher.drafting import Draft, drafts
from launcher.errors import UserError
from launcher.estimates.cost import Overview, overview
from launcher.estimates.parallelism import gpu_of, is_encoder_decoder, read_parallel_config
from launcher.estimates.values import Values, count
from launcher.plan import Plan
from launcher.ui.tables import Line, print_styled
from launcher.ui.terminal import print_json, tell

_HELP = """\
Compose the configuration, check it, estimate the memory, the time and the space that it takes, look at what
this machine and the cluster have of what the launch needs, and show the script to `sbatch --test-only` where
there is a Slurm. Nothing is written.

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


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "check", run, "what is wrong with a launch, before it is one", _HELP)
    add_overrides(parser, "such as training=gpt3/126m")
    add_option(parser, "--json", "print an object")
    text = "only what arithmetic says: look at no file, disk, interpreter and cluster;"
    add_option(parser, "--estimate", f"{text} cluster.gpu names the GPU")
    add_option(parser, "--plot FILE", "draw the memory of each stage: a .png, .svg or .pdf")
    add_no_check(parser)
    add_tree_options(parser)


def run(args: argparse.Namespace) -> int:
    """Check and tell; return the exit code."""
    require_known(args.no_check)
    if args.plot is not None:
        require_suffix(args.plot)
    drafted = drafts(request_of(args, args.overrides))
    if args.estimate:
        reports = _estimates(drafted, args.no_check)
    else:
        checked = check_drafts(drafted, args.no_check)
        reports = [show_to_scheduler(report, must_answer=False) for report in checked]
    looked = [_looked(report, args.no_check, only_plan=args.estimate) for report in reports]
    if args.json:
        contents = [content(one) for one in looked]
        print_json(contents[0] if len(contents) == 1 else contents)
    else:
        for one in looked:
            if len(looked) > 1:
                print_styled([((f"stage {one.draft.stage_name}", "bold"),)])
            print_screen(one)
    drawn = args.plot is None or _draw(args.plot, looked)
    return 2 if not drawn or any(one.errors for one in looked) else 0


def _estimates(drafted: Sequence[Draft], skipped: Sequence[str]) -> list[CheckReport]:
    """Apply the checks that need to know of nothing but the plan to the drafts that train something."""
    training = [draft for draft in drafted if draft.plan.job.config is not None]
    if not training:
        stages = ",".join(draft.plan.job.stage for draft in drafted)
        message = f"--estimate: stages=[{stages}] trains nothing"
        raise UserError(message, key="stages", hint="stages=[training]")
    # Who plans on a laptop has not chosen an image yet: the one that is there is the cluster's default.
    reports = check_drafts(training, skipped, look=False, image=None)
    known = {check.id for report in reports for check in CHECKS if check.has_facts(report.facts)}
    return [
        replace(report, findings=tuple(finding for finding in report.findings if finding.id in known))
        for report in reports
    ]


def _looked(report: CheckReport, skipped: Sequence[str], *, only_plan: bool) -> Looked:
    plan, facts = report.draft.plan, report.facts
    applied = [check.id for check in CHECKS if (check.has_facts if only_plan else check.is_applicable)(facts)]
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
    for one in looked:
        if one.overview.memory is not None:
            write_figure(path, one.plan.paths.run_name, one.overview.memory)
            print(f"plot: {path}", file=sys.stderr)
            return True
    why = next((text for one in looked if (text := why_not_told(one.plan)) is not None), None)
    text = f" ({why})" if why is not None else ""
    tell(f"--plot {path}: not drawn: the memory cannot be told{text}")
    return False


# --- views of the findings

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.SKIPPED: "dim"}


@dataclass(frozen=True, slots=True)
class Summary:
    """The sizes of a layout that fits its node count, and what a step takes in.

    `tokens` are those that the model reads in a step, global batch × sequence length (a T5's encoder alone);
    ``None`` where the length is not known.
    """

    nodes: int
    devices: int
    world: int
    tensor: int
    pipeline: int
    virtual: int | None
    context: int
    data: int
    micro_batch: int
    micro_batches: int
    global_batch: int
    tokens: int | None

    def __str__(self) -> str:
        virtual = f" (virtual {self.virtual})" if self.virtual else ""
        tokens = f", {self.tokens:,} tokens a step" if self.tokens else ""
        return (
            f"{count(self.nodes, 'node')} × {self.devices} = {count(self.world, 'task')}:"
            f" tensor {self.tensor} × pipeline {self.pipeline}{virtual} × context {self.context}"
            f" × data {self.data}; global batch {self.global_batch} = micro batch {self.micro_batch}"
            f" × data {self.data} × {self.micro_batches}{tokens}"
        )


def summarize(config: Mapping[str, Any], nodes: int) -> Summary | None:
    """Return the numbers of a job's layout; None if it does not fit its nodes, or has none."""
    values = Values(config)
    shape = read_parallel_config(values)
    if shape is None or not fits(shape, nodes):
        return None
    length = values.whole("model.seq_length" if is_encoder_decoder(values) else "model.encoder_seq_length")
    return Summary(
        nodes=nodes,
        devices=shape.devices,
        world=nodes * shape.devices,
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        virtual=shape.virtual,
        context=shape.context,
        data=shape.data(nodes),
        micro_batch=shape.micro,
        micro_batches=shape.micro_batches(nodes),
        global_batch=shape.batch,
        tokens=shape.batch * length if length is not None else None,
    )


@dataclass(frozen=True, slots=True)
class Told:
    """A finding as it is printed; `source` is where its values are from, `why` the reason of a skip."""

    severity: Severity
    id: str
    message: str
    key: str | None = None
    source: str | None = None
    fix: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """A draft, what it takes, the ids of the checks that looked at it, and their report, the worst first."""

    draft: Draft
    overview: Overview
    asked: Sequence[str]
    report: Sequence[Told]

    @property
    def plan(self) -> Plan:
        return self.draft.plan

    @property
    def errors(self) -> int:
        return sum(item.severity is Severity.ERROR for item in self.report)


def content(looked: Looked) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    views = looked.overview
    least, most = _summaries(looked.plan)
    return {
        "run": looked.plan.paths.run_name,
        "choices": looked.draft.composition.choices,
        "layout": least and asdict(least),
        "layout_at_most": most and asdict(most),
        "memory": views.memory and views.memory.to_json(),
        "amount": views.amount and asdict(views.amount),
        "cost": views.cost and asdict(views.cost),
        "errors": looked.errors,
        "findings": [{**asdict(item), "severity": item.severity.value} for item in looked.report],
    }


def print_screen(looked: Looked) -> None:
    """Print the layout, the estimates, the findings, and the verdict last: nearest to the prompt."""
    plan, memory = looked.plan, looked.overview.memory
    for summary, to in zip(_summaries(plan), ("", "up to "), strict=True):
        if summary is not None:
            _print_named(plan.paths.run_name, f"{to}{summary}")
    if memory is not None:
        _print_named("memory", headline(memory))
        if not sys.stdout.isatty() or not print_table(memory):
            print_styled([((f"  {line}", ""),) for line in plain_lines(memory)], wrap=True)
    amount, cost = looked.overview.amount, looked.overview.cost
    lines = cost_lines(plan, cost) if cost is not None else amount_lines(amount) if amount else ()
    for name, text in lines:
        _print_named(name, text)
    print_styled(_finding_lines(looked.report))
    print_styled([((_verdict(looked), "bold"),)], wrap=True)


def _print_named(name: str, text: str) -> None:
    print_styled([((f"{name}: ", "bold"), (text, ""))], wrap=True)


def _summaries(plan: Plan) -> tuple[Summary | None, Summary | None]:
    """Return the layout with the least nodes of the job, and that with the most if they differ."""
    config, resources = plan.job.config or {}, plan.job.resources
    most = resources.max_nodes
    return summarize(config, resources.nodes), summarize(config, most) if most is not None else None


def _finding_lines(report: Sequence[Told]) -> Iterator[Line]:
    for item in together(report):
        severity = (f"{item.severity.value}: ", _STYLES[item.severity])
        yield severity, (item.message, ""), (f" [{item.id}]", "dim")
        for text, style in ((item.source, "dim"), (item.fix, "green")):
            yield from (((f"  {line}", style),) for line in (text.split("\n") if text else ()))


def together(report: Sequence[Told]) -> list[Told]:
    """Merge checks that were skipped for the same reason, such as a cluster that cannot be asked."""
    found: list[Told] = []
    for item in report:
        same = [other for other in report if item.why is not None and other.why == item.why]
        if len(same) < 2:
            found.append(item)
        elif item is same[0]:
            ids = ", ".join(other.id for other in same)
            found.append(replace(item, id=ids, message=f"not checked: {item.why}"))
    return found


def _verdict(looked: Looked) -> str:
    report = looked.report
    parts = []
    for severity in Severity:
        number = sum(item.severity is severity for item in report)
        if number:
            word = severity.value
            parts.append(f"{number} {word}" if severity is Severity.SKIPPED else count(number, word))
    good = len({*looked.asked} - {item.id for item in report})
    return "; ".join(filter(None, [f"{good} of {len(looked.asked)} checks passed", ", ".join(parts)]))
