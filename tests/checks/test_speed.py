"""The estimate that layouts are ranked by, beside published trainings and faster options."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from launcher.attained import attained
from launcher.estimates.parallelism import Layout, Recompute
from launcher.estimates.speed import ModelWork, Speed, work_of
from launcher.estimates.values import Values
from slipway.arithmetic.gpus import GPUS
from slipway.arithmetic.layout import ParallelConfig
from tests.checks.plans import GPT, T5, changed
from tests.checks.published import CALIBRATION, HELD_OUT, STEPS, Published

NOTHING, SELECTIVE = Recompute(), Recompute("selective")
FULL = Recompute("full", "uniform", 1)
# Only the terms that the pages and the papers count: no part of a step is done once, nobody straggles.
BARE = attained({"step": 0, "straggling": 0})


def gpt(layers: int, hidden: int, heads: int, **more: Any) -> ModelWork:
    """Return the work of a GPT of Megatron's papers: 2048 tokens, 51,200 words, no fused attention yet."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    more = {"model.transformer_engine": False, **more}
    changes = {f"model.{key}": value for key, value in {**sizes, "ffn_hidden_size": 4 * hidden}.items()}
    values = Values(changed(GPT, {**changes, "model.override_vocab_size": 51_200, **more}))
    work = work_of(values, 8, "nemo")
    assert work is not None
    return work


def parallel_config_with(layout: Layout, batch: int) -> ParallelConfig:
    return ParallelConfig(
        devices=8,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=layout.virtual,
        context=layout.context,
        expert=1,
        expert_tensor=layout.tensor,
        group=layout.pipeline,
        micro=layout.micro,
        batch=batch,
    )


def seconds(work: ModelWork, layout: Layout, batch: int, nodes: int, gpu: str = "a100-80gb") -> float:
    return Speed(work, GPUS[gpu], nodes, BARE).step(layout, parallel_config_with(layout, batch))


@pytest.mark.parametrize("step", CALIBRATION, ids=str)
def test_fitted_steps_are_near_the_published_ones(step: Published) -> None:
    assert step.estimate() == pytest.approx(step.seconds, rel=0.15)


@pytest.mark.parametrize("step", HELD_OUT, ids=str)
def test_held_out_steps_are_near_the_published_ones(step: Published) -> None:
    assert step.estimate() == pytest.approx(step.seconds, rel=0.15)


def _pairs() -> list[tuple[Published, Published]]:
    """Return pairs of one layout of a source, in bf16 and in FP8."""
    halves = {
        (step.source, step.model, step.gpus, step.batch, step.layout): step for step in _steps_in("bf16")
    }
    keys = [
        (step, (step.source, step.model, step.gpus, step.batch, step.layout)) for step in _steps_in("fp8")
    ]
    return [(halves[key], step) for step, key in keys if key in halves]


def _steps_in(precision: str) -> list[Published]:
    return [step for step in STEPS if step.precision == precision]


def test_gain_of_fp8_is_near_the_published_one() -> None:
    pairs = _pairs()
    assert len(pairs) > 40
    for half, fp8 in pairs:
        gain = half.estimate() / fp8.estimate()
        assert gain == pytest.approx(half.seconds / fp8.seconds, rel=0.15), str(fp8)


def test_cost_of_full_recomputing_is_near_the_measured_one() -> None:
    """Korthikanti et al. 2022, abstract: 54.2 % of the peak on 2240 A100, and 42.1 % with recomputing all."""
    work = gpt(105, 20480, 128)
    layout = Layout(8, 35, 3, 1, 1, True, SELECTIVE)
    more = seconds(work, layout._replace(recompute=FULL, sequence_parallel=False), 2240, 280)
    assert more / seconds(work, layout, 2240, 280) == pytest.approx(54.2 / 42.1, rel=0.05)


