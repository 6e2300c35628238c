"""A very small T5, trained on text: alone, on two ranks, and continued."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.trainer.ranks import Run
from tests.trainer.t5 import SEQ_LENGTH, T5, both
from tests.trainer.test_layouts import FIRST, LATER
from tests.warm import WarmPool

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

CALLBACK = "exp_manager.checkpoint_callback_params"
COMMON = {
    **T5,
    # test_layouts has as few steps, for which its tolerances hold.
    "trainer.max_steps": 4,
    "trainer.val_check_interval": 4,
    "trainer.limit_val_batches": 2,
    "model.optim.sched.max_steps": 4,
}
TENSOR = {"model.tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "model.sequence_parallel": True}
DROPOUT = both(hidden_dropout=0.1, attention_dropout=0.1)
RELATIVE = both(position_embedding_type="relative", normalization="rmsnorm", bias=False)
UNTIED = {"model.share_decoder_tokens_head_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {"nemo": {}, "paper": {**RELATIVE, **UNTIED}}


def run_t5(trainings: Any, pool: WarmPool, name: str, changes: dict[str, Any], world: int) -> Run:
    run = Run(trainings, pool, f"t5_{name}", {**COMMON, **changes}, world)
    assert run.end() == [0] * world, run.output()
    return run


def numbers(run: Run) -> list[float]:
    steps = [line[name] for line in run.lines("train") for name in ("loss", "grad_norm")]
    return [*steps, *(line["val_loss"] for line in run.lines("validation"))]


@pytest.fixture(scope="module", params=FAMILIES)
def single_rank(request: pytest.FixtureRequest, trainings: Any, pool: WarmPool) -> tuple[str, Run]:
    family = request.param
    return family, run_t5(trainings, pool, f"{family}_alone", FAMILIES[family], 1)


@pytest.mark.parametrize(("layout", "sizes"), [("tensor", TENSOR), ("sequence", SEQUENCE), ("data", {})])
def test_two_ranks_compute_the_numbers_of_one(
    single_rank: tuple[str, Run], trainings: Any, pool: WarmPool, layout: str, sizes: dict[str, Any]
) -> None:
    family, single = single_rank
    run = run_t5(trainings, pool, f"{family}_{layout}", {**FAMILIES[family], **sizes}, 2)
    ours, theirs = numbers(run), numbers(single)
    assert len(ours) == 2 * 4 + 1
    assert ours[:2] == pytest.approx(theirs[:2], rel=FIRST)
    assert ours == pytest.approx(theirs, rel=LATER)
    assert run.lines("start")[0]["parameters"] == single.lines("start")[0]["parameters"]
    print(f"{family} {layout}: {max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)):.1e}")


def test_reports_describe_a_t5(single_rank: tuple[str, Run]) -> None:
    run = single_rank[1]
    output = run.output()
    assert "T5: " in output
    assert "2 + 2 layers" in output
    assert "batch: 8 x 32 tokens = 256 a step | each from 34 of text: 5 in 2 spans become 8 targets" in output
    assert "padded to 12" in output
    assert run.lines("start")[0]["tokens_per_step"] == 8 * SEQ_LENGTH
    (data,) = run.lines("data")
    # The targets without the padding are 8 of each evaluated window.
    assert data["tokens"] % 8 == 0
    assert data["has_sentinels"]
    assert 1 < data["unigram_entropy"] < math.log(300 + 2 + 1)
    losses = [line["loss"] for line in run.lines("train")]
    assert losses[-1] < losses[0] - 0.2
    assert all("megatron_t5--val_loss=" in name for name in run.checkpoints())


def test_a_resumed_t5_is_bitwise_the_same_with_dropout(trainings: Any, pool: WarmPool) -> None:
    changes = {**DROPOUT, **TENSOR, **RELATIVE}
    whole = run_t5(trainings, pool, "whole", changes, 2)
    run_t5(trainings, pool, "halves", {**changes, "trainer.max_steps": 2, "trainer.val_check_interval": 2}, 2)
    halves = run_t5(trainings, pool, "halves", changes, 2)
    assert "step=2" in halves.lines("start")[1]["resumed_from"]

    def curve(run: Run) -> list[tuple[Any, ...]]:
        return [(line["step"], line["loss"], line["grad_norm"]) for line in run.lines("train")]

    assert curve(halves) == curve(whole)
    assert halves.lines("validation")[-1]["val_loss"] == whole.lines("validation")[-1]["val_loss"]


def test_a_checkpoint_of_another_encoder_is_refused(trainings: Any, pool: WarmPool) -> None:
    short = {**COMMON, "trainer.max_steps": 1, "trainer.val_check_interval": 1}
    assert Run(trainings, pool, "t5_other", short, 1).end() == [0]
    other = {**short, "trainer.max_steps": 2, "model.encoder.ffn_hidden_size": 32}
    refused = Run(trainings, pool, "t5_other", other, 1)
    assert refused.end() == [2]
    assert "the model has encoder_ffn_hidden_size=32, but the checkpoint" in refused.output()
