"""Megatron-LM's own pretrain_gpt.py trains what we render, under the sandbox's srun, on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from supervisor.marks import link_jobs
from tests.chains.recorded_directories import entries, installed_versions, write_recording
from tests.megatron_lm.conftest import CPU, HERE, MegatronLm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

SLIPWAY = Path(sys.executable).with_name("slipway")

_STEP = re.compile(r"\] iteration +(\d+)/ +\d+ \| consumed samples: +(\d+) \|")

_GPT = [
    "training=gpt3/tiny",
    "training.trainer.num_nodes=1",
    "training.trainer.precision=bf16",
    "training.trainer.max_steps=100000",
    "training.trainer.val_check_interval=5000",
    "training.trainer.log_every_n_steps=1",
    "training.model.data.num_workers=0",
    # Kernels of Apex and Transformer Engine, which there are for GPUs alone.
    "training.model.transformer_engine=False",
    "training.model.persist_layer_norm=False",
    "training.model.gradient_accumulation_fusion=False",
    "training.model.masked_softmax_fusion=False",
]

_T5 = [
    "training=t5/tiny",
    "training.trainer.val_check_interval=2",
    "training.trainer.log_every_n_steps=1",
    "training.model.data.num_workers=0",
    "training.model.transformer_engine=False",
    "+training.model.gradient_accumulation_fusion=False",
    *(
        f"training.model.{stack}.{switch}"
        for stack in ("encoder", "decoder")
        for switch in ("activation=gelu", "persist_layer_norm=False", "masked_softmax_fusion=False")
    ),
    "training.model.tokenizer.type=BertWordPieceCase",
    "training.model.tokenizer.merge_file=null",
]

_EVERY = "training.exp_manager.checkpoint_callback_params.every_n_train_steps=50"


def log_of(launch: Path, job: str) -> str:
    """A link's own log, an empty one before it has any."""
    return "".join(path.read_text() for path in launch.glob(f"log-*_{job}.out"))


def steps(launch: Path, job: str) -> list[tuple[int, int]]:
    """The iterations and the consumed samples that a link's log tells, in order."""
    return [(int(step), int(samples)) for step, samples in _STEP.findall(log_of(launch, job))]


def ended(launch: Path, job: str) -> dict[str, Any]:
    path = launch / "marks" / f"{job}.0.ended.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def wait_until(condition: Callable[[], object], seconds: int = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.5)


@pytest.fixture
def data(repository: Path, tmp_path: Path) -> Path:
    """Text and a vocabulary of 512 tokens, which no hub of Hugging Face's has."""
    options = ["--pattern", "*.py", "--max-files", "20", "--vocab-size", "512"]
    command = [SLIPWAY, "data", "tokenize", repository / "launcher", *options]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    return tmp_path / "data"


Launch = Callable[..., Path]


@pytest.fixture
def launch(megatron_lm: MegatronLm, sandbox: Sandbox, tmp_path: Path) -> Launch:
    """Launches a training and gives its run's directory."""
    own = [
        "cluster=sandbox",
        "engine=megatron_lm",
        "container=null",
        f"cluster.python={megatron_lm.python}",
        f"megatron_lm_path={megatron_lm.source}",
        f"env_vars.PYTHONPATH='{':'.join(map(str, CPU))}'",
        "env_vars.CUDA_DEVICE_MAX_CONNECTIONS='1'",  # Megatron-LM asks for it; on a CPU we do not set it
        "env_vars.HF_HUB_OFFLINE='1'",
    ]

    def call(*overrides: str) -> Path:
        done = subprocess.run(
            [SLIPWAY, "launch", *own, *overrides],
            cwd=tmp_path,
            env=sandbox.environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"^ *directory +(\S+)$", done.stdout, re.MULTILINE)
        assert found, done.stdout
        return tmp_path / found.group(1)

    return call


