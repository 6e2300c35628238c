"""Mixtures of experts: against Megatron-Bridge's estimator, published sizes, and peaks that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.checks.findings import Severity
from launcher.checks.rules.model import memory_problems
from launcher.estimates.memory import StageMemory, bytes_per_parameter
from launcher.estimates.training import parameters_of, stages_of, training_of
from slipway.arithmetic.flops import sample_flops
from slipway.arithmetic.parameters import count_parameters, parts_of
from tests.checks.plans import GPT, KNOWN, changed, plan_of
from tests.checks.test_memory_measured import LIBRARIES
from tests.checks.trainings import gpt, layout, stages, training

BRIDGE: dict[str, Any] = json.loads((Path(__file__).parent / "bridge_estimates.json").read_text())
RECIPES: dict[str, dict[str, Any]] = {recipe["recipe"]: recipe for recipe in BRIDGE["recipes"]}

# The options that all of these models share.
GATED: dict[str, Any] = {
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "bias": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}

# The estimator counts an attention of all heads' width where there is a narrow one, and shares layers out
# evenly where the recipe lists them by stage: only its other terms are held against ours.
COUNTED_OTHERWISE = {
    name for name, recipe in RECIPES.items() if recipe["model"].get("multi_latent_attention")
}


class PerGpu(NamedTuple):
    """Parameters of the fullest GPU, each kind by itself as the estimator counts them, and their bytes."""

    dense: int
    routed: int
    bytes: float


def per_gpu(recipe: dict[str, Any]) -> PerGpu:
    config = config_of(recipe)
    job = training_of(config, config["trainer"]["num_nodes"], "megatron_lm")
    assert job is not None
    split = stages_of(job)
    assert split is not None
    sizes = [parameters_of(job.parts, stage) for stage in split]
    dense = max(size.on_rank(job.parallel.tensor) for size in sizes)
    routed = max(size.routed for size in sizes) // (job.parallel.expert * job.parallel.expert_tensor)
    per_parameter = bytes_per_parameter(job)
    fixed = per_parameter.weight + per_parameter.gradient
    total = dense * (fixed + per_parameter.optimizer / per_parameter.shared_by)
    return PerGpu(
        dense, routed, total + routed * (fixed + per_parameter.optimizer / per_parameter.experts_shared_by)
    )


def config_of(recipe: dict[str, Any]) -> dict[str, Any]:
    model = {**GATED, "encoder_seq_length": 4096, "max_position_embeddings": 4096, **recipe["model"]}
    if "dense_layers" in recipe:
        first = recipe["dense_layers"]
        model["moe_layer_freq"] = [0] * first + [1] * (model["num_layers"] - first)
    return training(max(recipe["gpus"] // 8, 1), optim="mcore_distributed_optim", **model)


@pytest.mark.parametrize("name", sorted(set(RECIPES) - COUNTED_OTHERWISE))
def test_states_are_those_that_megatron_bridge_estimates(name: str) -> None:
    recipe = RECIPES[name]
    ours, bridge = per_gpu(recipe), recipe["bridge"]
    assert ours.routed == pytest.approx(bridge["routed_per_gpu"], rel=0.05)
    assert ours.dense == pytest.approx(bridge["dense_per_gpu"], rel=0.06)
    assert ours.bytes == pytest.approx(bridge["dense_bytes"] + bridge["routed_bytes"], rel=0.05)


def test_ten_recipes_are_compared() -> None:
    assert len(set(RECIPES) - COUNTED_OTHERWISE) >= 10


@pytest.mark.parametrize("name", sorted(COUNTED_OTHERWISE))
def test_states_without_latent_attention_are_those_of_megatron_bridge(name: str) -> None:
    recipe = RECIPES[name]
    ours, bridge, model = per_gpu(recipe), recipe["bridge"], recipe["model"]
    is_even = model["pipeline_model_parallel_size"] == 1
    # 4 layers of 61 by 16 stages, 8 by 8: the estimator counts their average.
    tolerance = 0.001 if is_even else 0.11
    assert ours.routed == pytest.approx(bridge["routed_per_gpu"], rel=tolerance)
    if is_even:
        attention = model["num_layers"] * latent_attention(model)
        rest = bridge["dense_per_gpu_without_attention"]
        assert ours.dense - attention == pytest.approx(rest, rel=0.01)
        assert ours.bytes == pytest.approx(bridge["dense_bytes"] + bridge["routed_bytes"], rel=0.05)


def latent_attention(model: dict[str, Any]) -> int:
    """Return a GPU's parameters of multi-latent attention without a narrow query, from its matrices."""
    heads = model["num_attention_heads"] // model["tensor_model_parallel_size"]
    hidden, rank = model["hidden_size"], model["kv_lora_rank"]
    query, value = model["qk_head_dim"] + model["qk_pos_emb_head_dim"], model["v_head_dim"]
    into = hidden * heads * query + hidden * (rank + model["qk_pos_emb_head_dim"])
    return int(into + rank * heads * (model["qk_head_dim"] + value) + heads * value * hidden)


