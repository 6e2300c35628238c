"""Time and cost, against trainings that others published."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from launcher.checks.facts import Facts
from launcher.checks.findings import Severity
from launcher.checks.layout_search import LayoutSearch
from launcher.checks.rules.runs import length_problems
from launcher.cli.estimate_views import cost_lines
from launcher.config.schema import Assumptions
from launcher.estimates.cost import Cost, amount_of, count_samples, estimate_cost
from launcher.estimates.values import Values
from launcher.plan import Chain, Plan
from slipway.trainer.config.rampup import Rampup
from tests.checks.plans import GPT, T5, changed, plan_of

DAY = 86400


def model(layers: int, hidden: int, heads: int, vocabulary: int = 51_200, **others: Any) -> dict[str, Any]:
    """Return changes to a plan's GPT."""
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": 4 * hidden,
        "override_vocab_size": vocabulary,
        **others,
    }
    return {f"model.{name}": value for name, value in sizes.items()}


def llama(
    layers: int, hidden: int, heads: int, ffn: int, groups: int, vocabulary: int, length: int
) -> dict[str, Any]:
    return model(
        layers,
        hidden,
        heads,
        vocabulary,
        ffn_hidden_size=ffn,
        num_query_groups=groups,
        encoder_seq_length=length,
        activation="swiglu",
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


GPT_22B, GPT_175B = model(48, 6144, 64), model(96, 12288, 96)
GPT_530B, GPT_1T = model(105, 20480, 128), model(128, 25600, 160)
LLAMA_405B = llama(126, 16384, 128, 53248, 8, 128_256, 8192)


def gpt_plan(
    changes: dict[str, Any],
    *,
    gpus: int = 8,
    batch: int = 8,
    tensor: int = 1,
    pipeline: int = 1,
    steps: int = 1,
    gpu: str | None = "a100-80gb",
    limit: str | None = "1-00:00:00",
    links: int = 1,
    assumed: Assumptions | None = None,
) -> Plan:
    layout = {
        "model.micro_batch_size": 1,
        "model.global_batch_size": batch,
        "model.tensor_model_parallel_size": tensor,
        "model.pipeline_model_parallel_size": pipeline,
        "trainer.num_nodes": gpus // 8,
        "trainer.max_steps": steps,
    }
    plan = plan_of(changed(GPT, {**layout, **changes}), resources={"gpu": gpu, "time_limit": limit})
    job = replace(plan.job, chain=Chain(links=links))
    return replace(plan, job=job, assumptions=assumed or Assumptions())


def cost_of(changes: dict[str, Any], *, mfu: float | None = None, **options: Any) -> Cost:
    cost = estimate_cost(gpt_plan(changes, assumed=Assumptions(mfu=mfu), **options))
    assert cost is not None
    return cost


# Where all layers are recomputed, a quarter of the GPUs' operations is recomputation.
MODEL_PART = 3 / 4


@pytest.mark.parametrize(
    ("changes", "batch", "gpus", "layout", "mfu", "seconds"),
    [
        # Korthikanti et al. 2022 (arXiv 2205.05198), table 5.
        (GPT_22B, 4, 8, (8, 1), 0.415, 1.10),
        (GPT_175B, 64, 64, (8, 8), 0.514, 13.75),
        (GPT_530B, 280, 280, (8, 35), 0.560, 37.83),
        (GPT_1T, 512, 512, (8, 64), 0.563, 71.49),
        # Megatron-LM, README.md of 2022: "each iteration takes around 32 seconds resulting in 138 teraFLOPs
        # per GPU", with all layers recomputed.
        (GPT_175B, 1536, 1024, (8, 16), MODEL_PART * 138 / 312, 32),
        # Smith et al. 2022 (arXiv 2201.11990), section 2.4: 126, 121 and 113 TFLOP/s, with all recomputed.
        (GPT_530B, 1920, 2240, (8, 35), MODEL_PART * 126 / 312, 60.1),
        (GPT_530B, 1920, 2800, (8, 35), MODEL_PART * 121 / 312, 50.2),
        (GPT_530B, 1920, 3360, (8, 35), MODEL_PART * 113 / 312, 44.4),
    ],
)
def test_seconds_of_a_step_are_near_the_published_ones(
    changes: dict[str, Any], batch: int, gpus: int, layout: tuple[int, int], mfu: float, seconds: float
) -> None:
    tensor, pipeline = layout
    cost = cost_of(changes, gpus=gpus, batch=batch, tensor=tensor, pipeline=pipeline, mfu=mfu)
    assert cost.gpus == gpus
    assert cost.seconds_per_step == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "tokens", "gpus", "layout", "teraflops", "days"),
    [
        # Narayanan et al. 2021 (arXiv 2104.04473), section 5.1, with all layers recomputed.
        (GPT_175B, 300e9, 1024, (8, 16), MODEL_PART * 140, 34),
        (GPT_1T, 450e9, 3072, (8, 64), MODEL_PART * 163, 84),
    ],
)
def test_days_are_near_the_published_ones(
    changes: dict[str, Any],
    tokens: float,
    gpus: int,
    layout: tuple[int, int],
    teraflops: float,
    days: float,
) -> None:
    tensor, pipeline = layout
    batch, mfu = 1536, teraflops / 312
    steps = round(tokens / batch / 2048)
    cost = cost_of(changes, gpus=gpus, batch=batch, tensor=tensor, pipeline=pipeline, steps=steps, mfu=mfu)
    assert cost.tokens == steps * batch * 2048
    assert cost.seconds / DAY == pytest.approx(days, rel=0.05)
    assert cost.gpu_hours == pytest.approx(days * 24 * gpus, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "teraflops", "tokens_per_second", "days"),
    [
        # NeMo-Megatron-Launcher, examples/README.md of June 2024: per H100 with FP8, and the days for 10T
        # tokens on 1,024 of them.
        (model(24, 4096, 32), 755, 23117, None),
        (model(44, 6144, 48), 719, 5611, 20),
        (GPT_175B, 797, 741, 153),
        (llama(32, 4096, 32, 11008, 32, 32_000, 4096), 744, 16154, None),
        (llama(40, 5120, 40, 13824, 40, 32_000, 4096), 727, 8344, 14),
        (llama(80, 8192, 64, 28672, 8, 32_000, 4096), 737, 1659, 68),
        (llama(32, 4096, 32, 14336, 8, 128_256, 8192), 688, 11879, 10),
        (llama(80, 8192, 64, 28672, 8, 128_256, 8192), 695, 1444, 78),
    ],
)
def test_tokens_per_second_are_the_published_ones(
    changes: dict[str, Any], teraflops: float, tokens_per_second: float, days: float | None
) -> None:
    length = changes.get("model.encoder_seq_length", 2048)
    steps = round(10e12 / 1024 / length)
    cost = cost_of(changes, gpus=1024, batch=1024, gpu="h100-80gb", steps=steps, mfu=teraflops / 989.4)
    # To the digits that are printed.
    assert cost.tokens / cost.seconds / 1024 == pytest.approx(tokens_per_second, rel=0.002)
    if days is not None:
        assert cost.seconds / DAY == pytest.approx(days, abs=0.5)


