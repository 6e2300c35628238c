"""A GPT that learns from a teacher: its gradients, its layouts, its start, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.trainer import distillation_reference
from tests.trainer.conftest import Outcome, Tokenized, Trainings, free_port
from tests.trainer.distillation_reference import CASES
from tests.trainer.probing import run_probe
from tests.trainer.test_layouts import FIRST, LATER
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

LEARNING = {
    "model.num_layers": 4,
    "trainer.max_steps": 3,
    "model.distillation.cosine": 0.5,
}


class Models(NamedTuple):
    """The directory of ``teacher`` and ``student``, and the size of their vocabulary."""

    root: Path
    vocabulary: int


@pytest.fixture(scope="module")
def models(tokenized: Tokenized, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return Hugging Face's models, and the gradients of a plain loss."""
    root = tmp_path_factory.mktemp("distillation")
    size = len(json.loads((tokenized.tokenizer / "vocab.json").read_text()))
    command = [sys.executable, "-I", distillation_reference.__file__, str(root), str(size)]
    subprocess.run(command, cwd=root, env={"OMP_NUM_THREADS": "1", "HOME": str(root)}, check=True)
    return Models(root, size)


def test_gradients_equal_those_of_a_plain_loss(
    models: Models, configuration: Any, pool: WarmPool, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    keys = {
        "model.override_vocab_size": models.vocabulary,
        "model.teacher": str(models.root / "teacher"),
        "model.data.data_impl": "mock",
        "exp_manager.explicit_log_dir": str(tmp_path),
    }
    path.write_text(yaml.safe_dump(configuration(keys)))
    arguments = [str(path), str(free_port()), str(models.root)]
    differences = run_probe(pool, "tests.trainer.probe_distillation", arguments, tmp_path)
    print(differences)
    assert set(differences) == set(CASES)
    for case in differences.values():
        assert case["loss"] < 1e-6
        assert case["gradient"] < 1e-5


SIZES = {
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
    "virtual": "model.virtual_pipeline_model_parallel_size",
    "context": "model.context_parallel_size",
    "sequence": "model.sequence_parallel",
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"tensor": 2, "sequence": True, "context": 2}),
    (4, {"pipeline": 2}),
    (2, {"pipeline": 2, "virtual": 2}),
    *(
        [(2, {"tensor": 2}), (2, {"pipeline": 2}), (2, {}), (2, {"context": 2})]
        if "EACH_LAYOUT" in os.environ
        else []
    ),
]


def train(models: Models, trainings: Trainings, name: str, world: int, changes: dict[str, Any]) -> Outcome:
    outcome = trainings(name, {**LEARNING, "model.teacher": str(models.root / "teacher"), **changes}, world)
    assert outcome.codes == [0] * world, outcome.stderr
    return outcome


@pytest.fixture(scope="module")
def alone(models: Models, trainings: Trainings) -> Outcome:
    return train(models, trainings, "alone", 1, {})


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS, ids=str)
def test_the_numbers_are_those_of_one_process(
    models: Models, trainings: Trainings, alone: Outcome, world: int, sizes: dict[str, Any]
) -> None:
    changes = {SIZES[name]: value for name, value in sizes.items()}
    outcome = train(models, trainings, f"laid-out-{world}-{'-'.join(sizes)}", world, changes)
    (start,), (expected,) = outcome.lines("start"), alone.lines("start")
    for key in ("parameters", "model_flops_per_sample", "causal_flops_per_sample"):
        assert start[key] == expected[key]
    numbers, plain = outcome.curve("loss", "grad_norm"), alone.curve("loss", "grad_norm")
    assert numbers[0] == pytest.approx(plain[0], rel=FIRST)
    assert numbers == [pytest.approx(step, rel=LATER) for step in plain]
    (heldout,), (known,) = outcome.lines("validation"), alone.lines("validation")
    assert heldout["val_loss"] == pytest.approx(known["val_loss"], rel=LATER)
    print(
        sizes,
        max(abs(a / b - 1) for x, y in zip(numbers, plain, strict=True) for a, b in zip(x, y, strict=True)),
    )
