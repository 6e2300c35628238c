"""Configurations that pass the checks with engine=megatron are accepted by the trainer itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checks.facts import Facts
from launcher.checks.findings import Severity
from launcher.checks.registry import run_checks
from slipway.common.errors import UserError
from slipway.trainer.config.check import check_keys
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.data.spans import sample_lengths
from tests.checks.plans import GPT, T5, changed, plan_of

LENGTHS = (64, 96, 2048)
# One value in some layouts is left to chance: the checks and the trainer may refuse it.
CHANCE: dict[str, st.SearchStrategy[Any]] = {
    "trainer.num_nodes": st.sampled_from([1, 2, 3, 4, 8]),
    "trainer.devices": st.sampled_from([1, 2, 4, 8]),
    "model.tensor_model_parallel_size": st.sampled_from([1, 2, 3, 4, 6, 8]),
    "model.pipeline_model_parallel_size": st.sampled_from([1, 2, 3, 4, 6, 8]),
    "model.virtual_pipeline_model_parallel_size": st.sampled_from([None, 1, 2, 3]),
    "model.context_parallel_size": st.sampled_from([1, 2, 4]),
    "model.sequence_parallel": st.booleans(),
    "model.num_query_groups": st.sampled_from([None, 1, 2, 8]),
    "model.micro_batch_size": st.sampled_from([1, 2, 3, 4]),
    "model.global_batch_size": st.sampled_from([8, 24, 48, 96, 128, 256]),
    "model.rampup_batch_size": st.sampled_from([[8, 8, 1000], [24, 24, 1000], [32, 16, 9], [96, 8, 1]]),
    "model.encoder_seq_length": st.sampled_from([64, 96, 100, 2048]),
}


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Return sizes that divide what they have to; in one layout of four, one is left to chance."""
    tensor, pipeline = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 3, 4]))
    context, data = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 2, 3, 4]))
    world = tensor * pipeline * context * data
    devices = draw(st.sampled_from([count for count in (1, 2, 4, 8) if world % count == 0]))
    layers = GPT["model"]["num_layers"] // pipeline
    virtual = draw(st.sampled_from([None, *(size for size in (2, 3) if layers % size == 0 and pipeline > 1)]))
    micro = draw(st.sampled_from([1, 2, 3]))
    step = micro * data * (pipeline if virtual else 1)
    layout = {
        "trainer.num_nodes": world // devices,
        "trainer.devices": devices,
        "model.tensor_model_parallel_size": tensor,
        "model.pipeline_model_parallel_size": pipeline,
        "model.virtual_pipeline_model_parallel_size": virtual,
        "model.context_parallel_size": context,
        "model.sequence_parallel": tensor > 1 and draw(st.booleans()),
        "model.overlap_p2p_comm": draw(st.booleans()),
        "model.num_query_groups": draw(st.sampled_from([None, 8, 16])),
        "model.micro_batch_size": micro,
        "model.global_batch_size": step * draw(st.integers(1, 3)),
        "model.rampup_batch_size": draw(st.sampled_from([None, [step, step, 1000]])),
        "model.encoder_seq_length": draw(st.sampled_from(LENGTHS)),
    }
    if draw(st.integers(0, 3)) == 0:
        key = draw(st.sampled_from(sorted(CHANCE)))
        layout[key] = draw(CHANCE[key])
    length = layout["model.encoder_seq_length"]
    return {**layout, **dict.fromkeys(("model.max_position_embeddings", "model.data.seq_length"), length)}


SCHEDULE: dict[str, st.SearchStrategy[Any]] = {
    "trainer.max_steps": st.sampled_from([10, 1000]),
    "model.optim.sched.name": st.sampled_from(["CosineAnnealing", "WarmupAnnealing"]),
    "model.optim.sched.warmup_steps": st.sampled_from([None, 0, 5, 2000]),
    "model.optim.sched.warmup_ratio": st.sampled_from([None, None, 0.01, 0.5]),
    "model.optim.sched.constant_steps": st.sampled_from([None, 0, 7]),
    "model.optim.sched.constant_ratio": st.sampled_from([None, None, 0.1]),
    "model.optim.sched.min_lr": st.sampled_from([0.0, 1e-5, 1e-4, 1e-3]),
}