def test_flops_are_near_the_published_ones() -> None:
    # Llama team 2024 (arXiv 2407.21783), section 1: 3.8e25 FLOPs for 15.6T tokens, attention's left out.
    cost = cost_of(LLAMA_405B, gpus=1024, batch=1024, steps=round(15.6e12 / 1024 / 8192))
    assert cost.parameters == pytest.approx(405e9, rel=0.005)
    assert cost.flops == pytest.approx(3.8e25, rel=0.1)


def test_ramp_up_reads_as_many_samples_as_the_trainer() -> None:
    for start, increment, samples, end, steps in [
        (16, 16, 5_859, 1536, 400),
        (16, 16, 5_859, 1536, 40),
        (32, 32, 500, 256, 5),
        (2, 2, 7, 8, 100),
        (1, 3, 100, 10, 33),
        (8, 8, 1, 64, 3),
    ]:
        rampup, consumed = Rampup(start, increment, samples, end), 0
        for _ in range(steps):
            consumed += rampup(consumed)
        values = Values({"model": {"rampup_batch_size": [start, increment, samples]}})
        assert count_samples(values, end, steps) == consumed
    assert count_samples(Values({"model": {"rampup_batch_size": "no list"}}), 8, 3) == 24


@pytest.mark.parametrize(
    ("limit", "links"),
    [
        # 34.8 days: half an hour of each day is for the last checkpoint, or a sixth of a short limit.
        ("1-00:00:00", 36),
        ("35-00:00:00", 1),
        ("01:00:00", 1002),
        (None, None),
        ("UNLIMITED", None),
        ("no limit", None),
    ],
)
def test_time_limit_sets_the_number_of_jobs(limit: str | None, links: int | None) -> None:
    cost = cost_of(GPT_175B, gpus=1024, batch=1024, steps=143_051, mfu=105 / 312, limit=limit)
    assert cost.seconds / DAY == pytest.approx(34.8, rel=0.005)
    assert cost.links == links


