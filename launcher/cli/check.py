"""`slipway check`: examine a launch before it is submitted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.checks.findings import Finding, Severity, warning
from launcher.checks.gate import CheckReport, check_drafts, convert_to_mistakes, show_to_scheduler
from launcher.checks.registry import CHECKS, require_known, sort_by_severity
from launcher.checks.rules.model import why_not_estimated
from launcher.checks.rules.resources import GPUS
from launcher.cli.estimate_views import (
    cost_lines,
    headline,
    plain_lines,
    print_table,
    require_suffix,
    write_figure,
)
from launcher.cli.options import Verbs, add_option, add_overrides, add_tree_options, add_verb
from launcher.cli.requests import add_no_check, read_request
from launcher.drafting import Draft, drafts
from launcher.errors import UserError
from launcher.estimates.cost import Overview, overview
from launcher.estimates.parallelism import gpu_of, is_encoder_decoder, read_parallel_config
from launcher.estimates.values import Values, count
from launcher.plan import Plan
from launcher.ui.tables import Line, print_styled
from launcher.ui.terminal import print_json, print_message
from slipway.arithmetic.layout import fits

_HELP = """\
Compose the configuration, check it, estimate its memory, time and disk space, check that this machine and the
cluster meet the needs of the launch, and validate the script with `sbatch --test-only` if Slurm is available.
Nothing is written.

examples:
  slipway check training=gpt3/175b training.trainer.num_nodes=2     why that cannot run, and what can
  slipway check training=gpt3/5b --estimate cluster.gpu=b200        on a laptop: no files, disks, clusters
  slipway check training=gpt3/5b --no-check schedule.warmup
  slipway check training=gpt3/5b --plot memory.png                  the memory of each stage as a picture
  slipway check training=gpt3/5b --json | jq -r '.findings[] | "\\(.severity) \\(.id)"'

docs/checks.md has the ids of all checks. `launch` runs the same checks, and stops at errors.

exit code:
  0  nothing that would stop a launch
  2  errors, or nothing to draw for --plot
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "check", run, text=_HELP)
    add_overrides(parser, "such as training=gpt3/126m")
    add_option(parser, "--json", "print an object")
    text = "only what arithmetic says: look at no file, disk, interpreter and cluster;"
    add_option(parser, "--estimate", f"{text} cluster.gpu names the GPU")
    add_option(parser, "--plot FILE", "draw the memory of each stage: a .png, .svg or .pdf")
    add_no_check(parser)
    add_tree_options(parser)


def run(args: argparse.Namespace) -> int:
    require_known(args.no_check)
    if args.plot is not None:
        require_suffix(args.plot)
    drafted = drafts(read_request(args, args.overrides))
    if args.estimate:
        reports = _estimates(drafted, args.no_check)
    else:
        checked = check_drafts(drafted, args.no_check)
        reports = [show_to_scheduler(report, must_answer=False) for report in checked]
    stages = [_report(report, args.no_check, only_plan=args.estimate) for report in reports]
    if args.json:
        contents = [content(stage) for stage in stages]
        print_json(contents[0] if len(contents) == 1 else contents)
    else:
        for stage in stages:
            if len(stages) > 1:
                print_styled([((f"stage {stage.draft.stage_name}", "bold"),)])
            print_screen(stage)
    drawn = args.plot is None or _draw(args.plot, stages)
    return 2 if not drawn or any(stage.errors for stage in stages) else 0


def _estimates(drafted: Sequence[Draft], skipped: Sequence[str]) -> list[CheckReport]:
    """Apply the checks that need to know of nothing but the plan to the drafts that train something."""
    training = [draft for draft in drafted if draft.plan.job.config is not None]
    if not training:
        stages = ",".join(draft.plan.job.stage for draft in drafted)
        message = f"--estimate: stages=[{stages}] trains nothing"
        raise UserError(message, key="stages", hint="stages=[training]")
    # Someone planning on a laptop has not chosen an image yet; `container` is the cluster's default.
    reports = check_drafts(training, skipped, look=False, image=None, unexpanded=None)
    known = {check.id for report in reports for check in CHECKS if check.has_facts(report.facts)}
    known.update(name for report in reports for name in report.of_site)
    return [
        replace(report, findings=tuple(finding for finding in report.findings if finding.id in known))
        for report in reports
    ]


def _report(report: CheckReport, skipped: Sequence[str], *, only_plan: bool) -> StageReport:
    plan, facts = report.draft.plan, report.facts
    applied = [check.id for check in CHECKS if (check.has_facts if only_plan else check.is_applicable)(facts)]
    applied += report.of_site
    mistakes = convert_to_mistakes(report.draft, report.findings)
    findings = [
        replace(finding, source=mistake.source)
        for finding, mistake in zip(report.findings, mistakes, strict=True)
    ]
    findings += [Finding(Severity.SKIPPED, None, f"--no-check={name}", id=name) for name in skipped]
    counted, estimates = gpu_of(plan.job.resources, facts.gpu_types), overview(plan, facts.gpu_types)
    if only_plan and counted.is_assumed and not counted.is_unclear and (estimates.memory or estimates.cost):
        gpu, key = counted.gpu.name, "cluster.gpu"
        assumed = warning(key, None, f"the estimates assume {gpu}", f"{key}={gpu}")
        findings.append(replace(assumed, id=GPUS))
    return StageReport(report.draft, estimates, applied, sort_by_severity(findings))


def _draw(path: Path, stages: Sequence[StageReport]) -> bool:
    """Draw the memory of the stage that has one; say so if none has."""
    for stage in stages:
        if stage.overview.memory is not None:
            write_figure(path, stage.plan.paths.run_name, stage.overview.memory)
            print(f"plot: {path}", file=sys.stderr)
            return True
    why = next((f" ({why})" for stage in stages if (why := why_not_estimated(stage.plan)) is not None), "")
    print_message(f"--plot {path}: not drawn: the memory is not known{why}")
    return False


