"""The estimate that layouts are ranked by, beside published trainings and what is known to be faster."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.hardware import GPUS
from launcher.preflight.estimates.speed import Layout, Recompute, Speed
from launcher.preflight.estimates.work import Work, work_of
from launcher.preflight.shape import Shape
from launcher.preflight.values import Values
from tests.preflight.plans import GPT, T5, changed

NOTHING, SELECTIVE = Recompute(), Recompute("selective")
FULL = Recompute("full", "uniform", 1)
A100 = GPUS["a100-80gb"]


def gpt(layers: int, hidden: int, heads: int, **more: Any) -> Work:
    """A GPT of Megatron's papers: 2048 tokens, a vocabulary of 51,200, and no fused attention yet."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    more = {"model.transformer_engine": False, **more}
    changes = {f"model.{key}": value for key, value in {**sizes, "ffn_hidden_size": 4 * hidden}.items()}
    values = Values(changed(GPT, {**changes, "model.override_vocab_size": 51_200, **more}))
    work = work_of(values, 8, "megatron_lm")
    assert work is not None
    return work


def seconds(work: Work, layout: Layout, batch: int, nodes: int, gpu: str = "a100-80gb") -> float:
    shape = Shape(
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
    return Speed(work, GPUS[gpu], nodes).step(layout, shape)


# Korthikanti et al. 2022 (arXiv 2205.05198), table 5, "present work": sequence parallel, selective recompute.
@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pipeline", "virtual", "micro", "batch", "published"),
    [
        (48, 6144, 64, 1, None, 4, 4, 1.10),
        (96, 12288, 96, 8, 3, 1, 64, 13.75),
        (105, 20480, 128, 35, 3, 1, 280, 37.83),
        (128, 25600, 160, 64, None, 1, 512, 71.49),
    ],
)
def test_published_steps(
    layers: int,
    hidden: int,
    heads: int,
    pipeline: int,
    virtual: int | None,
    micro: int,
    batch: int,
    published: float,
) -> None:
    layout = Layout(8, pipeline, virtual, 1, micro, True, SELECTIVE)
    estimate = seconds(gpt(layers, hidden, heads), layout, batch, pipeline)
    assert estimate == pytest.approx(published, rel=0.1)


def test_recomputing_all_costs_a_530b_what_it_was_measured_to() -> None:
    """Korthikanti et al. 2022, abstract: 54.2 % of the peak on 2240 A100, and 42.1 % with recomputing all."""
    work = gpt(105, 20480, 128)
    layout = Layout(8, 35, 3, 1, 1, True, SELECTIVE)
    more = seconds(work, layout._replace(recompute=FULL, sequence_parallel=False), 2240, 280)
    assert more / seconds(work, layout, 2240, 280) == pytest.approx(54.2 / 42.1, rel=0.05)


def test_the_bubble_is_that_of_the_schedule() -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: (p - 1) / m, and with v chunks a v-th of it."""
    work = gpt(96, 12288, 96)._replace(overlaps_pipeline=True, vocabulary=1)
    one = Layout(8, 8, None, 1, 1, True, NOTHING)

    def of(layout: Layout, micro_batches: int) -> float:
        return seconds(work, layout, micro_batches, 8)

    for layout, chunks in ((one, 1), (one._replace(virtual=2), 2), (one._replace(virtual=6), 6)):
        # The rest of two steps' difference is 8 micro batches, of which the bubble has (p - 1) / v.
        each = (of(layout, 16) - of(layout, 8)) / 8
        assert of(layout, 8) / each - 8 == pytest.approx(7 / chunks, rel=1e-6)


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
def test_what_is_known_to_be_faster_is(better: Layout, worse: Layout) -> None:
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


def test_gradients_that_are_hidden_are_not_waited_for() -> None:
    work, layout = gpt(24, 4096, 32), Layout(1, 1, None, 1, 4, False, NOTHING)
    hidden = seconds(work._replace(overlaps_data=True), layout, 512, 2)
    assert hidden < seconds(work, layout, 512, 2)


def test_a_t5_has_two_stacks_and_half_of_the_stages_for_each() -> None:
    work = work_of(Values(T5), 8, "nemo")
    assert work is not None
    encoder, decoder = work.stacks
    assert (encoder.length, decoder.length) == (512, 128)
    assert decoder.attends_to == (128, 512)
    assert (encoder.reductions, decoder.reductions) == (2, 3)
    assert [work.stages(stack, 4) for stack in work.stacks] == [2, 2]
    assert len(list(decoder.products(2))) == len(list(encoder.products(2))) + 2


def test_sizes_that_are_not_there_are_not_counted_with() -> None:
    assert work_of(Values(changed(GPT, {"model.num_layers": None})), 8, "nemo") is None
    assert work_of(Values({}), 8, "nemo") is None