def test_spare_nodes_cost_as_much_as_the_others() -> None:
    plan = gpt_plan(GPT_22B)
    resources = replace(plan.job.resources, spares=plan.job.resources.nodes)
    spared = estimate_cost(replace(plan, job=replace(plan.job, resources=resources)))
    alone = estimate_cost(plan)
    assert alone is not None and spared is not None
    assert (spared.seconds, spared.gpu_hours) == (alone.seconds, pytest.approx(2 * alone.gpu_hours))


def test_price_is_that_of_the_gpu_hours() -> None:
    free = estimate_cost(gpt_plan(GPT_22B))
    paid = estimate_cost(gpt_plan(GPT_22B, assumed=Assumptions(gpu_hour_price=2.5)))
    assert free is not None and paid is not None
    assert free.price is None
    assert paid.price == 2.5 * paid.gpu_hours == 2.5 * free.gpu_hours


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.accelerator": "cpu"},
        {"trainer.precision": 32},
        {"trainer.max_steps": None},
        {"model.num_layers": "many"},
        {"model.kv_channels": [1]},
        {"model.override_vocab_size": None},
        {"model.override_vocab_size": None, "model.tokenizer": "a string"},
        {"model.max_position_embeddings": None},
        {"model.num_moe_experts": 8},
        {"model.global_batch_size": 7},
    ],
)
def test_unknown_cost_is_none(changes: dict[str, Any]) -> None:
    assert estimate_cost(gpt_plan(GPT_22B)) is not None
    assert estimate_cost(gpt_plan({**GPT_22B, **changes})) is None


def test_experts_need_a_stated_mfu() -> None:
    experts = {**GPT_22B, "model.num_moe_experts": 8, "model.moe_router_topk": 2}
    (finding,) = length_problems(gpt_plan(experts), Facts())
    assert finding.severity is Severity.SKIPPED
    assert "training.model.num_moe_experts=8: the time of experts is not modelled" in finding.message
    # 2 of 8 experts are computed, all are there.
    dense, sparse = cost_of(GPT_22B, mfu=0.3), cost_of(experts, mfu=0.3)
    assert 1.5 < sparse.flops / dense.flops < 2
    assert 5 < sparse.parameters / dense.parameters < 6
    # Amounts that do not depend on the time are known without it.
    amount = amount_of(gpt_plan(experts))
    assert amount is not None
    assert {field: getattr(sparse, field) for field in asdict(amount)} == asdict(amount)
    assert [name for name, _ in cost_lines(gpt_plan(experts), amount)] == ["compute", "space"]


def test_a_stated_mfu_counts_in_any_precision() -> None:
    cost = cost_of({**GPT_22B, "trainer.precision": 32}, mfu=0.05)
    assert (cost.mfu, cost.mfu_source) == (0.05, "estimates.mfu")


def test_a_job_without_a_configuration_costs_nothing() -> None:
    assert estimate_cost(plan_of(None)) is None


