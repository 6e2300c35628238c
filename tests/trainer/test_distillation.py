"""A GPT that learns from a teacher: its gradients, its layouts, its start, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import distillation_reference
from tests.trainer.conftest import Tokenized, Trainings
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

LEARNING = {
    "model.num_layers": 2,
    "trainer.max_steps": 3,
    "model.distillation.cosine": 0.5,
}


@pytest.fixture(scope="module")
def models(tokenized: Tokenized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with Hugging Face's models ``teacher`` and ``student``, and reference gradients."""
    root = tmp_path_factory.mktemp("distillation")
    size = len(json.loads((tokenized.tokenizer / "vocab.json").read_text()))
    command = [sys.executable, "-I", distillation_reference.__file__, str(root), str(size)]
    subprocess.run(command, cwd=root, env={"OMP_NUM_THREADS": "1", "HOME": str(root)}, check=True)
    return root


def test_smoke(models: Path, trainings: Trainings) -> None:
    outcome = trainings("smoke", {**LEARNING, "model.teacher": str(models / "teacher")})
    print(outcome.stdout[0], outcome.stderr[0])
    assert outcome.codes == [0]
