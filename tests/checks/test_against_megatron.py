"""Megatron-core's own assertions accept the configurations that the checks accept."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity
from launcher.checks.registry import run_checks
from launcher.checks.rules.layout import (
    context_problems,
    layer_problems,
    problems_at,
    tensor_problems,
    virtual_problems,
)
from launcher.checks.rules.model import recompute_problems, width_problems
from launcher.checks.rules.training import rampup_problems_at
from launcher.cli.check import layout_numbers
from launcher.estimates.parallelism import node_counts, read_parallel_config
from launcher.estimates.values import Values
from tests.checks.plans import GPT, changed, plan_of

SIZE = st.sampled_from([1, 2, 3, 4, 6, 8, 16])

LAYOUT = st.fixed_dictionaries(
    {
        "trainer.devices": st.sampled_from([1, 2, 4, 8]),
        "model.tensor_model_parallel_size": SIZE,
        "model.pipeline_model_parallel_size": SIZE,
        "model.virtual_pipeline_model_parallel_size": st.sampled_from([None, 1, 2, 3, 5]),
        "model.context_parallel_size": st.sampled_from([1, 2, 3]),
        "model.micro_batch_size": st.integers(1, 6),
        "model.global_batch_size": st.integers(1, 400),
    }
)
NODES = st.integers(1, 48)


def layout_problems(config: dict[str, Any], nodes: int) -> list[Finding]:
    """Return the layout problems of a configuration on a number of nodes, by arithmetic."""
    shape = read_parallel_config(Values(config))
    return [] if shape is None else list(problems_at(shape, nodes))


@given(LAYOUT, NODES)
def test_a_layout_without_findings_divides_all_that_megatron_divides(
    layout: dict[str, Any], nodes: int
) -> None:
    config = changed(GPT, layout)
    if layout_problems(config, nodes):
        assert layout_numbers(config, nodes) is None
        return
    tensor, pipeline, context = (
        layout[f"model.{name}_size"]
        for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    world = nodes * layout["trainer.devices"]
    assert world % (tensor * pipeline * context) == 0
    data = world // (tensor * pipeline * context)
    step = layout["model.micro_batch_size"] * data
    assert data >= 1
    assert layout["model.global_batch_size"] % step == 0
    micro_batches = layout["model.global_batch_size"] // step
    if (layout["model.virtual_pipeline_model_parallel_size"] or 1) > 1 and pipeline > 1:
        assert micro_batches >= pipeline and micro_batches % pipeline == 0
    numbers = layout_numbers(config, nodes)
    assert numbers is not None
    assert (numbers["data"], numbers["micro_batches"]) == (data, micro_batches)
    assert data * numbers["micro_batch"] * micro_batches == numbers["global_batch"]


@given(LAYOUT)
@settings(max_examples=20)
def test_named_node_counts_fit(layout: dict[str, Any]) -> None:
    config = changed(GPT, layout)
    shape = read_parallel_config(Values(config))
    assert shape is not None
    counts = node_counts(shape)
    assert all(not layout_problems(config, nodes) for nodes in counts)
    others = set(range(1, 200)) - set(counts)
    assert all(layout_problems(config, nodes) for nodes in others)


def test_suggested_sizes_are_valid() -> None:
    """Each layout, size and batch that a fix names has no such findings itself."""
    suggestions: Counter[str] = Counter()

    # These examples name each kind of size.
    @example(layout_with(pipeline=4, batch=12), 6)
    @example(layout_with(tensor=4, batch=12), 6)
    @example(layout_with(context=4, batch=12), 6)
    @example(layout_with(tensor=3, pipeline=3, batch=48), 16)
    @example(layout_with(micro=2, batch=18), 6)
    @settings(max_examples=200)
    @given(LAYOUT, NODES)
    def check(layout: dict[str, Any], nodes: int) -> None:
        config = changed(GPT, {**layout, "model.num_layers": 12, "trainer.num_nodes": nodes})
        for problem in run_checks(plan_of(config), Facts()):
            for changes in _suggested_changes(problem.fix or "" if problem.id in _COUNTING_CHECKS else ""):
                _assert_valid(changed(config, changes), changes)
                suggestions[" ".join(changes)] += 1

    check()
    assert suggestions.keys() == set(_SUGGESTED_KEYS.values()), "a fix is worded differently"


def layout_with(
    *, tensor: int = 1, pipeline: int = 1, context: int = 1, micro: int = 1, batch: int
) -> dict[str, Any]:
    return {
        "trainer.devices": 1,
        "model.tensor_model_parallel_size": tensor,
        "model.pipeline_model_parallel_size": pipeline,
        "model.virtual_pipeline_model_parallel_size": None,
        "model.context_parallel_size": context,
        "model.micro_batch_size": micro,
        "model.global_batch_size": batch,
    }


def _assert_valid(config: dict[str, Any], changes: dict[str, Any]) -> None:
    assert layout_problems(config, config["trainer"]["num_nodes"]) == [], changes
    values = Values(config)
    if "model.pipeline_model_parallel_size" in changes:
        assert list(layer_problems(values)) == []
        assert not any(finding.severity is Severity.ERROR for finding in virtual_problems(values, "nemo"))
    if "model.context_parallel_size" in changes:
        assert list(context_problems(values, "nemo")) == []
    if "model.tensor_model_parallel_size" in changes:
        assert list(tensor_problems(values)) == []


_COUNTING_CHECKS = ("layout.world", "layout.context", "batch.global", "batch.interleaved")
_SUGGESTED_KEYS = {
    "valid tensor sizes": "model.tensor_model_parallel_size",
    "pipeline sizes that would do": "model.pipeline_model_parallel_size",
    "context sizes that would do": "model.context_parallel_size",
    "node counts that would do": "trainer.num_nodes",
    "global batches near it": "model.global_batch_size",
    "valid micro batch sizes": "model.micro_batch_size",
}


def _suggested_changes(fix: str) -> Iterator[dict[str, Any]]:
    """Yield the changes that the lines of a fix name."""
    for line in fix.splitlines():
        start, _, values = line.replace("none up to 1024", "").partition(": ")
        for words, key in _SUGGESTED_KEYS.items():
            if start.startswith(words):
                yield from ({key: int(size)} for size in re.findall(r"\d+", values.partition(" (")[0]))


@pytest.fixture(scope="module")
def megatron() -> None:
    """Import megatron-core beforehand: the first import takes seconds, and raises warnings of torch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.num_microbatches_calculator
        import megatron.core.transformer  # noqa: F401


