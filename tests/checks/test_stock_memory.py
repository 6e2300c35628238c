"""Layouts that people launch fit into a GPU's memory, or the report says which ones would."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from launcher.checks.findings import Finding, Severity
from launcher.checks.layout_search import LayoutSearch, overrides
from launcher.checks.registry import run_checks
from launcher.config.compose import compose, list_options
from launcher.plan import Plan
from launcher.stages.planning import plan_launch
from slipway.arithmetic.gpus import GPUS
from tests.checks.plans import KNOWN
from tests.checks.stock import gpu_for

MEMORY = "memory.fits"
LENGTHS = ("encoder_seq_length", "max_position_embeddings", "data.seq_length")


def composed_plan(words: list[str]) -> Plan:
    return plan_launch(compose(words).config, number=1, tag="tag")


def finding_of(check: str, plan: Plan) -> Finding:
    (match,) = [finding for finding in run_checks(plan, KNOWN) if finding.id == check]
    return match


def errors_with(words: list[str]) -> list[str]:
    """Return the messages of errors, and of any finding on memory."""
    findings = run_checks(composed_plan(words), KNOWN)
    return [
        finding.message for finding in findings if finding.severity is Severity.ERROR or finding.id == MEMORY
    ]


def on_nodes(nodes: int, batch: int, **sizes: int) -> list[str]:
    """Return the overrides of one of NVIDIA's scripts, which all add gradients up in bf16."""
    words = [f"training.trainer.num_nodes={nodes}", f"training.model.global_batch_size={batch}"]
    words += [f"training.model.{name}={size}" for name, size in sizes.items()]
    return [*words, "+training.model.optim.grad_sync_dtype=bf16"]


def parallel(tensor: int, pipeline: int = 1) -> dict[str, int]:
    return {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}


VIRTUAL = {"virtual_pipeline_model_parallel_size": 12}
# NVIDIA trained with these: NeMo-Framework-Launcher, examples/training/gpt/{a100,h100}, llama/{a100,h100}.
TRAINED = {
    "a100/175b_16node": ("gpt3/175b", on_nodes(16, 256, **parallel(4, 8), **VIRTUAL)),
    "a100/20b_1node": ("gpt3/20b", on_nodes(1, 256, **parallel(4))),
    "h100/20b_bf16_8node": ("gpt3/20b", on_nodes(8, 2048, **parallel(2))),
    "a100/40b_8node": ("gpt3/40b", on_nodes(8, 256, **parallel(2, 4), **VIRTUAL)),
    "a100/5b_1node": ("gpt3/5b", on_nodes(1, 256, **parallel(1))),
    "a100/llama2_13b_bf16": ("llama/llama2_13b", on_nodes(1, 128)),
    "a100/llama2_70b_bf16": ("llama/llama2_70b", on_nodes(8, 128)),
    "h100/llama3_8b_bf16": ("llama/llama3_8b", on_nodes(1, 128)),
    "h100/llama3_405b_bf16": ("llama/llama3_1_405b", on_nodes(72, 252)),
}


@pytest.mark.parametrize("name", TRAINED)
def test_sizes_trained_on_a_gpu_fit_it(name: str) -> None:
    size, words = TRAINED[name]
    gpu = f"{name.partition('/')[0]}-80gb"
    assert errors_with([f"training={size}", f"cluster.gpu={gpu}", *words]) == []


def test_the_gpus_of_the_shipped_sizes_are_known_ones() -> None:
    gpus = {size: gpu_for(size) for size in list_options("training")}
    assert {gpu for gpu in gpus.values() if gpu is not None} <= set(GPUS)
    assert [size for size, gpu in gpus.items() if gpu is None] == ["gpt3/tiny", "t5/tiny"]


class Overflow(NamedTuple):
    """The reported sizes of a layout that does not fit, in GiB."""

    words: list[str]
    where: str
    needs: float
    too_little: float


OVERFLOWS = {
    "175b on 8 nodes": Overflow(
        ["training=gpt3/175b", "cluster.gpu=a100-80gb", "training.trainer.num_nodes=8"],
        "pipeline stage 0 of 8 (from 0)",
        84.9,
        4.9,
    ),
    "40b without recompute at 16k": Overflow(
        [
            "training=gpt3/40b",
            "cluster=p5",
            "training.trainer.num_nodes=16",
            *(f"training.model.{key}=16384" for key in LENGTHS),
        ],
        "pipeline stage 0 of 4 (from 0)",
        240.0,
        160.3,
    ),
    "64k without context parallel": Overflow(
        ["training=gpt3/40b_64k", "cluster.gpu=h100-80gb", "training.model.context_parallel_size=1"],
        "pipeline stage 0 of 4 (from 0)",
        125.4,
        45.7,
    ),
    "a large micro batch on small GPUs": Overflow(
        ["training=gpt3/5b", "cluster=p4d", "training.model.micro_batch_size=8"], "a GPU", 84.6, 44.6
    ),
    "a T5 on small GPUs": Overflow(["training=t5/23b", "cluster.gpu=a100-40gb"], "a GPU", 49.0, 9.0),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_overflow_is_reported_with_layouts_that_fit(name: str) -> None:
    case = OVERFLOWS[name]
    finding = finding_of(MEMORY, composed_plan(case.words))
    assert finding.severity is Severity.ERROR
    match = re.search(
        r": (.+) needs (\S+) GiB \(.+; \S+ has \S+ GiB .+: (\S+) GiB too little", finding.message
    )
    assert match is not None, finding.message
    assert match[1] == case.where
    assert float(match[2]) == pytest.approx(case.needs, rel=0.02)
    assert float(match[3]) == pytest.approx(case.too_little, abs=0.02 * case.needs)
    assert finding.fix is not None
    first = finding.fix.partition("\n")[0].removeprefix("would fit: ").split(" ")
    assert errors_with([*case.words, *first]) == []


@pytest.mark.parametrize("name", OVERFLOWS)
def test_first_suggestion_passes(name: str) -> None:
    """`slipway suggest` names this suggestion first."""
    words = OVERFLOWS[name].words
    plan = composed_plan(words)
    first = next(LayoutSearch(plan, KNOWN).best())
    assert plan.job.config is not None
    assert errors_with([*words, *overrides(plan.job.config, first)]) == []


@pytest.mark.parametrize(
    ("nodes", "check", "smallest"), [(2, "layout.world", 183.8), (4, MEMORY, 92.2)], ids=["2", "4"]
)
def test_175b_on_too_few_nodes_names_the_smallest_layout(nodes: int, check: str, smallest: float) -> None:
    """No layout fits: the fix names the smallest one, its size, and a number of nodes that has a layout."""
    words = ["training=gpt3/175b", "cluster.gpu=a100-80gb", f"training.trainer.num_nodes={nodes}"]
    finding = finding_of(check, composed_plan(words))
    assert finding.severity is Severity.ERROR
    assert finding.fix is not None
    match = re.search(
        r"no layout fits on (\d+) nodes: .+, takes (\S+) of 80\.0 GiB on stage \d+", finding.fix
    )
    assert match is not None, finding.fix
    assert int(match[1]) == nodes
    assert float(match[2]) == pytest.approx(smallest, rel=0.02)
    remedy = re.search(r"^would fit on \d+ nodes: (.+)$", finding.fix, re.MULTILINE)
    assert remedy is not None, finding.fix
    assert errors_with([*words, *remedy[1].split(" ")]) == []