def test_the_bubble_is_that_of_the_schedule() -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: (p - 1) / m, and with v chunks a v-th of it."""
    work = gpt(96, 12288, 96)._replace(overlaps_pipeline=True, vocabulary=1, parameters=0)
    plain = Layout(8, 8, None, 1, 1, True, NOTHING)

    def step_seconds(layout: Layout, micro_batches: int) -> float:
        return seconds(work, layout, micro_batches, 8)

    for layout, chunks in ((plain, 1), (plain._replace(virtual=2), 2), (plain._replace(virtual=6), 6)):
        # The rest of two steps' difference is 8 micro batches, of which the bubble has (p - 1) / v.
        micro_batch = (step_seconds(layout, 16) - step_seconds(layout, 8)) / 8
        assert step_seconds(layout, 8) / micro_batch - 8 == pytest.approx(7 / chunks, rel=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_a_step_with_nvlink_or_without(name: str, devices: int) -> None:
    """It has one on one GPU and on two nodes; a site's row may have GPUs that NVLink joins at no speed."""
    work = gpt(12, 768, 12)._replace(devices=devices)
    for gpu in (GPUS[name], GPUS[name]._replace(nvlink=0.0, nvlink_gpus=8)):
        for nodes, tensor in ((1, 1), (1, devices), (2, devices)):
            layout = Layout(tensor, 1, None, 1, 1, False, NOTHING)
            shape = parallel_config_with(layout, 8 * nodes)._replace(devices=devices)
            step = Speed(work, gpu, nodes, attained()).step(layout, shape)
            assert 0 < step < inf


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        # Tensor parallel leaves a node.
        (Layout(8, 2, None, 1, 1, True, NOTHING), Layout(16, 1, None, 1, 1, True, NOTHING)),
        # What is recomputed: nothing, the core of attention, half of the layers, all.
        (Layout(8, 2, None, 1, 1, True, NOTHING), Layout(8, 2, None, 1, 1, True, SELECTIVE)),
        (
            Layout(8, 2, None, 1, 1, True, SELECTIVE),
            Layout(8, 2, None, 1, 1, True, Recompute("full", "block", 6)),
        ),
        (
            Layout(8, 2, None, 1, 1, True, Recompute("full", "block", 6)),
            Layout(8, 2, None, 1, 1, True, FULL),
        ),
        # Norms and dropouts are not shared.
        (Layout(8, 2, None, 1, 1, True, NOTHING), Layout(8, 2, None, 1, 1, False, NOTHING)),
        # Small matrices.
        (Layout(8, 1, None, 1, 4, True, NOTHING), Layout(8, 1, None, 1, 1, True, NOTHING)),
        # Virtual stages make the bubble smaller.
        (Layout(4, 4, 2, 1, 1, True, NOTHING), Layout(4, 4, None, 1, 1, True, NOTHING)),
    ],
)
def test_faster_options_are_estimated_as_faster(better: Layout, worse: Layout) -> None:
    work = gpt(24, 8192, 64)._replace(overlaps_data=True)
    assert seconds(work, better, 16, 2) < seconds(work, worse, 16, 2)


def test_the_logits_make_the_last_stage_the_slowest() -> None:
    small, large = (gpt(24, 2048, 16)._replace(vocabulary=size) for size in (1_024, 262_144))
    layout = Layout(1, 8, None, 1, 4, False, NOTHING)
    alone = layout._replace(pipeline=1)
    # One of eight stages has all of the logits; without a pipeline each GPU has its share of the batch.
    slower = seconds(large, layout, 256, 1) / seconds(small, layout, 256, 1)
    assert slower > 1.5 * seconds(large, alone, 256, 1) / seconds(small, alone, 256, 1)


def test_a_newer_gpu_is_faster() -> None:
    work, layout = gpt(24, 8192, 64), Layout(8, 2, None, 1, 1, True, NOTHING)
    assert seconds(work, layout, 16, 2, "h100-80gb") < 0.6 * seconds(work, layout, 16, 2, "a100-80gb")


def test_hidden_gradients_take_no_time() -> None:
    work, layout = gpt(24, 4096, 32), Layout(1, 1, None, 1, 4, False, NOTHING)
    hidden = seconds(work._replace(overlaps_data=True), layout, 512, 2)
    assert hidden < seconds(work, layout, 512, 2)