def test_it_saves_when_told_and_the_next_link_continues(launch: Launch, sandbox: Sandbox, data: Path) -> None:
    run = launch(*_GPT, f"data_dir={data}", "resilience.links=2")
    environment = sandbox.environment()
    first_launch = run / "launches" / "1"
    try:
        wait_until(
            lambda: (
                len(link_jobs(first_launch)) >= 1
                and len(steps(first_launch, link_jobs(first_launch)[0])) >= 3
            )
        )
        first = link_jobs(first_launch)[0]
        subprocess.run(["scancel", "--signal=USR1", "--batch", first], env=environment, check=True)
        wait_until(lambda: ended(first_launch, first))
        assert ended(first_launch, first)["exit_code"] == 75
        assert "exiting program after receiving SIGTERM" in log_of(first_launch, first)
        saved = int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        assert saved == steps(first_launch, first)[-1][0]

        wait_until(lambda: len(link_jobs(first_launch)) == 2)
        second = link_jobs(first_launch)[1]
        wait_until(lambda: steps(first_launch, second) or ended(first_launch, second))
        assert not ended(first_launch, second), log_of(first_launch, second)[-4000:]
        assert steps(first_launch, second)[0] == (saved + 1, 32 * (saved + 1))
    finally:
        jobs = link_jobs(first_launch)
        if jobs:
            subprocess.run(["scancel", *jobs], env=environment, check=False)


def test_a_chain_that_went_back_goes_on(
    launch: Launch, megatron_lm: MegatronLm, sandbox: Sandbox, data: Path, request: pytest.FixtureRequest
) -> None:
    """Its links save lower iterations than those that the first launch left; no link may fail.

    With ``--write-golden`` the directory of its checkpoints is recorded, for the chains of every `make test`.
    """
    environment = sandbox.environment()
    small = [*_GPT, "training.trainer.max_steps=400", "training.trainer.val_check_interval=400", _EVERY]
    small += ["training.trainer.devices=1", "training.model.tensor_model_parallel_size=1"]
    run = launch(*small, f"data_dir={data}")
    follow = [SLIPWAY, "follow", run]
    done = subprocess.run(follow, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert "COMPLETED" in done.stdout, done.stdout[-4000:] + done.stderr
    checkpoints, tracker = run / "checkpoints", run / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "400"
    moments = {"launch 1, 400 iterations": entries(checkpoints)}
    tracker.write_text("100")
    moments["back to iteration 100"] = entries(checkpoints)

    launch(*small, f"data_dir={data}", "resilience.links=4", "resilience.max_failures=1")
    second = run / "launches" / "2"
    saves = []
    try:
        # Each is told to save and leave: after few iterations, and after Megatron-LM has saved by itself.
        for number, until in enumerate((103, 160, 205), start=1):
            wait_until(lambda number=number: len(link_jobs(second)) > number)
            job, successor = link_jobs(second)[number - 1 : number + 1]
            subprocess.run(["scontrol", "hold", successor], env=environment, check=True)
            wait_until(
                lambda job=job, until=until: (
                    [step for step, _ in steps(second, job) if step >= until] or ended(second, job)
                )
            )
            subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=environment, check=True)
            wait_until(lambda job=job: ended(second, job).get("verdict"))
            end = ended(second, job)
            assert (end["verdict"], end["failures"], end["exit_code"]) == ("continue", 0, 75), end
            saves.append(int(tracker.read_text()))
            moments[f"launch 2, link {number}, ended at iteration {saves[-1]}"] = entries(checkpoints)
            subprocess.run(["scontrol", "release", successor], env=environment, check=True)
    finally:
        subprocess.run([SLIPWAY, "cancel", run], env=environment, check=False, timeout=60)
    assert 100 < saves[0] < saves[1] < saves[2] < 400
    assert (checkpoints / "iter_0000400").is_dir(), "the newest is not the highest"
    if request.config.getoption("--write-golden"):
        versions = {"Megatron-LM": megatron_lm.source.name, **installed_versions(megatron_lm.python, "torch")}
        write_recording("megatron_lm", versions, " ".join(small), moments)


def test_a_t5_trains_and_the_next_launch_continues(
    megatron_lm: MegatronLm, launch: Launch, sandbox: Sandbox, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": megatron_lm.python_path}
    make = [megatron_lm.python, HERE / "sentences.py", tmp_path]
    subprocess.run(make, env=environment, check=True, capture_output=True, timeout=120)
    files = [
        f"training.model.data.data_prefix=[{tmp_path}/sentences]",
        f"training.model.tokenizer.vocab_file={tmp_path}/vocab.txt",
    ]
    for number, (before, last) in enumerate([(0, 4), (4, 6)], start=1):
        run = launch(*_T5, *files, f"training.trainer.max_steps={last}")
        follow = [SLIPWAY, "follow", run]
        done = subprocess.run(
            follow, cwd=tmp_path, env=sandbox.environment(), capture_output=True, text=True, timeout=400
        )
        assert "COMPLETED" in done.stdout, done.stdout[-4000:] + done.stderr
        told = steps(run / "launches" / str(number), "*")
        assert told == [(step, 32 * step) for step in range(before + 1, last + 1)]