# Sizes of a T5: those that fit, and those of which one in three layouts has one that may not fit.
T5_LAYOUT: dict[str, st.SearchStrategy[Any]] = {
    "trainer.num_nodes": st.sampled_from([1, 2]),
    "trainer.devices": st.sampled_from([4, 8]),
    "model.tensor_model_parallel_size": st.sampled_from([1, 2, 4]),
    "model.pipeline_model_parallel_size": st.sampled_from([None, 1]),
    "model.pipeline_model_parallel_split_rank": st.sampled_from([None, 0]),
    "model.context_parallel_size": st.sampled_from([None, 1]),
    "model.data.seq_length_dec": st.sampled_from([114, 128, 512]),
    "model.global_batch_size": st.sampled_from([256, 512]),
}
T5_CHANCE: dict[str, st.SearchStrategy[Any]] = {
    "trainer.num_nodes": st.sampled_from([3, 5]),
    "model.tensor_model_parallel_size": st.sampled_from([3, 8, 12]),
    "model.pipeline_model_parallel_size": st.just(2),
    "model.pipeline_model_parallel_split_rank": st.just(1),
    "model.virtual_pipeline_model_parallel_size": st.sampled_from([1, 2]),
    "model.context_parallel_size": st.just(2),
    "model.sequence_parallel": st.booleans(),
    "model.encoder.num_query_groups": st.just(4),
    "model.decoder.num_query_groups": st.just(3),
    "model.decoder.ffn_hidden_size": st.just(1000),
    "model.data.seq_length_dec": st.sampled_from([77, 113]),
    "model.global_batch_size": st.sampled_from([64, 96]),
}


@st.composite
def t5_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Return sizes of a T5; in one of three, one is left to chance."""
    layout = draw(st.fixed_dictionaries(T5_LAYOUT))
    if draw(st.integers(0, 2)) == 0:
        key = draw(st.sampled_from(sorted(T5_CHANCE)))
        layout[key] = draw(T5_CHANCE[key])
    return layout


NAMES = st.sampled_from(["/a", " /b ", "c", "", " ", "1.5", "nan", "0"])
WEIGHTS = st.sampled_from([0.5, 1, 0, -1, "0.3", "1e999", 10**400, float("nan"), True, None])
PREFIXES = st.one_of(
    NAMES,
    st.lists(NAMES, max_size=3),
    st.lists(st.tuples(WEIGHTS, NAMES), max_size=3).map(
        lambda pairs: [item for pair in pairs for item in pair]
    ),
    st.sampled_from([None, 3, {}, ["a", 0.5], [["/a"]], [0.5, "/a", "/b"]]),
)


def passes_checks(config: dict[str, Any]) -> bool:
    resources = {"gpus_per_node": None}
    findings = run_checks(plan_of(config, engine="megatron", resources=resources), Facts())
    return not any(finding.severity is Severity.ERROR for finding in findings)


def require_accepted(config: dict[str, Any], world: int) -> None:
    """Raise the trainer's error about a configuration, or return."""
    flat = flatten(config)
    check_keys(flat)
    make_layout(read_settings(flat), world)


def complete(changes: dict[str, Any], base: dict[str, Any] = GPT) -> dict[str, Any]:
    defaults = {
        "trainer.precision": "bf16",
        "model.megatron_amp_O2": True,
        "exp_manager.explicit_log_dir": str(Path("/results")),
        "model.data.data_impl": "mock",
    }
    return changed(base, {**defaults, **changes})


def test_layout_that_passes_is_accepted_by_trainer() -> None:
    passed = 0

    @settings(max_examples=300)
    @given(layouts())
    def check(layout: dict[str, Any]) -> None:
        nonlocal passed
        config = complete(layout)
        if passes_checks(config):
            require_accepted(config, layout["trainer.num_nodes"] * layout["trainer.devices"])
            passed += 1

    check()
    assert passed >= 100


def test_schedule_that_passes_is_accepted_by_trainer() -> None:
    passed = 0

    @settings(max_examples=200)
    @given(st.fixed_dictionaries(SCHEDULE))
    def check(schedule: dict[str, Any]) -> None:
        nonlocal passed
        config = complete(schedule)
        if passes_checks(config):
            require_accepted(config, 16)
            passed += 1

    check()
    assert passed >= 30


def test_t5_that_passes_is_accepted_by_trainer() -> None:
    passed = 0

    @settings(max_examples=300)
    @given(t5_layouts())
    def check(layout: dict[str, Any]) -> None:
        nonlocal passed
        config = complete(layout, T5)
        if passes_checks(config):
            require_accepted(config, layout["trainer.num_nodes"] * layout["trainer.devices"])
            trainer_settings = read_settings(flatten(config))
            assert trainer_settings.denoising
            sample_lengths(
                trainer_settings.denoising,
                trainer_settings.seq_length,
                trainer_settings.architecture.seq_length,
            )
            passed += 1

    check()
    assert passed >= 100


@settings(max_examples=300, deadline=None)
@given(PREFIXES | st.dictionaries(st.sampled_from(["train", "validation", "test"]), PREFIXES))
def test_checks_and_trainer_accept_the_same_data(prefix: Any) -> None:
    config = complete({"model.data.data_impl": "mmap", "model.data.data_prefix": prefix})
    if passes_checks(config):
        require_accepted(config, 16)
        return
    # The test split, which the trainer never reads, is checked too.
    if not (isinstance(prefix, dict) and prefix.get("test") is not None):
        with pytest.raises(UserError, match="data_prefix"):
            require_accepted(config, 16)
