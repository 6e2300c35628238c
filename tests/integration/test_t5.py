"""A T5 on real text, from one command, predicts masked spans better than the tokens' frequencies do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command


@pytest.mark.slurm
@pytest.mark.trainer
def test_a_t5_learns_real_text_on_slurm(workplace: Path, sandbox: Sandbox, warm_python: Path) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"], "OMP_NUM_THREADS": "1"}
    launch: list[str | Path] = [
        SLIPWAY,
        "launch",
        "cluster=sandbox",
        "training=t5/tiny",
        f"cluster.python={warm_python}",
    ]
    # Half the batch, and larger weights, which learn sooner.
    fewer = [
        "training.trainer.max_steps=40",
        "training.trainer.val_check_interval=20",
        "training.model.micro_batch_size=8",
        "training.model.global_batch_size=16",
        "training.model.encoder.init_method_std=0.06",
        "training.model.optim.lr=5e-3",
    ]
    done = run_command(*launch, *fewer, "--follow", cwd=workplace, **conf)
    assert "COMPLETED" in done.stdout

    run = workplace / "results" / "t5_tiny"
    lines = [json.loads(line) for line in (run / "results" / "metrics.jsonl").read_text().splitlines()]
    (entropy,) = [line["unigram_entropy"] for line in lines if line["kind"] == "data"]
    losses = [line["val_loss"] for line in lines if line["kind"] == "validation"]
    assert losses[1] < losses[0]
    assert losses[1] < entropy
    print(f"held-out loss {losses[-1]:.3f}, unigram entropy {entropy:.3f}")

    run_command(SLIPWAY, "plot", "t5_tiny", cwd=workplace, **conf)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    refusal = run_command(
        *launch, "training.model.pipeline_model_parallel_size=2", cwd=workplace, check=2, **conf
    )
    assert "megatron-core 0.16 has no pipeline for an encoder-decoder" in refusal.stderr