# --- views of the findings

_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.SKIPPED: "dim",
    Severity.OK: "green",
}


def layout_numbers(config: Mapping[str, Any], nodes: int) -> dict[str, Any] | None:
    """Return the sizes of a layout and of a step; None if it is invalid, or does not fit its nodes.

    `tokens` are those that the model reads in a step, global batch × sequence length (a T5's encoder alone);
    None where the length is not known.
    """
    values = Values(config)
    sizes = read_parallel_config(values)
    if sizes is None or not fits(sizes, nodes):
        return None
    length = values.whole("model.seq_length" if is_encoder_decoder(values) else "model.encoder_seq_length")
    return {
        "nodes": nodes,
        "devices": sizes.devices,
        "world": nodes * sizes.devices,
        **{name: getattr(sizes, name) for name in ("tensor", "pipeline", "virtual", "context")},
        "data": sizes.data(nodes),
        "micro_batch": sizes.micro,
        "micro_batches": sizes.micro_batches(nodes),
        "global_batch": sizes.batch,
        "tokens": None if length is None else sizes.batch * length,
    }


def _layout_text(layout: Mapping[str, Any]) -> str:
    virtual = f" (virtual {layout['virtual']})" if layout["virtual"] else ""
    tokens = f", {layout['tokens']:,} tokens a step" if layout["tokens"] else ""
    return (
        f"{count(layout['nodes'], 'node')} × {layout['devices']} = {count(layout['world'], 'task')}:"
        f" tensor {layout['tensor']} × pipeline {layout['pipeline']}{virtual} × context {layout['context']}"
        f" × data {layout['data']}; global batch {layout['global_batch']}"
        f" = micro batch {layout['micro_batch']} × data {layout['data']} × {layout['micro_batches']}{tokens}"
    )


@dataclass(frozen=True, slots=True)
class StageReport:
    """A draft, its estimates, the ids of the checks that applied, and their findings, the worst first."""

    draft: Draft
    overview: Overview
    applied: Sequence[str]
    findings: Sequence[Finding]

    @property
    def plan(self) -> Plan:
        return self.draft.plan

    @property
    def errors(self) -> int:
        return sum(item.severity is Severity.ERROR for item in self.findings)


_PRINTED = ("severity", "id", "message", "key", "source", "fix", "why")


def content(stage: StageReport) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    estimates = stage.overview
    least, most = _layouts(stage.plan)
    return {
        "run": stage.plan.paths.run_name,
        "choices": stage.draft.composition.choices,
        "layout": least,
        "layout_at_most": most,
        "memory": estimates.memory and estimates.memory.to_json(),
        "amount": estimates.amount and asdict(estimates.amount),
        "cost": estimates.cost and asdict(estimates.cost),
        "errors": stage.errors,
        "findings": [{name: getattr(finding, name) for name in _PRINTED} for finding in stage.findings],
    }


def print_screen(stage: StageReport) -> None:
    """Print the layout, the estimates, the findings, and the verdict last: nearest to the prompt."""
    plan, memory = stage.plan, stage.overview.memory
    for layout, to in zip(_layouts(plan), ("", "up to "), strict=True):
        if layout is not None:
            _print_named(plan.paths.run_name, f"{to}{_layout_text(layout)}")
    if memory is not None:
        _print_named("memory", headline(memory))
        if not sys.stdout.isatty() or not print_table(memory):
            print_styled([((f"  {line}", ""),) for line in plain_lines(memory)], wrap=True)
    amount = stage.overview.cost or stage.overview.amount
    for name, text in cost_lines(plan, amount) if amount is not None else ():
        _print_named(name, text)
    print_styled(_finding_lines(stage.findings))
    print_styled([((_verdict(stage), "bold"),)], wrap=True)


def _print_named(name: str, text: str) -> None:
    print_styled([((f"{name}: ", "bold"), (text, ""))], wrap=True)


def _layouts(plan: Plan) -> Iterator[dict[str, Any] | None]:
    """Yield the layout with the least nodes of the job, and that with the most if they differ."""
    resources = plan.job.resources
    for nodes in (resources.nodes, resources.max_nodes):
        yield None if nodes is None else layout_numbers(plan.job.config or {}, nodes)


def _finding_lines(findings: Sequence[Finding]) -> Iterator[Line]:
    for item in _merge_skips(findings):
        severity = (f"{item.severity}: ", _STYLES[item.severity])
        yield severity, (item.message, ""), (f" [{item.id}]", "dim")
        for text, style in ((item.source, "dim"), (item.fix, "green")):
            yield from (((f"  {line}", style),) for line in (text.split("\n") if text else ()))


def _merge_skips(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Merge checks that were skipped for the same reason, such as a cluster that cannot be asked."""
    for item in findings:
        same = [other for other in findings if item.why is not None and other.why == item.why]
        if len(same) < 2:
            yield item
        elif item is same[0]:
            ids = ", ".join(other.id for other in same)
            yield replace(item, id=ids, message=f"not checked: {item.why}")


def _verdict(stage: StageReport) -> str:
    parts = []
    for severity in (Severity.ERROR, Severity.WARNING, Severity.SKIPPED):
        number = sum(item.severity is severity for item in stage.findings)
        if number:
            word = severity.value
            parts.append(f"{number} {word}" if severity is Severity.SKIPPED else count(number, word))
    passed = len({*stage.applied} - {item.id for item in stage.findings if item.severity is not Severity.OK})
    return "; ".join(filter(None, [f"{passed} of {len(stage.applied)} checks passed", ", ".join(parts)]))
