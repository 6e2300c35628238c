"""Estimates of memory against the numbers that papers print: 22B, 175B, 530B and 1T, and ZeRO's.

Layouts: Korthikanti et al. 2022, arXiv 2205.05198, table 3. There s = 2048 and v = 51200.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.checks.trainings import GIB, gpt, layout, stages, training


class Layout(NamedTuple):
    """A row of table 3; `scores` is 5 a s / h, of sections 4.1 and 5."""

    layers: int
    hidden: int
    heads: int
    pipeline: int
    virtual: int | None
    micro: int
    batch: int
    nodes: int
    scores: float


TENSOR = 8
LAYOUTS = {
    "22B": Layout(48, 6144, 64, 1, None, 4, 4, 1, 106.7),
    "175B": Layout(96, 12288, 96, 8, 3, 1, 64, 8, 80),
    "530B": Layout(105, 20480, 128, 35, 3, 1, 280, 35, 64),
    "1T": Layout(128, 25600, 160, 64, None, 1, 512, 64, 64),
}
# Table 2, the activations of a layer in multiples of s b h at t = 8: without the scores, and their part.
TABLE_2 = {
    "tensor": (13, 1 / 8),
    "tensor + sequence": (4.25, 1 / 8),
    "tensor + selective": (13, 0),
    "tensor + sequence + selective": (4.25, 0),
    "full": (2, 0),
}


def recompute_keys(name: str) -> dict[str, Any]:
    granularity = "selective" if "selective" in name else "full" if name == "full" else None
    return {
        "transformer_engine": False,
        "sequence_parallel": "sequence" in name,
        "activations_checkpoint_granularity": granularity,
        "activations_checkpoint_method": "uniform" if granularity == "full" else None,
        "activations_checkpoint_num_layers": 1 if granularity == "full" else None,
    }


def first_stage(row: Layout, times: int = 1, engine: str = "megatron_lm", **changes: Any) -> int:
    """Return the activations of the first pipeline stage of a model with `times` the layers."""
    config = training(
        row.nodes,
        **gpt(times * row.layers, row.hidden, row.heads),
        **layout(TENSOR, row.pipeline, row.micro, row.batch),
        virtual_pipeline_model_parallel_size=row.virtual,
        **changes,
    )
    return stages(config, engine)[0].activations


@pytest.mark.parametrize("recompute", TABLE_2)
@pytest.mark.parametrize("size", LAYOUTS)
def test_a_layer_keeps_what_table_2_says(size: str, recompute: str) -> None:
    """The factor for interleaving is that of section 4.2.3: 1.29 for 175B, 1.32 for 530B."""
    row, (without_scores, part) = LAYOUTS[size], TABLE_2[recompute]
    of_all_layers = first_stage(row, 2, **recompute_keys(recompute)) - first_stage(
        row, 1, **recompute_keys(recompute)
    )
    interleaving = {"175B": 1.29, "530B": 1.32}.get(size, 1)
    expected = (
        (without_scores + part * row.scores) * 2048 * row.micro * row.hidden * row.layers * interleaving
    )
    assert of_all_layers == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("size", "saving"), [("175B", 0.70), ("530B", 0.65)])
def test_selective_recomputing_saves_what_section_5_says(size: str, saving: float) -> None:
    none, selective = (
        first_stage(LAYOUTS[size], **recompute_keys(name))
        for name in ("tensor + sequence", "tensor + sequence + selective")
    )
    assert 1 - selective / none == pytest.approx(saving, rel=0.05)


def test_our_trainer_keeps_the_outputs_of_a_stage() -> None:
    """Appendix B: 2.73 GB on the first stage of 530B; Megatron-LM frees what it has sent, our trainer not."""
    row = LAYOUTS["530B"]._replace(virtual=None)
    outputs = first_stage(row, engine="megatron") - first_stage(row)
    assert outputs / GIB == pytest.approx(2.73, rel=0.05)


def test_memory_beside_the_layers_is_that_of_section_4_3() -> None:
    """Section 4.3, of 22B: the embedding's dropout s b h / t, the last norm and the output 4 s b h / t, and
    4 s b v / t for the logits in fp32, of whose gradients the paper does not speak.
    """
    row = LAYOUTS["22B"]
    changes = {"sequence_parallel": True}
    stage = stages(
        training(1, **gpt(row.layers, row.hidden, row.heads), **layout(TENSOR, 1, 4, 4), **changes)
    )[0]
    beside = 2 * first_stage(row, 1, **changes) - first_stage(row, 2, **changes)
    assert beside == pytest.approx(5 * 2048 * 4 * 6144 / 8, rel=0.05)
    assert stage.logits * 4 / 6 == pytest.approx(4 * 2048 * 4 * 51_200 / 8, rel=0.05)


# Narayanan et al. 2021, arXiv 2104.04473, table 1: billions of parameters, heads, hidden size, layers, t, p.
TABLE_1 = [
    (1.7, 24, 2304, 24, 1, 1),
    (3.6, 32, 3072, 30, 2, 1),
    (7.5, 32, 4096, 36, 4, 1),
    (18.4, 48, 6144, 40, 8, 1),
    (39.1, 64, 8192, 48, 8, 2),
    (76.1, 80, 10240, 60, 8, 4),
    (145.6, 96, 12288, 80, 8, 8),
    (310.1, 128, 16384, 96, 8, 16),
    (529.6, 128, 20480, 105, 8, 35),
    (1008.0, 160, 25600, 128, 8, 64),
]


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers", "tensor", "pipeline"), TABLE_1)
def test_stages_together_have_all_parameters(
    billions: float, heads: int, hidden: int, layers: int, tensor: int, pipeline: int
) -> None:
    nodes = max(pipeline * tensor // 8, 1)
    config = training(nodes, **gpt(layers, hidden, heads), **layout(tensor, pipeline, 1, 64))
    parameters = sum(stage.parameters for stage in stages(config)) * tensor
    if pipeline > 1:
        parameters -= hidden * 51_200  # the last stage's copy of the embedding
    # Each tensor-parallel rank has its own positions, norms and biases.
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01, abs=0.05)


@pytest.mark.parametrize(
    ("ranks", "gigabytes"), [(1, 120), (4, 52.5), (16, 35.6), (64, 31.4), (256, 30.4), (1024, 30.1)]
)
def test_states_of_a_7_5b_model_are_those_of_the_zero_paper(ranks: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, table 1 (64: figure 1 too), P_os: weights and gradients of 2
    bytes, and 12 bytes that all ranks share.
    """
    devices = min(ranks, 8)
    config = training(
        ranks // devices,
        devices=devices,
        optim="mcore_distributed_optim",
        **gpt(36, 4096, 32),
        **layout(1, 1, 1, 1024),
    )
    config["model"]["optim"]["grad_sync_dtype"] = "bf16"
    stage = stages(config, "nemo")[0]
    per_parameter = (stage.weights + stage.gradients + stage.optimizer) / stage.parameters
    assert per_parameter * 7.5 == pytest.approx(gigabytes, rel=0.002)


def test_states_and_checkpoints_of_mt_nlg_are_the_published_ones() -> None:
    """Smith et al. 2022, arXiv 2201.11990, section 2.1: 20 bytes of each parameter in fp16, over 10
    terabytes; 8.8 gigabytes for the inputs of all layers of one micro batch.
    """
    config = training(35, **gpt(105, 20480, 128), **layout(8, 35, 1, 1920))
    config["trainer"]["precision"] = "16"
    memory = stages(config)
    states = sum(stage.weights + stage.gradients + stage.optimizer for stage in memory)
    assert states == 20 * sum(stage.parameters for stage in memory)
    assert 10e12 < 8 * states < 11e12
    row = LAYOUTS["530B"]._replace(virtual=None)
    full = recompute_keys("full")
    assert first_stage(row, 2, **full) - first_stage(row, **full) == pytest.approx(8.8e9, rel=0.05)
