"""NeMo's own trainers train from the YAML that we render, under the sandbox's srun, without a GPU."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.nemo.conftest import SLIPWAY, Nemo, Submit, Train
from tests.nemo.shrinking import GPT, T5, real_text, sentencepiece

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

_PROGRESS = re.compile(r"global_step=(\d+)\.0*, consumed_samples=(\d+)\.0*,")


def progress(launch: Path) -> list[tuple[int, int]]:
    """Return the steps, counted by NeMo from 0, and the consumed samples in a launch's log, in order."""
    (log,) = launch.glob("log-*.out")
    return [(int(step), int(samples)) for step, samples in _PROGRESS.findall(log.read_text())]


def newest_checkpoint(run: Path) -> str:
    (name,) = [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.endswith("-last")]
    return re.sub(r"val_loss=[\d.]+-", "", name)


def check_results(run: Path, tasks: int) -> None:
    """Check for the files that the NeMo Megatron launcher leaves in results/.

    A rank that starts before rank 0 finds its log in run_0/: NeMo's rank 0 clears the directory at its start.
    """
    names = {path.name for path in (run / "results").rglob("*")}
    expected = {"cmd-args.log", "hparams.yaml", "lightning_logs.txt", "nemo_error_log.txt"}
    expected |= {f"nemo_log_globalrank-{rank}_localrank-{rank}.txt" for rank in range(tasks)}
    assert expected <= names
    assert any(name.startswith("events.out.tfevents.") for name in names)


@pytest.mark.parametrize("tasks", [1, 2])
def test_gpt_trains_and_the_next_launch_continues(train: Train, tasks: int) -> None:
    small = [*GPT, f"training.trainer.devices={tasks}"]
    run = train(*small, "training.trainer.max_steps=4")
    check_results(run, tasks)
    assert progress(run / "launches" / "1")[-1] == (3, 8)
    assert newest_checkpoint(run) == "megatron_gpt--step=4-consumed_samples=8.0-last"

    assert train(*small, "training.trainer.max_steps=6") == run
    check_results(run, tasks)
    steps = progress(run / "launches" / "2")
    assert steps[0][0] >= 4, "the second launch does not start anew"
    assert steps[-1] == (5, 12)
    assert newest_checkpoint(run) == "megatron_gpt--step=6-consumed_samples=12.0-last"
    assert not (run / "launches" / "2" / "checkpoints").exists()


def test_gpt_learns_text_that_slipway_tokenized(train: Train, repository: Path, tmp_path: Path) -> None:
    options = ["--pattern", "*.py", "--max-files", "20", "--vocab-size", "512"]
    command = [SLIPWAY, "data", "tokenize", repository / "launcher", *options]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    run = train(
        *GPT,
        *real_text(tmp_path / "data"),
        "training.trainer.devices=1",
        "training.trainer.max_steps=20",
        "training.trainer.val_check_interval=10",
        "training.model.global_batch_size=8",
        "training.model.optim.lr=1e-3",
    )
    losses = {}
    for path in (run / "checkpoints").iterdir():
        match = re.search(r"val_loss=([\d.]+)-step=(\d+)", path.name)
        assert match
        losses[int(match.group(2))] = float(match.group(1))
    assert losses[20] < losses[10] < 6.3, "the entropy of 512 tokens is 6.24 nats"
    assert list((run / "index_mapping").iterdir()), "NeMo's indices are the run's, not beside the data"
    verify = subprocess.run([SLIPWAY, "verify", run], capture_output=True, text=True, timeout=60)
    assert verify.returncode == 0, verify.stdout + verify.stderr


def test_t5_trains_and_continues_on_two_tasks(train: Train, vocabulary: Path) -> None:
    small = [*T5, *sentencepiece(str(vocabulary))]
    run = train(*small, "training.trainer.devices=1", "training.trainer.max_steps=4")
    check_results(run, tasks=1)
    assert newest_checkpoint(run) == "megatron_t5--step=4-consumed_samples=8.0-last"

    train(*small, "training.trainer.devices=2", "training.trainer.max_steps=8")
    check_results(run, tasks=2)
    steps = progress(run / "launches" / "2")
    assert steps[0][0] >= 4
    assert steps[-1] == (7, 16)


@pytest.fixture
def vocabulary(nemo: Nemo, tmp_path: Path) -> Path:
    """Train a small sentencepiece model on the standard library's sources."""
    texts = ",".join(str(path) for path in sorted(Path(re.__file__).parents[1].glob("*.py"))[:40])
    options = f"--input={texts} --model_prefix={tmp_path}/spm --vocab_size=1000 --minloglevel=2"
    code = "import sys, sentencepiece; sentencepiece.SentencePieceTrainer.Train(sys.argv[1])"
    subprocess.run([nemo.python, "-c", code, options], check=True, capture_output=True, timeout=120)
    return tmp_path / "spm.model"


def test_warning_of_the_time_limit_saves_and_requeues_nothing(submit: Submit, sandbox: Sandbox) -> None:
    """USR1 to the job becomes TERM to NeMo, and often comes while NeMo saves."""
    run = submit(*GPT, "training.trainer.devices=2", "training.trainer.max_steps=100000")
    launch = run / "launches" / "1"
    job = (launch / "launcher.log").read_text().split()[-1]
    environment = sandbox.environment()

    def steps() -> int:
        return progress(launch)[-1][0] if list(launch.glob("log-*.out")) and progress(launch) else -1

    try:
        wait_until(lambda: steps() >= 3)
        step_before = steps()
        subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=environment, check=True)
        wait_until(lambda: list((launch / "marks").glob("*.ended.json")))
    finally:
        subprocess.run(["scancel", job], env=environment, check=False)

    assert '"exit_code": 75,' in next((launch / "marks").glob("*.ended.json")).read_text()
    assert "Received SIGTERM, saving checkpoint and exiting" in next(launch.glob("log-*.out")).read_text()
    match = re.search(r"step=(\d+)-consumed_samples=(\d+)\.0-last$", newest_checkpoint(run))
    assert match
    assert int(match.group(2)) == 2 * int(match.group(1)) > 2 * step_before
    assert not list(run.rglob("hpc_ckpt*"))


def wait_until(condition: object, seconds: int = 240) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.5)
