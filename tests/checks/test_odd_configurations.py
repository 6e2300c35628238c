"""Configurations that nobody should write, and somebody does: no check raises on them or takes long."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from launcher.checks import layout_search
from launcher.checks.facts import PathFacts
from launcher.checks.findings import Finding, Severity
from launcher.checks.layout_search import LayoutSearch
from launcher.checks.registry import run_checks
from launcher.checks.remedies import would_fit
from launcher.checks.rules.keys import KEYS
from launcher.estimates.cost import estimate_cost
from launcher.estimates.memory import estimate_memory
from launcher.estimates.parallelism import apply_changes
from launcher.estimates.speed import work_of
from launcher.estimates.training import has_fused_attention, read_countable_model
from launcher.estimates.values import Values
from launcher.plan import Plan
from tests.checks.cases import LATENT, MOE
from tests.checks.plans import GPT, KNOWN, T5, changed, plan_of

SPARSE = changed(GPT, {**MOE, **LATENT, "model.moe_layer_freq": [0, *[1] * 23], "model.window_size": [9, 0]})
FACTS = replace(KNOWN, paths=PathFacts(free_bytes=10**12, checkpoints_there=0))
HUGE = 10**400
NUMBERS = (0, 1, -1, 7, 1.5, float("nan"), float("inf"), 1e308, 1e-308, 2**40, 2**62, 2**64, HUGE)
WORDS = ("", "x", "7", "full", "selective", "rope", "swiglu")
ODD: tuple[Any, ...] = (*NUMBERS, *WORDS, None, True, [], [1, 2, 3], [0, 0, 0], {}, {"a": 1})


def keys_of(node: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in node.items():
        yield f"{above}{name}"
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{above}{name}.")


@pytest.fixture(autouse=True)
def _limit_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the search for more nodes, which has a test of its own."""
    monkeypatch.setattr(layout_search, "_MOST_WORK", 300)


