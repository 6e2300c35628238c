"""`slipway launch --smoke` and `slipway verify` on real trainings, without Slurm and in a real salloc."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

STEPS = 24
SMALL = [
    "training=gpt3/tiny",
    "training.trainer.devices=1",
    "training.model.tensor_model_parallel_size=1",
    f"training.trainer.max_steps={STEPS}",
    "training.trainer.val_check_interval=12",
    "training.trainer.limit_val_batches=1",
    "training.model.encoder_seq_length=32",
    "training.model.data.splits_string='80,20,0'",
    "training.model.optim.sched.warmup_steps=2",
]
# In place of the trainer: rank 0 tells of the two steps that the smoke has.
STAND_IN = """#!/bin/bash
echo "$SLURMD_NODENAME $RANK $WORLD_SIZE" >"../results/rank$RANK"
((RANK)) && exit 0
cd ../results
for step in 1 2; do
    echo '{"kind": "train", "time": '$step', "step": '$step', "loss": '$LOSS'}' >>metrics.jsonl
done
"""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "results" / "metrics.jsonl").read_text().splitlines()]


def verify(run: Path, check: int) -> dict[str, Any]:
    done = run_command(SLIPWAY, "verify", run, "--json", cwd=run.parent, check=check)
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@pytest.fixture(scope="module")
def training(workplace: Path, warm_python: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the run of a training that was launched after its smoke, and the process."""
    launch = [SLIPWAY, "launch", "cluster=local", f"cluster.python={warm_python}", *SMALL]
    launch += ["training.run.name=sound", "--smoke", "--follow"]
    done = run_command(*launch, cwd=workplace)
    return workplace / "results" / "sound", done