def test_layout_changes_the_time() -> None:
    """A bubble, recomputing all, and groups that leave their node take time, unless an MFU is stated."""
    options: dict[str, Any] = {"gpus": 64, "batch": 64, "gpu": "h100-80gb"}
    good = cost_of(GPT_175B, tensor=8, pipeline=8, **options)
    idle = cost_of(GPT_175B, tensor=1, pipeline=48, gpus=384, batch=8, gpu="h100-80gb")
    # 47 of 55 parts of the step are the bubble.
    assert idle.mfu < 0.3 * good.mfu
    full = {
        "model.activations_checkpoint_granularity": "full",
        "model.activations_checkpoint_method": "uniform",
        "model.activations_checkpoint_num_layers": 1,
    }
    recomputing = cost_of({**GPT_175B, **full}, tensor=8, pipeline=8, **options)
    assert 1.2 < recomputing.seconds_per_step / good.seconds_per_step < 1.35
    wide = cost_of(GPT_175B, tensor=32, pipeline=2, **options)
    assert wide.seconds_per_step > 1.5 * good.seconds_per_step
    assert good.mfu_source == "this layout's, by NeMo on h100"
    stated = [cost_of(GPT_175B, tensor=tensor, mfu=0.4, **options) for tensor in (1, 32)]
    assert stated[0].seconds_per_step == stated[1].seconds_per_step


def test_check_and_suggest_estimate_the_same_step() -> None:
    plan = gpt_plan(GPT_175B, gpus=128, batch=256, tensor=8, pipeline=8, gpu="h100-80gb")
    cost, own = estimate_cost(plan), LayoutSearch(plan, Facts()).own
    assert cost is not None and own is not None
    assert cost.seconds_per_step == own.seconds


def test_source_of_the_time_is_that_of_the_engine() -> None:
    plan = gpt_plan(GPT_22B, tensor=8, gpu="h100-80gb")
    nemo, other = (
        estimate_cost(replace(plan, job=replace(plan.job, engine=engine)))
        for engine in ("nemo", "megatron_lm")
    )
    assert nemo is not None and other is not None
    assert other.seconds > 1.05 * nemo.seconds
    assert other.mfu_source == "this layout's, by Megatron-LM on h100"


def test_compiled_layers_count_as_nemos() -> None:
    model = {**GPT_22B, "model.transformer_engine": False}
    plans = [gpt_plan(model, tensor=tensor, gpu="h100-80gb") for tensor in (1, 8)]
    costs = [estimate_cost(replace(plan, job=replace(plan.job, engine="megatron"))) for plan in plans]
    assert [cost.mfu_source for cost in costs if cost is not None] == [
        f"this layout's, by {world} on h100; assumed: no measurement of our trainer"
        for world in ("NeMo", "Megatron-LM")
    ]


def test_gpu_without_published_trainings_is_named() -> None:
    cost = cost_of(GPT_22B, tensor=8, gpu="l40s-48gb")
    assert cost.mfu_source == "this layout's, by NeMo on a100; assumed: no published trainings on l40s"
    assert cost_of(GPT_22B, tensor=8, gpu="h200-141gb").mfu_source == "this layout's, by NeMo on h100"


@pytest.mark.parametrize(
    ("engine", "gpu", "changes", "attained", "source"),
    [
        ("nemo", "v100-32gb", {}, {}, "; assumed: no published trainings on v100"),
        (
            "nemo",
            "gb300-279gb",
            {},
            {},
            ", by NeMo on b200; assumed: no published trainings on gb300 in bf16",
        ),
        ("nemo", "gb300-279gb", {"model.fp8": True}, {}, ", by NeMo on gb300"),
        ("megatron", "h100-80gb", {}, {}, ", by Megatron-LM on h100; assumed: no measurement of our trainer"),
        (
            "megatron_lm",
            "a100-80gb",
            {},
            {},
            ", by NeMo on a100; assumed: Megatron-LM is measured on h100 alone",
        ),
        (
            "nemo",
            "h100-80gb",
            {},
            {"like": {"h100": "v100"}},
            "; assumed: no published trainings on v100; h100 taken for v100 by estimates.attained",
        ),
        (
            "nemo",
            "l4-24gb",
            {},
            {"gpus": {"l4": {"half": 0.5, "attention": 0.4}}},
            "; changed by estimates.attained",
        ),
        ("nemo", "h100-80gb", {}, {"links": 0.7}, ", by NeMo on h100; changed by estimates.attained"),
        (
            "nemo",
            "l4-24gb",
            {"model.fp8": True},
            {},
            ", by NeMo on a100; assumed: no published trainings on l4; FP8 not counted",
        ),
    ],
)
def test_assumptions_are_named(
    engine: str, gpu: str, changes: dict[str, Any], attained: dict[str, Any], source: str
) -> None:
    plan = gpt_plan({**GPT_22B, **changes}, tensor=8, gpu=gpu, assumed=Assumptions(attained=attained))
    cost = estimate_cost(replace(plan, job=replace(plan.job, engine=engine)))
    assert cost is not None
    assert cost.mfu_source == f"this layout's{source}"


