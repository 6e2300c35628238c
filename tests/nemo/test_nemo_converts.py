"""NeMo's own converter makes a .nemo file of what NeMo's own trainer saved, as a stage of one launch."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from launcher.sandbox.lifecycle import Sandbox
from slipway.trainer.conversion.nemo import SCRIPT, TO_HUGGINGFACE
from tests.nemo.conftest import SLIPWAY, Nemo, Submit
from tests.nemo.shrinking import GPT, real_text

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


_LLAMA = [
    *("training.run.name=tiny", "training.trainer.devices=1", "training.trainer.max_steps=2"),
    *("+training.model.normalization=rmsnorm", "+training.model.activation=fast-swiglu"),
    *("+training.model.position_embedding_type=rope", "+training.model.bias=False"),
    "+training.model.share_embeddings_and_output_weights=False",
]


@pytest.fixture
def convert(
    nemo: Nemo, submit: Submit, sandbox: Sandbox, repository: Path, tmp_path: Path
) -> Callable[[str], Path]:
    """Return a function that trains a tiny Llama on real text, converts it, and returns the output."""
    if not all((nemo.source / script).is_file() for script in (SCRIPT, TO_HUGGINGFACE)):
        pytest.skip(f"needs NeMo's {SCRIPT} and {TO_HUGGINGFACE}: SLIPWAY_NEMO_SOURCE=/path/of/a/checkout")

    def call(to: str) -> Path:
        options = ["--pattern", "*.py", "--max-files", "20", "--vocab-size", "512"]
        command = [SLIPWAY, "data", "tokenize", repository / "launcher", *options]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
        text = real_text(tmp_path / "data")
        # NeMo takes the tokenizer by its two files, and we by the one that transformers makes of them.
        AutoTokenizer.from_pretrained(tmp_path / "data" / "bpe").save_pretrained(tmp_path / "data" / "bpe")
        submit(*GPT, *text, *_LLAMA, "stages=[training,conversion]", f"conversion={to}")
        conversion = tmp_path / "results" / "tiny_conversion"
        result = subprocess.run(
            [SLIPWAY, "follow", conversion],
            cwd=tmp_path,
            env=sandbox.environment(),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert "COMPLETED" in result.stdout, result.stdout[-4000:] + result.stderr
        return conversion / to / "step-2"

    return call


def test_nemo_file_is_made_after_the_training(convert: Callable[[str], Path]) -> None:
    with tarfile.open(convert("nemo") / "step-2.nemo") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"model_config.yaml", "common.pt", ".metadata"} <= names


def test_llama_is_converted_for_hugging_face_after_the_training(convert: Callable[[str], Path]) -> None:
    directory = convert("huggingface")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.vocab_size == len(tokenizer) == 512
    tokens = tokenizer("def main(arguments):", return_tensors="pt")
    assert model(**tokens, labels=tokens["input_ids"]).loss < 8