@pytest.mark.trainer
def test_the_launch_goes_on_after_its_smoke(training: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run, done = training
    smoke = run.with_name("sound_smoke")
    assert "2 steps on 1 of 2 nodes, global batch 16 instead of 32" in done.stderr
    assert "smoke: passed; launching sound" in done.stderr
    (start, *_) = read_metrics(smoke)
    assert (start["world_size"], start["data"], start["max_steps"]) == (1, 1, 2)
    assert [event["step"] for event in read_metrics(smoke) if event["kind"] in ("train", "validation")] == [
        1,
        2,
        2,
    ]
    assert list((smoke / "checkpoints").iterdir()) == []
    assert read_metrics(run)[0]["world_size"] == 2
    # Both can be rendered again, each as it was.
    for directory, is_smoke in ((run, False), (smoke, True)):
        *_, render_line = (directory / "launcher_cmd.log").read_text().splitlines()
        assert ("--smoke" in render_line) is is_smoke
        script = run_command("bash", "-c", render_line.removeprefix("# "), cwd=run).stdout
        (written,) = directory.glob("newest/*_submission.sh")
        assert script == written.read_text()


@pytest.mark.trainer
def test_a_sound_training_is_verified(training: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run, _ = training
    done = run_command(SLIPWAY, "verify", run, cwd=run)
    assert done.stdout.splitlines()[0].split() == ["CHECK", "VERDICT", "EVIDENCE"]
    assert done.stdout.splitlines()[-1] == "sound, launch 1: verified"
    content = verify(run, 0)
    assert content["verdict"] == "verified"
    assert {check["verdict"] for check in content["checks"]} == {"ok"}
    assert len(content["checks"]) == 8


def cut_metrics(run: Path) -> None:
    path = run / "results" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[: STEPS // 2]))


def raise_max_steps(run: Path) -> None:
    path = run / "results" / "metrics.jsonl"
    path.write_text(path.read_text().replace(f'"max_steps": {STEPS}', '"max_steps": 9999'))


def spoil_loss(run: Path) -> None:
    path = run / "results" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 9, "loss": ', '"step": 9, "loss": NaN, "was": '))


def add_rank_failure(run: Path) -> None:
    failure = {"time": 1.0, "rank": 1, "host": "n1", "error": "OSError: x", "log": None}
    (run / "results" / "failures").mkdir()
    (run / "results" / "failures" / "globalrank-1.json").write_text(json.dumps(failure))


def remove_rank_log(run: Path) -> None:
    next((run / "results").glob("nemo_log_globalrank-1_*")).unlink()


def empty_checkpoint_file(run: Path) -> None:
    next((run / "checkpoints" / "latest").resolve().glob("*.distcp")).write_bytes(b"")


def remove_end_marks(run: Path) -> None:
    for mark in (run / "newest" / "marks").glob("*.ended.json"):
        mark.unlink()


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("damage", "failed"),
    [
        (cut_metrics, "last step"),
        (raise_max_steps, "last step"),
        (spoil_loss, "losses finite"),
        (add_rank_failure, "no error of a rank"),
        (remove_rank_log, "every rank ended"),
        (empty_checkpoint_file, "last step saved"),
        (remove_end_marks, "ended well"),
    ],
)
def test_a_training_that_was_spoiled_is_not_verified(
    training: tuple[Path, subprocess.CompletedProcess[str]],
    tmp_path: Path,
    damage: Callable[[Path], None],
    failed: str,
) -> None:
    run = shutil.copytree(training[0], tmp_path / "moved", symlinks=True)
    assert verify(run, 0)["verdict"] == "verified", "also at another place"
    damage(run)
    content = verify(run, 1)
    assert failed in [check["name"] for check in content["checks"] if check["verdict"] == "failed"]


@pytest.mark.trainer
def test_nothing_is_launched_after_a_failed_smoke(workplace: Path, tmp_path: Path, warm_python: Path) -> None:
    """The trainer notices that the file is no index, where the check that would is left out."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"broken{suffix}").write_bytes(b"no index")
    data = [f"training.model.data.data_prefix=[{tmp_path}/broken]", "training.run.name=broken"]
    data += [f"cluster.python={warm_python}", "--no-check=path.data"]
    done = run_command(
        SLIPWAY, "launch", "cluster=local", *SMALL, *data, "--smoke", "--json", cwd=workplace, check=1
    )
    assert "/broken: not a Megatron data set: its .idx is not Megatron's" in done.stderr
    assert "smoke: failed, and broken was not launched" in done.stderr
    assert done.stdout == ""
    assert not (workplace / "results" / "broken").exists()


@pytest.fixture
def stand_in(tmp_path: Path) -> list[str]:
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return ["training=gpt3/tiny", f"cluster.python={path}"]


@pytest.mark.slurm
def test_smoke_runs_on_the_first_node_of_an_allocation(
    tmp_path: Path, sandbox: Sandbox, stand_in: list[str]
) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    launch = [SLIPWAY, "launch", "cluster=interactive", *stand_in, "env_vars.LOSS=5.0", "--smoke", "--follow"]
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
    done = run_command(*salloc, *launch, cwd=tmp_path, **conf)
    assert "smoke: passed; launching gpt3_tiny" in done.stderr
    places = {
        run: sorted(path.read_text().split() for path in (tmp_path / "results" / run).glob("results/rank*"))
        for run in ("gpt3_tiny_smoke", "gpt3_tiny")
    }
    first, second = sorted({node for node, *_ in places["gpt3_tiny"]})
    assert places["gpt3_tiny_smoke"] == [[first, "0", "2"], [first, "1", "2"]]
    assert [node for node, *_ in places["gpt3_tiny"]] == [first, first, second, second]


@pytest.mark.slurm
def test_invalid_loss_in_a_smoke_job_stops_the_launch(
    tmp_path: Path, sandbox: Sandbox, stand_in: list[str]
) -> None:
    """A job that completes is not enough."""
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    launch = [SLIPWAY, "launch", "cluster=sandbox", *stand_in, "env_vars.LOSS=NaN", "--smoke"]
    done = run_command(*launch, "cluster.nodelist='n[2-3]'", cwd=tmp_path, check=1, **conf)
    assert "smoke: losses finite: failed: not a finite number: training loss of steps 1, 2" in done.stderr
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["gpt3_tiny_smoke"]
    ranks = (tmp_path / "results" / "gpt3_tiny_smoke" / "results").glob("rank*")
    assert {path.read_text().split()[0] for path in ranks} == {"n2"}


@pytest.mark.slurm
def test_launch_that_would_be_refused_needs_no_smoke(
    tmp_path: Path, sandbox: Sandbox, stand_in: list[str]
) -> None:
    """The smoke itself would find room in this allocation."""
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    launch = [SLIPWAY, "launch", "cluster=interactive", *stand_in, "env_vars.LOSS=5.0", "--smoke"]
    done = run_command("salloc", "--quiet", "--nodes=1", *launch, cwd=tmp_path, check=2, **conf)
    assert "num_nodes=2: the allocation that this shell is in has 1" in done.stderr
    assert not (tmp_path / "results").exists()