def test_constants_of_a_site_change_the_time() -> None:
    slow = Assumptions(attained={"gpus": {"a100": {"half": 0.4}}})
    cost = estimate_cost(gpt_plan(GPT_22B, tensor=8, assumed=slow))
    assert cost is not None
    assert cost.seconds > 1.5 * cost_of(GPT_22B, tensor=8).seconds


def t5_cost(gpu: str, **changes: Any) -> Cost:
    config = changed(T5, {f"model.{name}": value for name, value in changes.items()})
    cost = estimate_cost(plan_of(config, resources={"gpu": gpu}))
    assert cost is not None
    return cost


def test_a_t5_counts_the_tokens_of_its_encoder() -> None:
    cost = t5_cost("a100-80gb", override_vocab_size=29_184)
    assert cost.tokens == 1000 * 256 * 512
    # By hand: 12 layers of 512 tokens, 12 of 128 that attend to these too, and the logits of 128.
    width, inner = 768, 2048
    encoder = 8 * 512 * width**2 + 4 * 512 * 512 * width + 4 * 512 * width * inner
    own = 8 * 128 * width**2 + 4 * 128 * 128 * width + 4 * 128 * width * inner
    cross = 4 * 128 * width**2 + 4 * 512 * width**2 + 4 * 128 * 512 * width
    sample = 3 * (12 * (encoder + own + cross) + 2 * 128 * width * 29_184)
    assert cost.flops_per_token == sample / 512
    assert cost.mfu_source == "this layout's, by NeMo on a100"
    # An mT5, with its vocabulary, is slower than its operations tell.
    assert t5_cost("a100-80gb", override_vocab_size=250_112).mfu < cost.mfu
    assert t5_cost("h100-80gb", override_vocab_size=29_184).seconds < cost.seconds


def test_short_chain_is_reported_with_the_jobs_that_it_takes() -> None:
    month: dict[str, Any] = {
        "gpus": 1024,
        "batch": 1024,
        "steps": 143_051,
        "assumed": Assumptions(mfu=105 / 312),
    }
    (finding,) = length_problems(gpt_plan(GPT_175B, links=10, **month), Facts())
    assert finding.message == (
        "resilience.links=10: 10 jobs of 1-00:00:00 end before the training does:"
        " about 34.8 days on 1024 GPUs at MFU 0.34, which is 36 jobs"
    )
    assert finding.fix == "resilience.links=36, a longer training.run.time_limit, or more nodes"
    assert [*length_problems(gpt_plan(GPT_175B, links=36, **month), Facts())] == []
    # Whoever wants no chain launches again by hand.
    assert [*length_problems(gpt_plan(GPT_175B, links=1, **month), Facts())] == []


def test_training_of_years_is_a_warning() -> None:
    options: dict[str, Any] = {
        "gpus": 64,
        "batch": 1024,
        "steps": 143_051,
        "assumed": Assumptions(mfu=105 / 312),
    }
    (finding,) = length_problems(gpt_plan(GPT_175B, **options), Facts())
    assert finding.message == (
        "training.trainer.max_steps=143051: more than a year: about 556 days on 64 GPUs at MFU 0.34"
        " for 299,999,690,752 tokens"
    )