@pytest.mark.trainer
@pytest.mark.usefixtures("megatron")
@given(
    start=st.integers(1, 64),
    increment=st.integers(1, 32),
    samples=st.sampled_from([0, 500, 5001]),
    batch=st.integers(1, 96),
    micro=st.sampled_from([1, 2, 4]),
    nodes=st.sampled_from([1, 2]),
)
@settings(max_examples=300)
def test_ramp_ups_are_those_that_megatron_takes(
    start: int, increment: int, samples: int, batch: int, micro: int, nodes: int
) -> None:
    changes = {"model.rampup_batch_size": [start, increment, samples], "model.micro_batch_size": micro}
    values = Values(changed(GPT, {**changes, "trainer.devices": 2, "model.global_batch_size": batch}))
    shape = read_parallel_config(values)
    assert shape is not None
    data = shape.data(nodes)
    problems = list(rampup_problems_at(values, shape, nodes))
    assert bool(problems) is not _megatron_takes(start, increment, samples, batch, micro, data)


def _megatron_takes(start: int, increment: int, samples: int, batch: int, micro: int, data: int) -> bool:
    from megatron.core.num_microbatches_calculator import (
        RampupBatchsizeNumMicroBatchesCalculator as Calculator,
    )

    try:
        calculator = Calculator(batch, micro, data, False, 1, start, increment, samples)
        steps = (batch - start) // increment
        for step in range(steps + 1):  # every batch on the way
            calculator.update(math.ceil(samples * step / steps) if steps else 0, consistency_check=True)
        calculator.update(samples + 1, consistency_check=True)
    except (AssertionError, ZeroDivisionError):
        return False
    return True


MODEL = st.fixed_dictionaries(
    {
        "model.num_layers": st.integers(1, 24),
        "model.hidden_size": st.sampled_from([64, 96, 128]),
        "model.ffn_hidden_size": st.just(384),
        "model.num_attention_heads": st.sampled_from([1, 2, 3, 4, 6, 8]),
        "model.num_query_groups": st.sampled_from([None, 1, 2, 3, 4]),
        "model.tensor_model_parallel_size": st.sampled_from([1, 2, 3, 4]),
        "model.pipeline_model_parallel_size": st.sampled_from([1, 2, 3, 4]),
        "model.num_layers_in_first_pipeline_stage": st.sampled_from([None, None, 1, 2, 30]),
        "model.num_layers_in_last_pipeline_stage": st.sampled_from([None, None, 1, 3]),
        "model.activations_checkpoint_granularity": st.sampled_from([None, "full", "selective"]),
        "model.activations_checkpoint_method": st.sampled_from([None, "block", "uniform"]),
        "model.activations_checkpoint_num_layers": st.sampled_from([None, 1]),
    }
)


@pytest.mark.trainer
@pytest.mark.usefixtures("megatron")
@pytest.mark.filterwarnings("ignore::UserWarning")
@given(MODEL)
@settings(max_examples=300, deadline=None)
def test_megatron_configures_models_that_pass(model: dict[str, Any]) -> None:
    values = Values(changed(GPT, model))
    checks = (tensor_problems, layer_problems, width_problems, recompute_problems)
    if not any(problem for check in checks for problem in check(values)):
        _configure(model)


def _configure(model: dict[str, Any]) -> None:
    import torch
    from megatron.core.transformer import TransformerConfig

    options = {key.removeprefix("model."): value for key, value in model.items()}
    recompute = {
        f"recompute_{name}": options.pop(f"activations_checkpoint_{name}")
        for name in ("granularity", "method", "num_layers")
    }
    config = TransformerConfig(**options, **recompute, pipeline_dtype=torch.bfloat16)
    groups = config.num_query_groups
    assert groups is not None
    assert config.num_attention_heads % groups == 0
    assert groups % config.tensor_model_parallel_size == 0
    assert config.ffn_hidden_size % config.tensor_model_parallel_size == 0
