"""`slipway suggest`: layouts that fit a model on its GPUs, the fastest first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from launcher.checks.facts import Facts
from launcher.checks.gate import refuse
from launcher.checks.gathering.gather import gather
from launcher.checks.gathering.trainer import trainer_verdicts
from launcher.checks.registry import CHECKS
from launcher.checks.rules.keys import trainer_problems
from launcher.checks.rules.memory import has_gpus, why_not_told
from launcher.checks.runner import run_checks
from launcher.checks.suggesting import (
    GRADIENTS,
    Suggester,
    Suggestion,
    best_with_half_gradients,
    gib,
    on_least_nodes,
    overrides,
    own_with_half_gradients,
    why_none,
)
from launcher.cli.requests import add_tree_options, request_of
from launcher.drafting import Draft, draft
from launcher.errors import UserError
from launcher.estimates.layout import Recompute, with_changes
from launcher.estimates.parallelism import NODES
from launcher.estimates.speed import untimed
from launcher.estimates.training import uncounted
from launcher.estimates.values import Values, count
from launcher.plan import Plan
from launcher.ui.tables import print_listing, print_styled

_EPILOG = """\
examples:
  slipway suggest training=gpt3/40b nodes=16
  slipway suggest training=gpt3/175b cluster=p5 --top 3
  slipway suggest training=llama/llama3_1_70b nodes=32 training.model.encoder_seq_length=32768 --json

Tried are tensor, pipeline, virtual and context size, micro batch and recomputation; the model, the global
batch and the nodes stay as they are. A layout is told if it passes the checks and fits into the GPUs' memory
less estimates.memory_margin. STEP is the estimated time of a step, the shortest being 1: for comparing
layouts, not for a calendar. docs/suggest.md tells how it is estimated.

exit code:
  0  there is a layout that fits
  1  there is none
  2  a mistake in what was asked for