def test_a_t5_has_two_stacks_and_half_of_the_stages_for_each() -> None:
    work = work_of(Values(T5), 8, "nemo")
    assert work is not None
    encoder, decoder = work.stacks
    assert (encoder.length, decoder.length) == (512, 128)
    assert decoder.attends_to == (128, 512)
    assert [work.stages(stack, 4) for stack in work.stacks] == [2, 2]


def test_model_without_a_size_has_no_work() -> None:
    assert work_of(Values(changed(GPT, {"model.num_layers": None})), 8, "nemo") is None
    assert work_of(Values({}), 8, "nemo") is None


def _data_wait(layout: Layout, nodes: int, **changes: Any) -> float:
    """Return the seconds that two nodes or more wait for data parallel, with nothing to hide it behind."""
    work = gpt(24, 8192, 64)._replace(**changes)
    without = work._replace(parameters=0)
    return seconds(work, layout, 1024, nodes) - seconds(without, layout, 1024, nodes)


def test_data_parallel_rings_use_all_ports_of_a_node() -> None:
    """All eight GPUs of a node are of one ring with tensor 1, and one of them is with tensor 8."""
    tensor_1, tensor_8 = Layout(1, 1, None, 1, 1, False, NOTHING), Layout(8, 1, None, 1, 1, True, NOTHING)
    # Eight times as much to send, and eight times the bandwidth, but for the ends of the ring.
    assert _data_wait(tensor_1, 16) == pytest.approx(_data_wait(tensor_8, 16), rel=0.15)


def test_scaling_of_llama_8b_with_tensor_1_is_near_the_published_one() -> None:
    """NVIDIA's figures from 8 to 128 GPUs: 0.5 % more with bf16, 2.3 % with FP8."""
    rows = [step for step in STEPS if (step.source, step.model) == ("dgxc-25.04", "llama3-8b")]
    small, large = ([step for step in rows if step.gpus == gpus] for gpus in (8, 128))
    for least, most in zip(small, large, strict=True):
        assert least.estimate() < most.estimate() < 1.03 * least.estimate()


def test_gradients_in_bf16_are_sent_in_half_of_the_time() -> None:
    layout = Layout(4, 2, None, 1, 1, True, NOTHING)
    full, half = (_data_wait(layout, 8, gradient_bytes=size) for size in (4, 2))
    # 4 + 2 bytes against 2 + 2, and the optimizer reads as much as before.
    assert 0.6 < half / full < 0.75


def test_unshared_optimizer_is_read_by_each_gpu() -> None:
    layout = Layout(1, 1, None, 1, 1, False, NOTHING)
    assert _data_wait(layout, 8, shares_optimizer=False) > _data_wait(layout, 8)


def test_next_pipeline_stage_is_in_another_node() -> None:
    """Megatron numbers pipeline ranks last: with one node NVLink joins the stages, with two the network."""
    work, layout = gpt(24, 8192, 64)._replace(parameters=0), Layout(1, 8, None, 1, 1, False, NOTHING)
    assert seconds(work, layout, 64, 1) < 0.99 * seconds(work, layout, 128, 2)


def test_ends_that_count_as_layers_make_the_stages_even() -> None:
    """126 layers, the embedding and the loss on 8 stages: 16 of them, and one less on the last."""
    work = gpt(126, 4096, 32)._replace(vocabulary=128_256)
    even = Layout(8, 8, None, 1, 1, True, NOTHING, counts_ends=True)
    uneven = even._replace(counts_ends=False)
    assert seconds(work, even, 64, 8) < seconds(work, uneven, 64, 8)
    work_with_ends = work._replace(counted_ends=(True, True))
    assert seconds(work_with_ends, uneven, 64, 8) == seconds(work, even, 64, 8)


def test_fp8_does_not_count_on_gpus_without_it() -> None:
    work, layout = gpt(24, 8192, 64), Layout(8, 2, None, 1, 1, True, NOTHING)
    fp8 = work._replace(fp8=True)
    assert seconds(fp8, layout, 16, 2) == seconds(work, layout, 16, 2)
    half, eight = (seconds(model_work, layout, 16, 2, "h100-80gb") for model_work in (work, fp8))
    assert eight < half