@pytest.mark.parametrize("engine", ["nemo", "megatron", "megatron_lm"])
@pytest.mark.parametrize("base", [GPT, T5, SPARSE], ids=["gpt", "t5", "experts"])
def test_odd_values_of_keys_raise_nothing(base: dict[str, Any], engine: str) -> None:
    generator = random.Random(engine + str(len(base["model"])))
    keys = sorted({*keys_of(base), *KEYS, "model.tokenizer", "model.tokenizer.num_sentinel_tokens"})
    for _ in range(60):
        config = copy.deepcopy(base)
        for key in generator.choices(keys, k=generator.choice((1, 1, 2, 4))):
            *parents, name = key.split(".")
            node = config
            for parent in parents:
                if not isinstance(node.get(parent), dict):
                    node[parent] = {}
                node = node[parent]
            node[name] = generator.choice(ODD)
        plan = plan_of({}, engine=engine, resources={"nodes": generator.choice((1, 2, 7, 10**12))})
        plan = replace(plan, job=replace(plan.job, config=config))
        estimate_memory(config, plan.job.resources.nodes, engine)
        estimate_cost(plan)
        run_checks(plan, FACTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.tokenizer": 5},
        {"model.tokenizer": "x", "model.override_vocab_size": None},
        {"model.override_vocab_size": "x"},
        {"model.override_vocab_size": float("inf")},
        {"model.ffn_hidden_size": HUGE},
        {"model.kv_channels": HUGE},
        {"model.tokenizer": {"num_sentinel_tokens": 1e308}},
        {"model.num_query_groups": 1.5},
        {"model.max_position_embeddings": None},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_invalid_sizes_have_no_estimate(changes: dict[str, Any]) -> None:
    values = Values(changed(GPT, changes))
    assert read_countable_model(Values(GPT))
    assert not read_countable_model(values)
    assert estimate_memory(values.config, 2, "nemo") is None
    assert estimate_cost(plan_of(dict(values.config))) is None
    assert work_of(values, 8, "nemo") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"model.multi_latent_attention": True, **LATENT},
        {"model.encoder.multi_latent_attention": True},
        {"model.decoder.multi_latent_attention": True},
        {"model.encoder.max_position_embeddings": "x"},
        {"model.encoder.max_position_embeddings": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_invalid_sizes_of_a_stack_have_no_estimate(changes: dict[str, Any]) -> None:
    """A key of the encoder or the decoder replaces that of the model."""
    config = changed(T5, changes)
    assert read_countable_model(Values(config)) is None
    assert estimate_memory(config, 2, "nemo") is None
    assert estimate_cost(plan_of(config)) is None


def test_positions_that_are_not_learned_need_no_size() -> None:
    rotary = {"model.position_embedding_type": "rope", "model.max_position_embeddings": None}
    assert read_countable_model(Values(changed(GPT, rotary)))
    relative = {"model.encoder.position_embedding_type": "relative", "model.max_position_embeddings": None}
    assert read_countable_model(Values(changed(T5, relative)))
    assert not read_countable_model(Values(changed(T5, {"model.max_position_embeddings": None})))


@pytest.mark.parametrize(
    ("changes", "resources"),
    [
        ({"trainer.precision": "32"}, {"gpus_per_node": 4}),
        ({"trainer.precision": "32", "trainer.accumulate_grad_batches": 2}, {}),
        ({"model.num_layers": 96, "model.rampup_batch_size": [1]}, {}),
        ({"model.num_layers": 96, "model.rampup_batch_size": [512, 32, 1000]}, {}),
    ],
    ids=["gpus", "accumulation", "rampup", "batch"],
)
def test_search_ignores_errors_that_no_layout_mends(
    changes: dict[str, Any], resources: dict[str, Any]
) -> None:
    """Their own checks report them; looking for a layout that mends them would take minutes."""
    plan = plan_of(changed(GPT, changes), resources=resources)
    search = LayoutSearch(plan, KNOWN)
    nearest = search.nearest()
    assert nearest is not None
    assert search.work < 30_000
    errors = {
        finding.id: finding for finding in run_checks(plan, KNOWN) if finding.severity is Severity.ERROR
    }
    other_ids = {name for name in errors if name != "memory.fits"}
    assert other_ids
    config = apply_changes(plan.job.config or {}, nearest.changes)
    remaining = run_checks(replace(plan, job=replace(plan.job, config=config)), KNOWN)
    assert {finding.id for finding in remaining if finding.severity is Severity.ERROR} == other_ids


def test_the_search_for_more_nodes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of GPUs holds a layer of this model."""
    plan = plan_of(changed(GPT, {"model.kv_channels": 100_000, "model.num_attention_heads": 31}))
    node_counts: list[int] = []
    real = layout_search.with_nodes

    def count_nodes(plan: Plan, nodes: int) -> Plan:
        node_counts.append(nodes)
        return real(plan, nodes)

    monkeypatch.setattr(layout_search, "with_nodes", count_nodes)
    fix = would_fit(plan, KNOWN)
    assert fix.endswith("nor on another number of nodes up to 1024, as far as was searched")
    assert 0 < len(node_counts) < 1000


def test_a_decoder_of_one_stage_has_its_words_once() -> None:
    """The embedding and the output layer share a matrix in one stage; in two, each has its own."""

    def parameters(pipeline: int, split: int) -> list[int]:
        changes = {
            "model.pipeline_model_parallel_size": pipeline,
            "model.pipeline_model_parallel_split_rank": split,
            "model.override_vocab_size": 29_184,
        }
        estimate = estimate_memory(changed(T5, changes), 2, "nemo")
        assert estimate is not None
        return [stage.parameters for stage in estimate]

    words = 29_184 * T5["model"]["decoder"]["hidden_size"]
    undivided, divided = parameters(2, 1), parameters(4, 2)
    assert sum(divided) - sum(undivided) == words


@pytest.mark.parametrize(
    ("engine", "changes", "fused"),
    [
        ("nemo", {"model.transformer_engine": True}, True),
        ("nemo", {"model.transformer_engine": True, "trainer.precision": "32-true"}, False),
        ("nemo", {"model.transformer_engine": False}, False),
        ("megatron_lm", {"model.transformer_engine": False, "model.use_flash_attention": True}, True),
        ("megatron", {"trainer.precision": 32}, True),
        ("megatron", {"model.attention_backend": "local"}, False),
    ],
)
def test_speed_and_memory_agree_on_what_is_fused(engine: str, changes: dict[str, Any], fused: bool) -> None:
    config = changed(GPT, changes)
    values = Values(config)
    assert has_fused_attention(values, "model", engine) is fused
    work = work_of(values, 8, engine)
    assert work is not None
    assert work.flash is fused


def test_decoder_is_not_checked_with_an_invalid_probability() -> None:
    def sequence_findings(changes: dict[str, Any]) -> list[Finding]:
        findings = run_checks(plan_of(changed(T5, changes), engine="megatron"), KNOWN)
        return [finding for finding in findings if finding.id == "model.sequence"]

    for value in (1e308, 1, -1):
        assert sequence_findings({"model.data.masked_lm_prob": value}) == []
    assert sequence_findings({"model.data.mean_ngram_size": 1e-308})
    assert sequence_findings({"model.data.seq_length": 2**62, "model.seq_length": 2**62})


@pytest.mark.parametrize("key", ["num_moe_experts", "num_query_groups", "q_lora_rank", "override_vocab_size"])
@pytest.mark.parametrize("value", [0, 0.0, False])
def test_size_that_is_switched_off_is_counted_as_left_out(key: str, value: object) -> None:
    values = Values(changed(GPT, {f"model.{key}": value}))
    assert read_countable_model(values) is not None


def test_size_of_latent_attention_is_ignored_without_it() -> None:
    assert read_countable_model(Values(changed(GPT, {"model.q_lora_rank": "x"}))) is not None
    assert read_countable_model(Values(changed(SPARSE, {"model.q_lora_rank": "x"}))) is None
