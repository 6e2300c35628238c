"""`slipway suggest`: suggest layouts that fit a model on its GPUs, the fastest first."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from launcher.checks.facts import Facts
from launcher.checks.gate import gather, refuse
from launcher.checks.gathering.host import trainer_verdicts
from launcher.checks.layout_search import (
    GRADIENTS,
    LayoutSearch,
    Suggestion,
    find_best_with_half_gradients,
    find_own_with_half_gradients,
    overrides,
    search_least_nodes,
)
from launcher.checks.registry import CHECKS, run_checks
from launcher.checks.remedies import why_none
from launcher.checks.rules.keys import TRAINER
from launcher.checks.rules.model import has_gpus, why_not_estimated
from launcher.cli.options import Verbs, add_option
from launcher.cli.requests import add_examining_verb, read_request
from launcher.drafting import Draft, draft
from launcher.errors import UserError
from launcher.estimates.parallelism import NODES, Recompute, apply_changes
from launcher.estimates.speed import NOT_TIMED
from launcher.estimates.training import find_unsupported_feature
from launcher.estimates.values import Values, count, gib
from launcher.plan import Plan
from launcher.ui.tables import Line, print_lines, print_listing, print_styled
from launcher.ui.terminal import print_json

_HELP = """\
Try layouts for a training on its nodes, and print those that fit, with overrides to paste. Nothing is
written.

examples:
  slipway suggest training=gpt3/40b nodes=16
  slipway suggest training=gpt3/175b cluster=p5 --top 3
  slipway suggest training=llama/llama3_1_70b nodes=32 training.model.encoder_seq_length=32768 --json

The search varies tensor, pipeline, virtual and context size, micro batch and recomputation; the model, the
global batch and the nodes stay as they are. It prints layouts that pass the checks and fit into the GPUs'
memory less estimates.memory_margin. STEP is the estimated time of a step, relative to the shortest: it
compares layouts, and predicts no wall time. docs/suggest.md has the formulas.

exit code:
  0  a layout fits
  1  none fits
  2  a mistake in the arguments
"""

_SHORT = "nodes="
_COLUMNS = ("#", "TENSOR", "PIPELINE", "VIRTUAL", "CONTEXT", "DATA", "MICRO", "RECOMPUTE", "GIB", "STEP")
# The checks of the sizes that a layout divides.
_SIZES = ("type.", "model.heads")
# Our trainer may refuse a layout that the checks accept: it is asked about so many for each requested
# suggestion.
_SPARE = 2


def add_parser(verbs: Verbs) -> None:
    overrides = "such as training=gpt3/40b; nodes=16 means training.trainer.num_nodes=16"
    parser = add_examining_verb(verbs, "suggest", run, _HELP, overrides)
    add_option(parser, "--top N", "how many layouts (default: 5)", default=5)


def run(args: argparse.Namespace) -> int:
    if args.top < 1:
        raise UserError(f"--top {args.top}: a number of layouts, from 1 on")
    launch = draft(read_request(args, [_spell_out(word) for word in args.overrides]))
    if launch.plan.job.config is None:
        stage = launch.plan.job.stage
        raise UserError(f"stages=[{stage}]: it trains nothing, and has no layout", key="stages")
    (facts,) = gather([launch], trainer_verdict=None)
    # A model without its sizes has no layout.
    others = [check.id for check in CHECKS if not check.id.startswith(_SIZES)]
    refuse(launch, run_checks(launch.plan, facts, others))
    why = find_unsupported_feature(Values(launch.plan.job.config)) if has_gpus(launch.plan) else None
    if why is not None:
        raise UserError(f"{why}; layouts of unknown memory are not ranked")
    search = LayoutSearch(launch.plan, facts)
    suggestions = _filter_accepted(launch, search, args.top)
    suggestions = suggestions or list(islice(find_best_with_half_gradients(launch.plan, facts), args.top))
    more = None if suggestions else search_least_nodes(launch.plan, facts)
    if args.json:
        print_json(_content(launch, search, suggestions, more))
    else:
        _print(launch, search, suggestions, more)
    return 0 if suggestions else 1


def _spell_out(word: str) -> str:
    """Return an override, with this verb's short form `nodes=N` spelled out."""
    if not word.startswith(_SHORT):
        return word
    number = word.removeprefix(_SHORT)
    if not number.isdecimal() or int(number) < 1:
        raise UserError(f"{word}: expected a number of nodes", hint="such as nodes=16")
    return f"training.{NODES}={number}"


def _filter_accepted(launch: Draft, search: LayoutSearch, top: int) -> list[Suggestion]:
    """Return the best layouts; for engine=megatron those that our trainer accepts.

    Raise UserError if the trainer refuses all of them for the same reason as the user's own: no layout mends
    that.
    """
    plan = launch.plan
    if plan.job.engine != "megatron":
        return list(islice(search.best(), top))
    offered = list(islice(search.best(), _SPARE * top))
    smallest = search.smallest if not offered else None
    config = plan.job.config or {}
    candidates = (*offered, *([smallest] if smallest else []))
    configs = [apply_changes(config, candidate.changes) for candidate in candidates]
    tried = [replace(plan, job=replace(plan.job, config=changed)) for changed in configs]
    own, *verdicts = trainer_verdicts([plan, *tried])
    if own and verdicts and all(verdict == own for verdict in verdicts):
        others = [check.id for check in CHECKS if check.id != TRAINER]
        refuse(launch, run_checks(plan, Facts(trainer_verdict=own), others))
    # A complaint about the user's own layout that others share is not about layouts.
    pairs = zip(offered, verdicts, strict=False)
    return [suggestion for suggestion, verdict in pairs if not verdict or verdict == own][:top]