"""

_SHORT = "nodes="
_COLUMNS = (
    "#",
    "TENSOR",
    "PIPELINE",
    "VIRTUAL",
    "CONTEXT",
    "DATA",
    "MICRO",
    "RECOMPUTE",
    "GIB",
    "STEP",
)
# Parts of a line, each a text and its style.
Line = tuple[tuple[str, str], ...]
# The checks of the sizes that a layout divides.
_SIZES = ("type.", "model.heads")
# Our trainer may refuse what the checks do not know of: so many are shown to it, for each one that is wanted.
_SPARE = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "suggest",
        help="layouts that fit a model on its GPUs, the fastest first",
        description="Try layouts for a training on its nodes, and print those that fit, with overrides to "
        "paste. Nothing is written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    told = "such as training=gpt3/40b; nodes=16 stands for training.trainer.num_nodes=16"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=told)
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many layouts (default: 5)")
    parser.add_argument("--json", action="store_true", help="print an object")
    add_tree_options(parser)
    parser.set_defaults(run=run, launch_number=None, tag=None, stage=None, launch_dir=None)


def run(args: argparse.Namespace) -> int:
    """Look for layouts and tell; return the exit code."""
    if args.top < 1:
        raise UserError(f"--top {args.top}: a number of layouts, from 1 on")
    made = draft(request_of(args, [_spelled_out(word) for word in args.overrides]))
    if made.plan.job.config is None:
        stage = made.plan.job.stage
        raise UserError(f"stages=[{stage}]: it trains nothing, and has no layout", key="stages")
    facts = gather(made, verdict_of=lambda plan: None)
    # Without its sizes a model has no layout.
    others = [check.id for check in CHECKS if not check.id.startswith(_SIZES)]
    refuse(made, run_checks(made.plan, facts, others))
    _refuse_what_cannot_be_weighed(made.plan)
    suggester = Suggester(made.plan, facts)
    found = _taken(made, suggester, args.top)
    found = found or list(islice(best_with_half_gradients(made.plan, facts), args.top))
    more = None if found else on_least_nodes(made.plan, facts)
    if args.json:
        print(json.dumps(_content(made, suggester, found, more), indent=2))
    else:
        _print(made, suggester, found, more)
    return 0 if found else 1


def _refuse_what_cannot_be_weighed(plan: Plan) -> None:
    """Raise a `UserError` for a key that is not counted: layouts are not compared without it."""
    why = uncounted(Values(plan.job.config or {})) if has_gpus(plan) else None
    if why is not None:
        raise UserError(f"{why}; layouts that cannot be weighed are not ranked")


def _spelled_out(word: str) -> str:
    """An override, with the one short form that this verb knows."""
    if not word.startswith(_SHORT):
        return word
    number = word.removeprefix(_SHORT)
    if not number.isdecimal() or int(number) < 1:
        raise UserError(f"{word}: expected a number of nodes", hint="such as nodes=16")
    return f"training.{NODES}={number}"


def _taken(made: Draft, suggester: Suggester, top: int) -> list[Suggestion]:
    """The best ones; where our trainer is going to train, those that it takes.

    Raises
    ------
    UserError
        If it says the same of all of them as of the user's own: no layout mends that.
    """
    plan = made.plan
    if plan.job.engine != "megatron":
        return list(islice(suggester.best(), top))
    offered = list(islice(suggester.best(), _SPARE * top))
    smallest = suggester.smallest if not offered else None
    config = plan.job.config or {}
    changed = [with_changes(config, one.changes) for one in (*offered, *([smallest] if smallest else []))]
    tried = [replace(plan, job=replace(plan.job, config=each)) for each in changed]
    own, *verdicts = trainer_verdicts([plan, *tried])
    if own and verdicts and all(each == own for each in verdicts):
        refuse(made, list(trainer_problems(Facts(trainer_verdict=own))))
    # What it says of the user's own is not about layouts, if it says it of others too.
    taken = [one for one, told in zip(offered, verdicts, strict=False) if not told or told == own]
    return taken[:top]


def _content(
    made: Draft, suggester: Suggester, found: Sequence[Suggestion], more: Suggestion | None
) -> dict[str, Any]:
    config, fastest, own = made.plan.job.config or {}, _fastest(found), suggester.own
    gpu, source, _ = suggester.counted
    return {
        "run": made.plan.paths.run_name,
        "nodes": suggester.nodes,
        "gpu": gpu.name,
        "gpu_source": source,
        "gpu_memory_bytes": gpu.memory,
        "memory_limit_bytes": suggester.limit,
        "steps_not_timed": untimed(Values(config)),
        "yours": _one(config, own, fastest) | {"fits": suggester.fits(own)} if own is not None else None,
        "suggestions": [_one(config, one, fastest) for one in found],
        "on_other_nodes": _one(config, more, None) if more is not None else None,
    }


def _one(config: Mapping[str, Any], one: Suggestion, fastest: float | None) -> dict[str, Any]:
    return {
        "nodes": one.nodes,
        **one.layout._asdict(),
        "recompute": one.layout.recompute._asdict(),
        "data": one.data,
        "micro_batches": one.micro_batches,
        "memory_bytes": one.fullest.total if one.fullest is not None else None,
        "fullest_stage": one.fullest.stage if one.fullest is not None else None,
        "relative_step_time": round(one.seconds / fastest, 4) if one.seconds and fastest else None,
        "overrides": overrides(config, one),
    }


def _fastest(found: Sequence[Suggestion]) -> float | None:
    return min((one.seconds for one in found if one.seconds), default=None)


def _print(made: Draft, suggester: Suggester, found: Sequence[Suggestion], more: Suggestion | None) -> None:
    config, fastest = made.plan.job.config or {}, _fastest(found)
    print_styled(_heading(made.plan, suggester, fastest))
    if found and GRADIENTS in found[0].changes:
        told = "nothing fits with gradients in 32 bits; with gradients in bf16 these do"
        print_styled([((told, "yellow"),)])
    if found:
        rows = [_row(str(number), one, fastest) for number, one in enumerate(found, 1)]
        print_listing(_COLUMNS, rows, numbers=len(_COLUMNS) - 1)
        for number, one in enumerate(found, 1):
            pasted = " ".join(overrides(config, one)) or "as it is"
            print_styled([((f"{number}  ", "bold"), (pasted, "green" if one.changes else ""))])
        return
    told = why_none(suggester, more, config)
    print_styled([((line, ""),) for line in told.split("\n")])


def _heading(plan: Plan, suggester: Suggester, fastest: float | None) -> Iterator[Line]:
    """What is counted with, and the user's own layout."""
    (gpu, source, is_assumed), tasks = suggester.counted, plan.job.resources.tasks_per_node
    where = f"{count(suggester.nodes, 'node')} × {tasks}"
    own = suggester.own
    if own is not None and own.fullest is None:
        why = why_not_told(plan)
        told = f"{why}: " if why is not None else ""
        told = f" tasks; {told}how much memory they take cannot be told, and was not looked at"
        yield (f"{plan.paths.run_name}: ", "bold"), (where, ""), (told, "yellow")
        return
    counted = f"{gpu.name} ({source})"
    yield (f"{plan.paths.run_name}: ", "bold"), (f"{where} ", ""), (counted, "yellow" if is_assumed else "")
    why = untimed(Values(plan.job.config or {}))
    if why is not None:
        yield ((f"{why}: the layouts that fit with the least to change come first", "yellow"),)
    if own is None or own.fullest is None:
        yield (("yours breaks a rule: slipway check tells which", ""),)
        return
    fits, total = suggester.fits(own), gib(own.fullest.total)
    is_told = f"; its step: {own.seconds / fastest:.2f}" if own.seconds and fastest else ""
    of = f"of the {gib(suggester.limit)} GiB that a layout may take of {gib(gpu.memory)}"
    verdict = ("fits", "green") if fits else ("does not fit", "bold red")
    yield ("yours ", ""), verdict, (f": {total} GiB on stage {own.fullest.stage}, {of}{is_told}", "")
    halved = own_with_half_gradients(suggester) if not fits else None
    if halved is not None:
        (pasted,) = overrides(plan.job.config or {}, halved)
        yield ("yours would fit with gradients in bf16: ", ""), (pasted, "green")


def _row(number: str, one: Suggestion, fastest: float | None) -> tuple[str, ...]:
    layout = one.layout
    return (
        number,
        str(layout.tensor),
        str(layout.pipeline),
        str(layout.virtual or "-"),
        str(layout.context),
        str(one.data),
        str(layout.micro),
        _recomputed(layout.recompute),
        gib(one.fullest.total) if one.fullest is not None else "?",
        f"{one.seconds / fastest:.2f}" if one.seconds and fastest else "?",
    )


def _recomputed(recompute: Recompute) -> str:
    if recompute.granularity != "full":
        return recompute.granularity or "-"
    return (
        (f"block {recompute.layers}" if recompute.layers else "-") if recompute.method == "block" else "full"
    )
