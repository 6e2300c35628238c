"""Megatron-LM's own pretrain_gpt.py trains what we render, under the sandbox's srun, on two ranks."""

from __future__ import annotations

import itertools
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
from slipway.common.node.events import Train, Validation
from slipway.common.node.marks import link_jobs
from slipway.common.node.tensorboard import TAGS, TensorboardReader
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
    """Return a link's log, an empty text before it exists."""
    return "".join(path.read_text() for path in launch.glob(f"log-*_{job}.out"))


def steps(launch: Path, job: str) -> list[tuple[int, int]]:
    """Return the iterations and the consumed samples in a link's log, in order."""
    return [(int(step), int(samples)) for step, samples in _STEP.findall(log_of(launch, job))]


def end_mark(launch: Path, job: str) -> dict[str, Any]:
    path = launch / "marks" / f"{job}.0.ended.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def wait_until(condition: Callable[[], object], seconds: int = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.5)


@pytest.fixture
def data(repository: Path, tmp_path: Path) -> Path:
    """Tokenize a text with a vocabulary of 512 tokens, which no hub of Hugging Face's has."""
    options = ["--pattern", "*.py", "--max-files", "20", "--vocab-size", "512"]
    command = [SLIPWAY, "data", "tokenize", repository / "launcher", *options]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    return tmp_path / "data"


Launch = Callable[..., Path]


@pytest.fixture
def launch(megatron_lm: MegatronLm, sandbox: Sandbox, tmp_path: Path) -> Launch:
    """Return a function that launches a training and returns its run's directory."""
    common = [
        "cluster=sandbox",
        "engine=megatron_lm",
        "container=null",
        f"cluster.python={megatron_lm.python}",
        f"megatron_lm_path={megatron_lm.source}",
        f"env_vars.PYTHONPATH='{':'.join(map(str, CPU))}'",
        "env_vars.CUDA_DEVICE_MAX_CONNECTIONS='1'",  # Megatron-LM asks for it; on a CPU we do not set it
        "env_vars.HF_HUB_OFFLINE='1'",
        # Python 3.11 pickles the options' enumerations as calls, which torch.load refuses since 2.6.
        "env_vars.TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD='1'",
    ]

    def call(*overrides: str) -> Path:
        result = subprocess.run(
            [SLIPWAY, "launch", *common, *overrides],
            cwd=tmp_path,
            env=sandbox.environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        match = re.search(r"^ *directory +(\S+)$", result.stdout, re.MULTILINE)
        assert match, result.stdout
        return tmp_path / match.group(1)

    return call


def test_signal_saves_and_next_link_continues(launch: Launch, sandbox: Sandbox, data: Path) -> None:
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
        wait_until(lambda: end_mark(first_launch, first))
        assert end_mark(first_launch, first)["exit_code"] == 75
        assert "exiting program after receiving SIGTERM" in log_of(first_launch, first)
        saved_iteration = int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        assert saved_iteration == steps(first_launch, first)[-1][0]

        wait_until(lambda: len(link_jobs(first_launch)) == 2)
        second = link_jobs(first_launch)[1]
        wait_until(lambda: steps(first_launch, second) or end_mark(first_launch, second))
        assert not end_mark(first_launch, second), log_of(first_launch, second)[-4000:]
        assert steps(first_launch, second)[0] == (saved_iteration + 1, 32 * (saved_iteration + 1))
        follow = [SLIPWAY, "follow", run]
        with subprocess.Popen(follow, env=environment, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            text = "".join(itertools.takewhile(lambda line: "tokens/s" not in line, following.stdout))
            following.terminate()
        assert "the trainer started" in text and f"resumed from step {saved_iteration}" in text, text
    finally:
        jobs = link_jobs(first_launch)
        if jobs:
            subprocess.run(["scancel", *jobs], env=environment, check=False)


def test_chain_continues_after_going_back(
    launch: Launch, megatron_lm: MegatronLm, sandbox: Sandbox, data: Path, request: pytest.FixtureRequest
) -> None:
    """Links that save lower iterations than the first launch left do not fail.

    With ``--write-golden`` the directory of its checkpoints is recorded, for the chains of every `make test`.
    """
    environment = sandbox.environment()
    small = [*_GPT, "training.trainer.max_steps=400", "training.trainer.val_check_interval=400", _EVERY]
    small += ["training.trainer.devices=1", "training.model.tensor_model_parallel_size=1"]
    run = launch(*small, f"data_dir={data}")
    follow = [SLIPWAY, "follow", run]
    result = subprocess.run(follow, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert "COMPLETED" in result.stdout, result.stdout[-4000:] + result.stderr
    checkpoints, tracker = run / "checkpoints", run / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "400"
    moments = {"launch 1, 400 iterations": entries(checkpoints)}
    tracker.write_text("100")
    moments["back to iteration 100"] = entries(checkpoints)

    launch(*small, f"data_dir={data}", "resilience.links=4", "resilience.max_failures=1")
    second_launch = run / "launches" / "2"
    saves = []
    try:
        # A signal has each link save and end: after few iterations, and after a save of Megatron-LM's own.
        for number, until in enumerate((103, 160, 205), start=1):
            wait_until(lambda number=number: len(link_jobs(second_launch)) > number)
            job, successor = link_jobs(second_launch)[number - 1 : number + 1]
            subprocess.run(["scontrol", "hold", successor], env=environment, check=True)
            wait_until(
                lambda job=job, until=until: (
                    [step for step, _ in steps(second_launch, job) if step >= until]
                    or end_mark(second_launch, job)
                )
            )
            subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=environment, check=True)
            wait_until(lambda job=job: end_mark(second_launch, job).get("verdict"))
            end = end_mark(second_launch, job)
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
        result = subprocess.run(
            follow, cwd=tmp_path, env=sandbox.environment(), capture_output=True, text=True, timeout=400
        )
        assert "COMPLETED" in result.stdout, result.stdout[-4000:] + result.stderr
        logged_steps = steps(run / "launches" / str(number), "*")
        assert logged_steps == [(step, 32 * step) for step in range(before + 1, last + 1)]
        check_views(run, sandbox, before, last)


def check_views(run: Path, sandbox: Sandbox, before: int, last: int) -> None:
    """The verbs that show a training's steps read them from Megatron-LM's lines."""

    def show(verb: str) -> Any:
        command = [SLIPWAY, verb, run, "--json"]
        result = subprocess.run(
            command, env=sandbox.environment(), capture_output=True, text=True, timeout=120, check=False
        )
        return json.loads(result.stdout)

    (status,) = show("status")
    assert (status["state"], status["step"], status["max_steps"]) == ("COMPLETED", last, last)
    assert 0 < status["val_loss"] < 20 and 0 < status["loss"] < 20
    plot = show("plot")
    assert (plot["step"], plot["max_steps"]) == (last, last) and plot["last_loss"] == status["loss"]
    assert plot["last_held_out_loss"] == status["val_loss"]
    checks = {check["name"]: check["verdict"] for check in show("verify")["checks"]}
    names = ("ended well", "last step", "losses finite", "last step saved")
    assert {name: checks[name] for name in names} == dict.fromkeys(names, "ok"), checks
    launch = show("history")[-1]
    assert (launch["first_step"], launch["step"]) == (before, last), launch
    events = list(TensorboardReader(run / "newest" / "results", TAGS["megatron_lm"]).stream())
    assert [event.step for event in events if isinstance(event, Train)] == list(range(before + 1, last + 1))
    held_out = [event.loss for event in events if isinstance(event, Validation)]
    assert held_out[-1] == pytest.approx(status["val_loss"], rel=1e-5)