def test_factor_of_an_engine_scales_its_step() -> None:
    work, layout = gpt(24, 8192, 64), Layout(8, 2, None, 1, 1, True, NOTHING)
    other = work._replace(engine="megatron_lm")
    assert seconds(other, layout, 16, 2) > 1.05 * seconds(work, layout, 16, 2)


def our_gpt(**changes: Any) -> ModelWork:
    """Return the work of GPT 126M in our trainer, without Transformer Engine."""
    sizes = {"num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 3072, "num_attention_heads": 12}
    keys = {**sizes, "override_vocab_size": 50_304, "transformer_engine": False, **changes}
    work = work_of(
        Values(changed(GPT, {f"model.{key}": value for key, value in keys.items()})), 1, "megatron"
    )
    assert work is not None
    return work


def our_seconds(work: ModelWork, micro: int, tensor: int = 1) -> float:
    """Return the seconds of a step of 64 sequences on one H100 for each tensor parallel rank."""
    layout = Layout(tensor, 1, None, 1, micro, tensor > 1, NOTHING)
    config = parallel_config_with(layout, 64)._replace(devices=tensor)
    return Speed(work._replace(devices=tensor), GPUS["h100-80gb"], 1, attained()).step(layout, config)


def test_small_models_want_larger_micro_batches_without_transformer_engine() -> None:
    """Each micro batch adds the gradients of all parameters up, and launches what is not compiled."""

    def gain(work: ModelWork, tensor: int = 1) -> float:
        return our_seconds(work, 4, tensor) / our_seconds(work, 16, tensor)

    assert gain(our_gpt(transformer_engine=True)) < 1.02 < 1.025 < gain(our_gpt()) < 1.05
    assert gain(our_gpt(compile_layers=False)) > 1.5
    assert gain(our_gpt(), tensor=2) > 1.5  # nor does it compile with tensor parallel


def test_layers_in_separate_kernels_take_their_launches() -> None:
    launches = 64 * 12 * 3 * attained().megatron["launch"]
    assert launches < our_seconds(our_gpt(compile_layers=False), 1) < 1.5 * launches
    assert our_seconds(our_gpt(), 1) < 0.5 * launches


def test_small_step_of_our_trainer_is_that_by_hand() -> None:
    """Four micro batches: milliseconds of layers, logits, added gradients, the optimizer, and the rest."""
    layers, logits, added, optimizer, rest = 53.1, 18.1, 2.15, 1.6, 4.0
    layout = Layout(1, 1, None, 1, 4, False, NOTHING)
    speed = Speed(our_gpt(), GPUS["h100-80gb"], 1, attained())
    step = speed.step(layout, parallel_config_with(layout, 16)._replace(devices=1))
    assert 1000 * step == pytest.approx(layers + logits + added + optimizer + rest, rel=0.005)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True, True)),
        ({"compile_layers": "auto"}, (True, True)),
        ({"compile_layers": False}, (True, False)),
        ({"attention_backend": "local"}, (True, False)),
        ({"transformer_engine": True}, (False, False)),
    ],
)
def test_compiled_layers_are_read_from_the_configuration(
    changes: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    work = our_gpt(**changes)
    assert (work.is_plain, work.compiles) == expected


def test_properties_of_a_run_are_read_from_the_configuration() -> None:
    changes = {
        "model.fp8": True,
        "model.optim.grad_sync_dtype": "bf16",
        "model.account_for_loss_in_pipeline_split": True,
        "model.num_layers_in_first_pipeline_stage": 3,
    }
    plain, changed_work = work_of(Values(GPT), 8, "nemo"), work_of(Values(changed(GPT, changes)), 8, "nemo")
    assert plain is not None
    assert (plain.shares_optimizer, plain.gradient_bytes, plain.own_ends) == (True, 4, (None, None))
    assert changed_work == plain._replace(
        fp8=True, gradient_bytes=2, counted_ends=(False, True), own_ends=(3, None)
    )
    larger = work_of(Values(changed(T5, {"model.override_vocab_size": 250_112})), 8, "nemo")
    t5 = work_of(Values(T5), 8, "nemo")
    assert t5 is not None and larger is not None
    assert (t5.family, larger.family) == ("t5", "mt5")
