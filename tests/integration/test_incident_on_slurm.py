"""`slipway incident` of a real training on a real Slurm of which one rank failed, and of one that runs."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command
from tests.trainer.faults import FAULT
from tests.warm import WarmPool

SMALL = [
    *("cluster=sandbox", "training=gpt3/tiny", "training.run.name=broken", "training.trainer.num_nodes=2"),
    *("training.trainer.devices=1", "training.model.tensor_model_parallel_size=1"),
    *("training.model.data.data_impl=mock", "+training.model.override_vocab_size=512"),
    "training.model.encoder_seq_length=32",
]
# In two parts, as a launch keeps what differs from the commit.
SECRETS = {"HF_TOKEN": "hf_" + "S3CRETvalue7AbCdEfGhIj", "MY_STUFF": "plain" + "S3CRETvalue8"}
KEY = hashlib.sha1(b"x").hexdigest()


@pytest.mark.slurm
@pytest.mark.trainer
def test_a_training_that_fails_on_one_rank(tmp_path: Path, sandbox: Sandbox, pool: WarmPool) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"], "WANDB_API_KEY": KEY}
    python = pool.write_interpreter(tmp_path / "python", "tests.integration.failing_trainer")
    words = [f"cluster.python={python}"]
    for name, value in SECRETS.items():
        (tmp_path / name).write_text(f"{value}\n")
        (tmp_path / name).chmod(0o600)
        words.append(f"env_files.{name}={tmp_path / name}")
    launch = [SLIPWAY, "launch", *SMALL, *words, "--follow"]
    run_command(*launch, "training.trainer.max_steps=2", cwd=tmp_path, **conf)
    fault = f"+env_vars.{FAULT}='raise:1:3'"
    run_command(*launch, "training.trainer.max_steps=6", fault, cwd=tmp_path, check=1, **conf)
    (log,) = (tmp_path / "results/broken/launches/2").glob("log-*.out")
    with log.open("a") as stream:
        stream.write(f"{KEY} {' '.join(SECRETS.values())}\n")

    answer = json.loads(run_command(SLIPWAY, "incident", "broken", "--json", cwd=tmp_path, **conf).stdout)
    accounting = (
        [] if sandbox.options.accounting else ["slurm/sacct.txt: sacct: Slurm accounting storage is disabled"]
    )
    assert answer["missing"] == accounting
    folder = Path(answer["directory"])
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    report = texts["incident.md"]
    print(report)
    assert "| failed first | rank 1 on " in report
    assert "a matrix is missing" in report
    assert "- launch 1: COMPLETED, steps 0→2" in report
    assert "- training.trainer.max_steps: 2 → 6" in report
    assert "State=IDLE" in report
    assert "+  max_steps: 6" in texts["changes.diff"].replace("+    max_steps", "+  max_steps")
    assert f"JobId={json.loads(texts['provenance.json'])['jobs'][-1]} " in texts["slurm/job.txt"]
    assert "Traceback" in texts["logs/" + log.name]
    assert any(name.startswith("logs/nemo_log_globalrank-1_") for name in texts)
    assert {"failures/globalrank-1.json", "slurm/nodes.txt", "configuration/task.sh"} <= set(texts)
    with tarfile.open(answer["archive"]) as archive:
        packed = [archive.extractfile(member).read() for member in archive]  # type: ignore[union-attr]
    assert sorted(packed) == sorted(text.encode() for text in texts.values())
    for secret in (KEY, *SECRETS.values()):
        assert [name for name, text in texts.items() if secret in text] == []
