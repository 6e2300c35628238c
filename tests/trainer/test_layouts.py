"""One training, laid out over processes in each way: the numbers are those of one process.

All start from the same weights and see the same batches, so that only the order of floating-point sums
differs. Tensor, sequence and context parallelism cut sums into parts, a pipeline those of tied embeddings and
of the gradient's norm, data parallelism the means: the first loss may differ by a few units in the last place
of 32 bits (6e-8 relative, each), which `FIRST` allows some twenty of. A step of Adam divides each gradient by
its own size: where a gradient is all but zero, its rounding error becomes a step. `LATER` allows for that
over the four steps; what was seen is at most a tenth of both.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.ranks import Run

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

FIRST, LATER = 1.2e-6, 3e-6
MODEL = "model."
SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "sequence": "sequence_parallel",
    "micro": "micro_batch_size",
}
COMMON = {
    "trainer.max_steps": 4,
    "trainer.val_check_interval": 4,
    # More than there are: the last one has few micro batches.
    "trainer.limit_val_batches": 50,
    "model.num_layers": 4,
    "exp_manager.create_checkpoint_callback": False,
}
# Two families: GPT-3's learned positions and tied embeddings, and Llama's opposites.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt3": {},
    "llama": {
        "model.position_embedding_type": "rope",
        "model.normalization": "rmsnorm",
        "model.activation": "fast-swiglu",
        "model.num_query_groups": 2,
        "model.bias": False,
        "model.share_embeddings_and_output_weights": False,
    },
    "masked": {"model.data.eod_mask_loss": True},
    "ramped": {"model.data.eod_mask_loss": True, "model.rampup_batch_size": [4, 4, 8]},
}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt3", 2, {"tensor": 2}),
    ("gpt3", 2, {"pipeline": 2}),
    ("gpt3", 2, {"pipeline": 2, "virtual": 2}),
    ("gpt3", 2, {}),
    ("gpt3", 4, {"tensor": 2, "sequence": True, "context": 2}),
    ("llama", 2, {"tensor": 2, "sequence": True}),
    ("llama", 2, {"context": 2}),
    ("llama", 4, {"pipeline": 2, "virtual": 2, "tensor": 2}),
]


def name_of(layout: tuple[str, int, dict[str, Any]]) -> str:
    family, world, sizes = layout
    return "-".join([family, f"world{world}", *(f"{name}{size}" for name, size in sizes.items())])


# Its pipeline exchanges as on GPUs. gloo posts the batches of sends and receives in NCCL's order.
AS_ON_CUDA: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt3", 2, {"pipeline": 2}),
    ("gpt3", 2, {"pipeline": 2, "virtual": 2}),
]
# A masked token is the end of a document, of which windows have none, one or several.
MASKED: list[tuple[str, int, dict[str, Any]]] = [
    ("masked", 1, {"micro": 1}),
    ("masked", 1, {"micro": 8}),
    ("masked", 2, {}),
    ("masked", 2, {"pipeline": 2, "micro": 1}),
    ("masked", 4, {"tensor": 2, "context": 2, "micro": 1}),
    ("ramped", 1, {"micro": 4}),
]


@pytest.fixture(scope="module")
def numbers(trainings: Any, pool: Any) -> Any:
    """Return the numbers of a training, by family, world and sizes; each is run once."""
    numbers_of_layout: dict[str, Any] = {}

    def train(family: str, world: int, sizes: dict[str, Any], fault: str = "") -> Any:
        name = name_of((family, world, sizes)) + fault.partition(":")[0]
        if name not in numbers_of_layout:
            changes = {MODEL + SIZES[size]: value for size, value in sizes.items()}
            run = Run(trainings, pool, name, {**COMMON, **FAMILIES[family], **changes}, world, fault)
            assert run.end() == [0] * world, run.output()
            steps = [(line["loss"], line["grad_norm"]) for line in run.lines("train")]
            (heldout,) = [line["val_loss"] for line in run.lines("validation")]
            numbers_of_layout[name] = (run.lines("start")[0]["parameters"], steps, heldout)
        return numbers_of_layout[name]

    return train


@pytest.mark.parametrize("layout", [*LAYOUTS, *MASKED], ids=name_of)
def test_the_numbers_are_those_of_one_process(numbers: Any, layout: tuple[str, int, dict[str, Any]]) -> None:
    parameters, steps, heldout = numbers(layout[0], 1, {})
    assert len(steps) == 4
    actual = numbers(*layout)
    assert actual[0] == parameters
    assert actual[1][0] == pytest.approx(steps[0], rel=FIRST)
    assert actual[1] == [pytest.approx(step, rel=LATER) for step in steps]
    assert actual[2] == pytest.approx(heldout, rel=LATER)
    differences = [
        abs(a / b - 1)
        for ours, theirs in zip(actual[1], steps, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    print(f"{name_of(layout)}: first {max(differences[:2]):.1e}, later {max(differences):.1e}")


@pytest.mark.parametrize("layout", AS_ON_CUDA, ids=name_of)
def test_stages_that_exchange_as_on_gpus_compute_the_same(
    numbers: Any, layout: tuple[str, int, dict[str, Any]]
) -> None:
    assert numbers(*layout, "cuda:all:0") == numbers(*layout)