def _content(
    launch: Draft, search: LayoutSearch, suggestions: Sequence[Suggestion], more: Suggestion | None
) -> dict[str, Any]:
    config, fastest, own = launch.plan.job.config or {}, _pick_fastest(suggestions), search.own
    gpu, source, _ = search.counted
    return {
        "run": launch.plan.paths.run_name,
        "nodes": search.nodes,
        "gpu": gpu.name,
        "gpu_source": source,
        "gpu_memory_bytes": gpu.memory,
        "memory_limit_bytes": search.limit,
        "steps_not_timed": Values(config).reason(NOT_TIMED),
        "yours": _to_json(config, own, fastest) | {"fits": search.fits(own)} if own is not None else None,
        "suggestions": [_to_json(config, suggestion, fastest) for suggestion in suggestions],
        "on_other_nodes": _to_json(config, more, None) if more is not None else None,
    }


def _to_json(config: Mapping[str, Any], suggestion: Suggestion, fastest: float | None) -> dict[str, Any]:
    fullest, step = suggestion.fullest, _step(suggestion, fastest)
    return {
        "nodes": suggestion.nodes,
        **suggestion.layout._asdict(),
        "recompute": suggestion.layout.recompute._asdict(),
        "data": suggestion.data,
        "micro_batches": suggestion.micro_batches,
        "memory_bytes": fullest and fullest.total,
        "fullest_stage": fullest and fullest.stage,
        "relative_step_time": step and round(step, 4),
        "overrides": overrides(config, suggestion),
    }


def _pick_fastest(suggestions: Sequence[Suggestion]) -> float | None:
    return min((suggestion.seconds for suggestion in suggestions if suggestion.seconds), default=None)


def _step(suggestion: Suggestion, fastest: float | None) -> float | None:
    """Return the time of a step, that of the fastest layout being 1; None if it is not modelled."""
    return suggestion.seconds / fastest if suggestion.seconds and fastest else None


def _print(
    launch: Draft, search: LayoutSearch, suggestions: Sequence[Suggestion], more: Suggestion | None
) -> None:
    config, fastest = launch.plan.job.config or {}, _pick_fastest(suggestions)
    print_styled(_heading(launch.plan, search, fastest))
    if suggestions and GRADIENTS in suggestions[0].changes:
        message = "nothing fits with gradients in 32 bits; with gradients in bf16 these do"
        print_styled([((message, "yellow"),)])
    if suggestions:
        rows = [_row(number, suggestion, fastest) for number, suggestion in enumerate(suggestions, 1)]
        print_listing(_COLUMNS, rows, numbers=len(_COLUMNS) - 1)
        for number, suggestion in enumerate(suggestions, 1):
            pasted = " ".join(overrides(config, suggestion)) or "as it is"
            print_styled([((f"{number}  ", "bold"), (pasted, "green" if suggestion.changes else ""))])
        return
    print_lines(*why_none(search, more).split("\n"))


def _heading(plan: Plan, search: LayoutSearch, fastest: float | None) -> Iterator[Line]:
    """Yield lines about the counted GPU and the user's own layout."""
    (gpu, source, is_assumed), tasks = search.counted, plan.job.resources.tasks_per_node
    where = f"{count(search.nodes, 'node')} × {tasks}"
    own = search.own
    if own is not None and own.fullest is None:
        why = why_not_estimated(plan)
        message = f"{why}: " if why is not None else ""
        message = f" tasks; {message}their memory is unknown, and was not checked"
        yield (f"{plan.paths.run_name}: ", "bold"), (where, ""), (message, "yellow")
        return
    counted = f"{gpu.name} ({source})"
    yield (f"{plan.paths.run_name}: ", "bold"), (f"{where} ", ""), (counted, "yellow" if is_assumed else "")
    why = Values(plan.job.config or {}).reason(NOT_TIMED)
    if why is not None:
        yield ((f"{why}: the layouts that fit with the fewest changes come first", "yellow"),)
    if own is None or own.fullest is None:
        yield (("your layout breaks a rule: slipway check names it", ""),)
        return
    fits, total = search.fits(own), gib(own.fullest.total)
    relative = _step(own, fastest)
    step = f"; its step: {relative:.2f}" if relative else ""
    of = f"of the {gib(search.limit)} GiB that a layout may take of {gib(gpu.memory)}"
    verdict = ("fits", "green") if fits else ("does not fit", "bold red")
    yield ("your layout ", ""), verdict, (f": {total} GiB on stage {own.fullest.stage}, {of}{step}", "")
    halved = find_own_with_half_gradients(search) if not fits else None
    if halved is not None:
        (pasted,) = overrides(plan.job.config or {}, halved)
        yield ("your layout would fit with gradients in bf16: ", ""), (pasted, "green")


def _row(number: int, suggestion: Suggestion, fastest: float | None) -> list[str]:
    layout, fullest, step = suggestion.layout, suggestion.fullest, _step(suggestion, fastest)
    sizes = (number, layout.tensor, layout.pipeline, layout.virtual or "-", layout.context, suggestion.data)
    memory = gib(fullest.total) if fullest is not None else "?"
    relative = f"{step:.2f}" if step else "?"
    return [*map(str, sizes), str(layout.micro), _describe_recomputation(layout.recompute), memory, relative]


def _describe_recomputation(recompute: Recompute) -> str:
    if recompute.granularity == "full" and recompute.method == "block":
        return f"block {recompute.layers}" if recompute.layers else "-"
    return recompute.granularity or "-"
