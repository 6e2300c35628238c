"""The parts of the estimate of memory: the layers of each stage, micro batches in flight, bytes."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.checks.findings import Severity
from launcher.checks.rules.model import memory_problems
from launcher.config.compose import BatchComposer, list_options
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.estimates.training import parameters_of, stages_of, training_of
from launcher.stages.planning import plan_launch
from slipway.arithmetic.parameters import count_parameters
from tests.checks.plans import GPT, KNOWN, changed, plan_of
from tests.checks.trainings import gpt, layout, stages, training


@pytest.fixture(scope="module")
def composer() -> BatchComposer:
    return BatchComposer([])


@pytest.mark.parametrize("size", [size for size in list_options("training") if not size.endswith("tiny")])
def test_stages_of_a_shipped_size_have_all_parameters(composer: BatchComposer, size: str) -> None:
    plan = plan_launch(composer.compose([f"training={size}"]).config, number=1, tag="x")
    assert plan.job.config is not None
    job = training_of(plan.job.config, plan.job.resources.nodes, plan.job.engine)
    assert job is not None
    split = stages_of(job)
    assert split is not None
    total = sum(parameters_of(job.parts, stage).total for stage in split)
    copies = job.parts.is_tied and not any(chunk.embeds for chunk in split[-1])
    expected = count_parameters(
        plan.job.config["model"], job.vocabulary, plan.job.config["run"]["model_type"]
    )
    # A T5's decoder embeds at its first stage, as its encoder does.
    second_embedding = job.parts.embedding.total if len(job.stacks) > 1 and len(split) > 1 else 0
    assert total - (job.parts.words.total if copies else 0) - second_embedding == expected
    assert sum(sum(chunk.layers) for stage in split for chunk in stage) == sum(
        stack.layers or 0 for stack in job.stacks
    )


def layers_in_flight(memory: tuple[StageMemory, ...], layer_bytes: int) -> list[int]:
    """Return the activations of each stage, in layers of one micro batch that keep `layer_bytes` each."""
    return [round(stage.activations / layer_bytes) for stage in memory]


SMALL = gpt(16, 1024, 16, hidden_dropout=0.0)
# s b h (32 and the sums of the softmax, 4 a / h): without dropouts there are no masks.
LAYER = 2048 * (1024 * 32 + 16 * 4)


def test_a_stage_has_begun_as_many_micro_batches_as_there_are_stages_behind_it() -> None:
    memory = stages(training(**SMALL, **layout(1, 4, 1, 32)))
    # 4 layers a stage; the backward pass of one works on less than a layer more.
    assert [number // 4 for number in layers_in_flight(memory, LAYER)] == [4, 3, 2, 1]


def test_in_flight_micro_batches_are_at_most_all() -> None:
    memory = stages(training(**SMALL, **layout(1, 4, 1, 4)))
    assert [number // 4 for number in layers_in_flight(memory, LAYER)] == [2, 2, 2, 1]


def test_interleaved_stages_begin_more_micro_batches() -> None:
    """Stage i has 2 (p - 1 - i) + (v - 1) p + 1 chunks of 2 layers: megatron-core's warm-up and one more."""
    memory = stages(
        training(**SMALL, **layout(1, 4, 1, 32), virtual_pipeline_model_parallel_size=2), engine="nemo"
    )
    assert [number // 2 for number in layers_in_flight(memory, LAYER)] == [11, 9, 7, 5]


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        # Cosines and sines of queries and keys, whatever the size of the micro batch: these are kept rotated
        # alone, for Transformer Engine copies the values out of what they came in.
        ({"position_embedding_type": "rope"}, 8 * 2048 * 64),
        ({"position_embedding_type": "rope", "apply_rope_fusion": True}, 0),
        # A quarter as many keys and values.
        ({"num_query_groups": 4}, -4 * 2048 * 4 * 768),
        # Two halves and their product instead of what goes into GELU and what comes out.
        ({"activation": "swiglu"}, 4 * 2048 * 2 * 4096),
        ({"activation": "swiglu", "bias_activation_fusion": False}, 4 * 2048 * 6 * 4096),
        ({"hidden_dropout": 0.1}, 4 * 2048 * 2 * 1024),
        ({"transformer_engine": False, "attention_dropout": 0.0}, 4 * 16 * (2 * 2048**2 - 4 * 2048)),
        ({"transformer_engine": False}, 4 * 16 * (5 * 2048**2 - 4 * 2048)),
    ],
    ids=str,
)
def test_options_of_a_layer_change_what_it_keeps(changes: dict[str, Any], more: int) -> None:
    def layer_activations(**options: Any) -> int:
        eight, nine = (
            stages(training(**(SMALL | layout(1, 1, 4, 32) | options | {"num_layers": layers})))[0]
            for layers in (8, 9)
        )
        return nine.activations - eight.activations

    assert layer_activations(**changes) - layer_activations() == more


