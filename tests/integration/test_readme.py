"""The README's commands, run in a copy of the checkout as a newcomer would run them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging.checkout import copy as copy_checkout

# The suite itself: what CI runs, so not from within.
SUITE = "make test"


def blocks(repository: Path) -> list[str]:
    text = (repository / "README.md").read_text()
    return [block.strip() for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """The files of the checkout, without its results, and its virtual environment as a link."""
    copy_checkout(repository, tmp_path)
    (tmp_path / ".venv").symlink_to(repository / ".venv")
    # Older than the environment: make must not install the copy into the checkout's own.
    for name in ("setup.cfg", "constraints.txt"):
        os.utime(tmp_path / name, (0, 0))
    return tmp_path


@pytest.mark.slurm
@pytest.mark.trainer
@pytest.mark.timeout(900)
def test_every_command_of_the_readme(repository: Path, copy: Path, short_directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the README's sandbox needs root")
    commands = "\n".join(block for block in blocks(repository) if block != SUITE)
    # A sandbox of its own, so that one that is up stays as it is.
    sandbox = short_directory / "sandbox"
    # A quarter of the steps on a quarter of the tokens is enough for one layer to learn something: from
    # larger weights, with a short warm-up, and an optimizer that forgets sooner.
    shorter = (
        "training.trainer.max_steps=50 training.trainer.limit_val_batches=8"
        " training.model.encoder_seq_length=32 training.model.max_position_embeddings=32"
        " training.model.num_layers=1 training.model.init_method_std=0.06"
        " training.model.optim.betas=[0.6,0.8] training.model.optim.sched.warmup_steps=4"
    )
    environment = {**os.environ, "SLIPWAY_SANDBOX_DIR": str(sandbox), "DEMO_OVERRIDES": shorter}
    environment.pop("SLURM_CONF", None)
    with (copy / "output").open("w+") as output:
        done = subprocess.run(
            ["bash", "-eux", "-c", commands],
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        output.seek(0)
        text = output.read()
    assert done.returncode == 0, text[-8000:]
    assert re.search(r"below entropy +yes", text), "the demo's model is better than the unigram entropy"
    assert "#SBATCH --job-name=nemo-megatron-gpt3_126m" in text
    assert list(copy.glob("results/demo/*/gpt3_tiny/loss.png"))
    assert not sandbox.exists(), "nothing is left behind"


def test_ci_runs_the_readmes_test_command_and_nothing_else(repository: Path) -> None:
    assert SUITE in blocks(repository)
    lines = (repository / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == [f"exec {SUITE}"]
