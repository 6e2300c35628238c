"""NeMo's own converter makes a .nemo file of what NeMo's own trainer saved, as a stage of one launch."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from launcher.sandbox import Sandbox
from tests.nemo.conftest import Nemo, Submit
from tests.nemo.shrinking import GPT
from trainer.conversion.nemo import SCRIPT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


def test_nemo_file_is_made_behind_the_training(
    nemo: Nemo, submit: Submit, sandbox: Sandbox, tmp_path: Path
) -> None:
    if not (nemo.source / SCRIPT).is_file():
        pytest.skip(f"needs NeMo's {SCRIPT}: SLIPWAY_NEMO_SOURCE=/path/of/a/checkout")
    small = [*GPT, "training.trainer.devices=1", "training.trainer.max_steps=2", "training.run.name=tiny"]
    tokenizer = [f"training.model.tokenizer.{name}_file=null" for name in ("vocab", "merge")]
    submit(*small, *tokenizer, "stages=[training,conversion]", "conversion=nemo")
    conversion = tmp_path / "results" / "tiny_conversion"
    done = subprocess.run(
        ["slipway", "follow", str(conversion)],
        cwd=tmp_path,
        env=sandbox.environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert "COMPLETED" in done.stdout, done.stdout[-4000:] + done.stderr
    with tarfile.open(conversion / "nemo" / "step-2" / "step-2.nemo") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"model_config.yaml", "common.pt", ".metadata"} <= names