@pytest.mark.parametrize("has_engine", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_loss_of_our_trainer_holds_the_logits_alone(has_engine: bool, fused: bool) -> None:
    keys = {"transformer_engine": has_engine, "cross_entropy_loss_fusion": fused}
    config = training(**SMALL, **layout(2, 1, 4, 32), **keys)
    assert stages(config, "megatron")[-1].logits == 2 * 4 * 2048 * 51_200 / 2
    config["trainer"]["precision"] = 32
    assert stages(config, "megatron")[-1].logits == 4 * 4 * 2048 * 51_200 / 2


def test_attention_without_transformer_engine_keeps_unrotated_queries_and_keys() -> None:
    """The values are a view of queries, keys and values in one, which stay as they came."""

    def layer_activations(engine: str, **options: Any) -> int:
        eight, nine = (
            stages(training(**(SMALL | layout(1, 1, 4, 32) | options | {"num_layers": layers})), engine)[0]
            for layers in (8, 9)
        )
        return nine.activations - eight.activations

    rope = {"position_embedding_type": "rope", "apply_rope_fusion": True}
    unfused = {"transformer_engine": False}
    queries_and_keys = 4 * 2048 * 4 * 1024
    assert layer_activations("megatron", **rope) - layer_activations("megatron") == queries_and_keys
    assert (
        layer_activations("megatron_lm", **rope, **unfused) - layer_activations("megatron_lm", **unfused)
        == queries_and_keys
    )
    assert layer_activations("nemo", **rope) == layer_activations("nemo")


def activations_with(method: str, layers: int) -> int:
    keys = {
        "activations_checkpoint_granularity": "full",
        "activations_checkpoint_method": method,
        "activations_checkpoint_num_layers": layers,
    }
    return stages(training(**SMALL, **layout(1, 1, 4, 32), **keys))[0].activations


def test_blocks_are_recomputed_one_layer_at_a_time() -> None:
    spared = 4 * (LAYER - 2 * 2048 * 1024)
    # A recomputed layer has all of its activations during its backward pass.
    assert activations_with("block", 4) - activations_with("block", 5) == pytest.approx(spared, rel=0.01)
    assert activations_with("block", 0) > activations_with("block", 16)
    assert activations_with("block", 16) == activations_with("uniform", 1)


def test_more_layers_together_keep_fewer_inputs_and_take_more_to_recompute() -> None:
    activations = {layers: activations_with("uniform", layers) for layers in (1, 2, 16)}
    inputs = 4 * 2 * 2048 * 1024
    assert activations[2] - activations[1] == pytest.approx(4 * LAYER - 8 * inputs, abs=4 * LAYER)
    assert activations[16] > activations[2]


@pytest.mark.parametrize(
    ("engine", "precision", "name", "changes", "expected"),
    [
        ("megatron", "bf16", "mcore_distributed_optim", {}, (2, 4, 12 / 8)),
        ("megatron", "bf16", "adam", {}, (2, 4, 12)),
        ("megatron", "32", "adam", {}, (4, 4, 8)),
        ("megatron_lm", "16", "adam", {}, (2, 2, 16)),
        ("nemo", "bf16", "mcore_distributed_optim", {}, (2, 4, 12 / 8)),
        ("nemo", "bf16", "distributed_fused_adam", {}, (2, 4, 10 / 8)),
        ("nemo", "bf16", "fused_adam", {}, (2, 4, 12)),
        ("nemo", "bf16", "adam", {"megatron_amp_O2": False}, (6, 4, 8)),
        ("nemo", "32", "sgd", {}, (4, 4, 4)),
    ],
)
def test_bytes_of_a_parameter_are_those_of_the_engine(
    engine: str, precision: str, name: str, changes: dict[str, Any], expected: tuple[float, ...]
) -> None:
    config = training(optim=name, **(SMALL | layout(1, 1, 4, 32)))
    config["trainer"]["precision"] = precision
    config["model"] |= changes
    stage = stages(config, engine)[0]
    per_parameter = tuple(
        part / stage.parameters for part in (stage.weights, stage.gradients, stage.optimizer)
    )
    assert per_parameter == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"mtp_num_layers": 1},
        {"num_moe_experts": 8, "moe_layer_freq": "([0]*3+[1]*13)"},
        {"multi_latent_attention": True},
        {"fsdp": True},
        {"override_vocab_size": None},
        {"num_layers": None},
        {"hidden_size": "wide"},
        {"pipeline_model_parallel_size": 3},
    ],
    ids=str,
)
def test_invalid_configuration_has_no_estimate(changes: dict[str, Any]) -> None:
    config = training(**(SMALL | layout(1, 1, 4, 32) | changes))
    assert estimate_memory(config, 1, "nemo") is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model.cpu_offloading": True}, "training.model.cpu_offloading=True: memory of the host"),
        ({"model.override_vocab_size": None}, "training.model.override_vocab_size=... says it"),
    ],
)
def test_uncounted_feature_is_named(changes: dict[str, Any], why: str) -> None:
    (finding,) = memory_problems(plan_of(changed(GPT, changes)), KNOWN)
    assert finding.severity is Severity.SKIPPED
    assert finding.why is not None
    assert why in finding.message
    assert why in finding.why


def test_invalid_value_is_left_to_its_own_check() -> None:
    assert list(memory_problems(plan_of(changed(GPT, {"model.num_layers": "many"})), KNOWN)) == []