# Published, in billions: all parameters, and those that a token meets. Mixtral: mistral.ai/news/
# mixtral-of-experts and mixtral-8x22b; DeepSeek-V2 and V2-Lite: arXiv 2405.04434 (abstract, appendix B), V3:
# 2412.19437; Qwen3: the model cards; Kimi K2: arXiv 2507.20534; OLMoE: arXiv 2409.02060.
PUBLISHED = {
    "mixtral_8x7b pretrain_recipe": (46.7, 12.9),
    "mixtral_8x22b pretrain_recipe": (141, 39),
    "deepseek_v2_lite_pretrain_8gpu_h100_bf16_config": (15.7, 2.4),
    "deepseek_v2_pretrain_128gpu_h100_bf16_config": (236, 21),
    "deepseek_v3_pretrain_1024gpu_h100_bf16_config": (671, 37),
    "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config": (30.5, 3.3),
    "qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config": (235, 22),
    "kimi_k2_pretrain_512gpu_h100_bf16_config": (1040, 32.6),
    "olmoe_7b_pretrain_8gpu_h100_bf16_config": (6.9, 1.3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = config_of(RECIPES[name])["model"]
    vocabulary = model["override_vocab_size"]
    total, active = PUBLISHED[name]
    assert count_parameters(model, vocabulary) / 1e9 == pytest.approx(total, rel=0.015)
    active_model = {**model, "num_moe_experts": model["moe_router_topk"]}
    # DeepSeek-V2-Lite's are those without the embedding.
    embedding = vocabulary * model["hidden_size"] if name.startswith("deepseek_v2_lite") else 0
    assert (count_parameters(active_model, vocabulary) - embedding) / 1e9 == pytest.approx(active, rel=0.035)


@pytest.mark.parametrize("name", RECIPES)
def test_flops_are_six_for_each_parameter_that_a_token_meets_and_the_scores(name: str) -> None:
    model = config_of(RECIPES[name])["model"]
    vocabulary, length = model["override_vocab_size"], model["encoder_seq_length"]
    active_model = {**model, "num_moe_experts": model["moe_router_topk"]}
    weights = count_parameters(active_model, vocabulary) - vocabulary * model["hidden_size"]
    head = model.get("kv_channels") or model["hidden_size"] // model["num_attention_heads"]
    widths = 2 * head
    if model.get("multi_latent_attention"):
        widths = model["qk_head_dim"] + model["qk_pos_emb_head_dim"] + model["v_head_dim"]
    scores = 6 * length**2 * widths * model["num_attention_heads"] * model["num_layers"]
    assert sample_flops(model, vocabulary) == pytest.approx(6 * length * weights + scores, rel=0.01)


@pytest.mark.parametrize(
    ("keys", "windowed"),
    [
        ({}, 8),
        ({"window_attn_skip_freq": 4}, 6),
        ({"window_attn_skip_freq": [1, 0, 1, 0, 1, 0, 1, 0]}, 4),
    ],
)
def test_scores_of_a_sliding_window_are_those_in_it(keys: dict[str, Any], windowed: int) -> None:
    """Counted like causal ones, twice: 2 s w - w² in place of s²; all with a window as long as that."""
    model = training(**gpt(8, 1024, 16, sequence=2048))["model"]
    full = sample_flops(model, 51_200)
    # A token sees itself and 511 before it.
    windowed_flops = sample_flops({**model, "window_size": [511, 0], **keys}, 51_200)
    spared = 2048**2 - (2 * 2048 * 512 - 512**2)
    assert full - windowed_flops == windowed * 3 * 2 * 2 * spared * 1024
    assert sample_flops({**model, "window_size": [2047, 0], **keys}, 51_200) == full
    assert sample_flops({**model, "window_size": [-1, 0], **keys}, 51_200) == full


def mixtral(
    layers: int, hidden: int, heads: int, inner: int, nodes: int = 1, **more: Any
) -> tuple[StageMemory, ...]:
    sizes = gpt(layers, hidden, heads, sequence=4096, vocabulary=32_000, num_query_groups=8)
    sizes |= {"ffn_hidden_size": inner, "num_moe_experts": 8, "moe_router_topk": 2}
    more |= {"sequence_parallel": True, "expert_model_parallel_size": 8}
    return stages(training(nodes, optim="mcore_distributed_optim", **(sizes | GATED | more)))


# cuBLAS has four workspaces of 32 MiB for grouped products (transformer_engine/pytorch/cpp_extensions/
# gemm.py), which are part of the margin.
WORKSPACES = 4 * 32 * 2**20

# NVIDIA/Megatron-LM at d98e8a64, tests/functional_tests/test_cases/mixtral/*/golden_values_dev_dgx_h100.json,
# as in test_memory_measured: the peak of the last stage, and what stays between the steps. The number of GPUs
# is not given there: 128 is the least that the sizes multiply to, and with 64 the states are those measured.
MEASURED = {
    "mixtral_8x7b_tp1pp4ep8vpp8_release": (
        mixtral(
            32,
            4096,
            32,
            14336,
            8,
            **layout(2, 4, 1, 256),
            virtual_pipeline_model_parallel_size=8,
            expert_tensor_parallel_size=1,
        ),
        35_505_844_224,
        19_743_387_648,
    ),
    "mixtral_8x22b_tp2pp8ep8vpp1_release": (
        mixtral(56, 6144, 48, 16384, 16, **layout(2, 8, 1, 256)),
        28_533_706_752,
        23_002_945_536,
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_memory_of_mixtral_is_near_the_measured_one(name: str) -> None:
    model_stages, peak, allocated = MEASURED[name]
    last, overhead = model_stages[-1], LIBRARIES + WORKSPACES
    assert last.total == pytest.approx(peak - overhead, rel=0.05)
    assert last.weights + last.gradients + last.optimizer == pytest.approx(allocated - overhead, rel=0.05)


def last_stage(optim: str = "adam", **more: Any) -> StageMemory:
    """Return the last stage of a GPT of 12 layers of 512 with experts, as NVIDIA's small tests have it."""
    tensor = more["tensor_model_parallel_size"]
    sizes = gpt(12, 512, 8, sequence=1024, vocabulary=-(-50_257 // (128 * tensor)) * 128 * tensor)
    options = {"bias": False, "bias_activation_fusion": False, "sequence_parallel": tensor > 1}
    return stages(training(optim=optim, **(sizes | options | more)))[-1]


def experts(number: int, topk: int, parallel: int, **more: Any) -> dict[str, Any]:
    keys = {"num_moe_experts": number, "moe_router_topk": topk, "expert_model_parallel_size": parallel}
    return keys | more


# Some of these group the experts' products; attention without a fused kernel writes its scores.
UNFUSED = {"transformer_engine": False}
ETP = "expert_tensor_parallel_size"
SMALL_MODELS = {
    "gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4": (
        last_stage(**layout(2, 1, 4, 32), **experts(8, 2, 4, **{ETP: 1}), **UNFUSED),
        4_013_319_680 - WORKSPACES,
    ),
    "gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel": (
        last_stage(**layout(4, 2, 4, 32), **experts(4, 1, 2, **{ETP: 2}), **UNFUSED),
        1_226_082_304,
    ),
    "gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel": (
        last_stage(**layout(2, 2, 4, 32), **experts(4, 1, 2), **UNFUSED),
        2_110_856_192,
    ),
    "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer": (
        last_stage("mcore_distributed_optim", **layout(2, 1, 4, 32), **experts(8, 1, 2)),
        2_159_231_488,
    ),
    "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer": (
        last_stage(
            "mcore_distributed_optim",
            **layout(4, 2, 4, 32),
            **experts(8, 2, 2, **{ETP: 2}),
            moe_ffn_hidden_size=1024,
            moe_shared_expert_intermediate_size=512,
        ),
        1_149_626_368 - WORKSPACES,
    ),
    "gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic": (
        last_stage(
            **layout(1, 2, 4, 32),
            **experts(4, 1, 2),
            context_parallel_size=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        2_061_327_360,
    ),
}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_memory_of_small_models_with_experts_is_near_the_measured_one(name: str) -> None:
    last, peak = SMALL_MODELS[name]
    assert last.total == pytest.approx(peak - LIBRARIES, rel=0.05)


def test_memory_of_latent_attention_is_near_the_measured_one() -> None:
    """The model is gpt3_mcore_te_tp2_pp2_mla of the same tests, whose attention is not fused."""
    narrow = {"q_lora_rank": 192, "kv_lora_rank": 64, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8}
    model = gpt(4, 512, 8, sequence=1024, vocabulary=50_432) | layout(2, 2, 4, 32)
    model |= {"multi_latent_attention": True, "v_head_dim": 16, "sequence_parallel": True, **narrow}
    model |= {"share_embeddings_and_output_weights": False, "transformer_engine": False}
    last = stages(training(**model))[-1]
    assert last.total == pytest.approx(1_248_256_512 - LIBRARIES, rel=0.05)
    assert last.weights + last.gradients + last.optimizer == pytest.approx(388_269_568 - LIBRARIES, rel=0.05)


SMALL: dict[str, Any] = {
    **gpt(4, 1024, 16, sequence=2048),
    **GATED,
    **layout(1, 1, 1, 8),
    "num_moe_experts": 8,
    "moe_router_topk": 2,
}


def small_stage(**changes: Any) -> StageMemory:
    return stages(training(optim="mcore_distributed_optim", **(SMALL | changes)))[0]


def test_optimizer_of_experts_is_shared_by_their_copies() -> None:
    expert = 3 * 1024 * 4096
    routed = 4 * 8 * expert
    dense = small_stage().parameters - routed
    assert small_stage(expert_model_parallel_size=4).parameters == dense + routed // 4
    # 8 GPUs: 2 copies of an expert, 8 of all else.
    assert small_stage(expert_model_parallel_size=4).optimizer == 12 * dense // 8 + 12 * (routed // 4) // 2


def test_expert_tensor_parallel_cuts_the_experts() -> None:
    sizes = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "expert_model_parallel_size": 2}
    cut, whole = small_stage(**sizes), small_stage(**sizes, expert_tensor_parallel_size=1)
    assert whole.parameters - cut.parameters == 4 * 4 * 3 * 1024 * 4096 * 3 // 4
    # The GPUs that share an expert have each other's tokens, too.
    assert cut.activations > whole.activations


def test_layers_with_experts_are_counted_where_they_are() -> None:
    pattern = {"num_layers": 4, "moe_layer_freq": [0, 0, 1, 1], "pipeline_model_parallel_size": 2}
    config = training(**(SMALL | pattern | {"global_batch_size": 16}))
    first, last = stages(config)
    # Both have a vocabulary; the first has two dense layers instead of two with experts, a router and a norm.
    difference = 2 * (7 * 3 * 1024 * 4096 + 8 * 1024)
    assert last.parameters - first.parameters == difference + 1024


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        # Copies of a token, and the hidden units of three experts more: two halves and their product.
        ({"moe_router_topk": 5}, 3 * (2 * 1024 + 6 * 4096)),
        ({"moe_ffn_hidden_size": 1024}, -2 * 6 * 3072),
        ({"moe_shared_expert_intermediate_size": 512}, 6 * 512),
        # Two halves, one behind the function, the other, their product; and this before it is weighed.
        ({"bias_activation_fusion": False}, 2 * 3 * 2 * 4096),
        # Logits, scores and probabilities in fp32, and a mask.
        ({"num_moe_experts": 16}, 13 * 8),
        ({"moe_expert_capacity_factor": 1.5}, 0),
        ({"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}, 2048 + 6 * 4096),
        ({"moe_layer_recompute": True}, -2 * (2 * 1024 + 6 * 4096) - 13 * 8),
    ],
    ids=str,
)
def test_layer_with_experts_keeps_its_tokens_and_hidden_units(changes: dict[str, Any], more: int) -> None:
    def layer_activations(**options: Any) -> int:
        eight, nine = (small_stage(**options, num_layers=layers).activations for layers in (8, 9))
        return nine - eight

    assert layer_activations(**changes) - layer_activations() == 2048 * more


NARROW = {
    "multi_latent_attention": True,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
}


def test_narrow_queries_and_keys_are_kept_with_those_of_all_heads() -> None:
    dense = {"num_moe_experts": None}
    eight, nine = (small_stage(**NARROW, **dense, num_layers=layers).activations for layers in (8, 9))
    wide_eight, wide_nine = (small_stage(**dense, num_layers=layers).activations for layers in (8, 9))
    heads = 16 * (2 * (64 + 32) + 2 * 64)
    per_token = 2 * heads + 2 * (256 + 128 + 32) + 2 * (256 + 128) + 4 * 2 * 32
    assert (nine - eight) - (wide_nine - wide_eight) == 2048 * (per_token - 2 * 4 * 1024 - 4 * 2 * 64)


def test_fp8_keeps_copies_of_matrices_and_narrower_products() -> None:
    fp8 = {"fp8": True, "fp8_hybrid": True}
    before, after = small_stage(), small_stage(**fp8)
    model = training(**SMALL)["model"]
    layer = parts_of(model, 51_200).stacks[0].sparse
    assert after.weights - before.weights == 2 * 4 * (layer.split + layer.routed)
    assert small_stage(**fp8, fp8_params=True).weights == before.weights
    assert after.activations < before.activations


@pytest.mark.parametrize(
    "key",
    ["mtp_num_layers", "moe_latent_size", "pipeline_model_parallel_layout"],
)
def test_uncounted_features_are_named(key: str) -> None:
    config = changed(GPT, {f"model.{key}": 1})
    (finding,) = memory_problems(plan_of(config), KNOWN)
    assert finding.severity is Severity.SKIPPED
    assert f"training.model.{key}=1" in finding.message
