"""A GPT that learns from a teacher: its gradients, its layouts, its start, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from launcher.runs.trained import read_model_sizes
from slipway.common.errors import UserError
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.config.verdict import find_mistake
from slipway.trainer.conversion.teacher import _look, spread_layers
from slipway.trainer.data.vocabulary import Vocabulary
from tests.trainer import distillation_reference
from tests.trainer.conftest import Outcome, Tokenized, Trainings, free_port
from tests.trainer.distillation_reference import CASES
from tests.trainer.probing import run_probe
from tests.trainer.ranks import Run
from tests.trainer.test_layouts import FIRST, LATER
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

MOCK = {"model.data.data_impl": "mock"}
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
    assert set(differences) == {*CASES, "compiled"}
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


def test_a_killed_distillation_continues_bitwise_and_starts_once_from_its_teacher(
    models: Models, trainings: Trainings, pool: WarmPool, tmp_path: Path
) -> None:
    teacher = shutil.copytree(models.root / "teacher", tmp_path / "teacher")
    changes = {
        "model.teacher": str(teacher),
        "model.distillation.start_from_teacher": True,
        "model.pipeline_model_parallel_size": 2,
        "model.hidden_dropout": 0.1,
        "trainer.max_steps": 12,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 1,
    }
    outcome = trainings("taught", changes, world=2)
    assert outcome.codes == [0, 0], outcome.stderr
    for launch in (1, 2, 3):
        run = Run(trainings, pool, "taught_and_killed", changes, 2)
        if launch < 3:
            run.wait_for_step(4 * launch)
            run.send(signal.SIGKILL)
        run.end()
    # The output is that of all launches.
    assert run.output().count("starting from the teacher's layers 0, 3") == 1
    starts = [line["step"] for line in run.lines("start")]
    assert starts[0] == 0 < starts[1] < starts[2] < 12
    names = ("loss", "grad_norm")
    numbers = {line["step"]: [line[name] for name in names] for line in run.lines("train")}
    assert numbers == {step: rest for step, *rest in outcome.curve(*names)}

    config = teacher / "config.json"
    config.write_text(config.read_text() + " ")
    other = trainings("taught_and_killed", changes, world=2)
    assert other.codes == [2, 2]
    assert f"{teacher}/config.json (model.teacher/config.json): " in other.stderr[0]
    assert "resume.accept_data=data-" in other.stderr[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation": {"temperature": 0}}, "model.distillation.temperature=0: expected a number above 0"),
        ({"distillation": {"temprature": 1}}, "unknown key; did you mean 'model.distillation.temperature'?"),
        (
            {"distillation": {"divergence": 0, "cosine": 0}},
            "model.distillation.divergence=0: expected a number above 0",
        ),
        ({"teacher": "gpt2"}, "model.teacher='gpt2': expected the absolute path of a checkpoint"),
        ({"num_layers": 6}, "its num_layers is 4: expected at least the student's 6"),
        ({"hidden_size": 64}, "its hidden_size is 32: expected the student's 64"),
        ({"encoder_seq_length": 64}, "its max_position_embeddings is 32: expected at least model.enc"),
        (
            {"num_layers": 8, "pipeline_model_parallel_size": 8},
            "its num_layers is 4: expected a mult",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_job(
    models: Models, configuration: Any, changes: dict[str, Any], message: str
) -> None:
    sizes = read_model_sizes(models.root / "teacher")
    assert sizes["vocabulary"] == models.vocabulary
    config = configuration({"exp_manager.explicit_log_dir": "/unused", **MOCK})
    node = {"start_from_teacher": "hidden_size" in changes or changes.get("num_layers") == 6, "cosine": 1}
    config["model"] |= {"teacher": str(models.root / "teacher")} | changes
    config["model"]["distillation"] = {**node, **changes.get("distillation", {}), "teacher_model": sizes}
    world = changes.get("pipeline_model_parallel_size", 1)
    config["trainer"]["devices"] = world
    assert message in str(find_mistake(config, world))


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("absent", "there is no such directory"),
        ("a" * 300, "it cannot be read: File name too long"),
        (".", "no complete.json; expected a checkpoint, or Hugging Face's files"),
        ("t5", "it is a T5: expected a GPT"),
        ("teacher", "tokens, and model.tokenizer 7 (a test): expected the teacher's tokenizer"),
    ],
)
def test_a_teacher_that_is_none_is_refused(
    models: Models, configuration: Any, teacher: str, message: str
) -> None:
    changes = {"exp_manager.explicit_log_dir": "/unused", "model.teacher": str(models.root / teacher)}
    settings = read_settings(flatten(configuration({**MOCK, **changes})))
    with pytest.raises(UserError, match=re.escape(message)):
        _look(models.root / teacher, settings, Vocabulary(7, 0, "a test"))


@pytest.mark.parametrize(("student", "expected"), [(6, [0, 2, 4, 7, 9, 11]), (12, list(range(12))), (1, [0])])
def test_layers_are_spread_from_the_first_to_the_last(student: int, expected: list[int]) -> None:
    assert spread_layers(student, 12) == expected
