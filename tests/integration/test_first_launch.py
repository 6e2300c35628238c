"""From one command to a training that continues, on a real Slurm and without Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

SMALL = [
    "training=gpt3/tiny",
    "training.trainer.max_steps=4",
    "training.trainer.val_check_interval=2",
    "training.trainer.limit_val_batches=1",
    "training.model.encoder_seq_length=32",
    "training.model.data.splits_string='80,20,0'",
]


def metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "results" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slurm
@pytest.mark.trainer
def test_training_on_slurm_is_continued_by_a_second_launch(
    repository: Path, workplace: Path, accounting_sandbox: Sandbox, warm_python: Path
) -> None:
    """The ranks are forked; those of the README's commands start as a user's do."""
    conf = {"SLURM_CONF": accounting_sandbox.environment()["SLURM_CONF"]}
    warm = f"cluster.python={warm_python}"
    main = [sys.executable, repository / "launcher" / "main.py", "cluster=sandbox", *SMALL, warm]
    done = run_command(*main, "--follow", cwd=workplace, **conf)
    assert "held-out loss" in done.stdout
    assert "COMPLETED" in done.stdout

    run = workplace / "results" / "gpt3_tiny"
    manifest = json.loads((run / "launcher.json").read_text())
    job = manifest["job_id"]
    assert (run / "launcher.log").read_text() == f"Submitted batch job {job}\n"
    for name in (
        "gpt3_tiny_hydra.yaml",
        "launcher_cmd.log",
        f"log-nemo-megatron-gpt3_tiny_{job}.out",
        "nemo-megatron-gpt3_tiny_submission.sh",
        "results/cmd-args.log",
        "results/hparams.yaml",
        *(f"results/nemo_log_globalrank-{rank}_localrank-{rank % 2}.txt" for rank in range(4)),
    ):
        assert (run / name).is_file(), name
    assert list((run / "results").glob("events.out.tfevents.*"))

    steps = ["sacct", "--noheader", "--parsable2", f"--jobs={job}", "--format=JobID,NTasks,NNodes,State"]
    assert f"{job}.0|4|2|COMPLETED" in run_command(*steps, cwd=workplace, **conf).stdout.splitlines()

    start = metrics(run)[0]
    assert (start["world_size"], start["tensor"], start["data"], start["step"]) == (4, 2, 2, 0)

    launch = [SLIPWAY, "launch", "cluster=sandbox", *SMALL, "training.trainer.max_steps=6", warm]
    second = run_command(*launch, "--follow", cwd=workplace, **conf)
    assert "COMPLETED" in second.stdout
    assert metrics(run)[0]["step"] == 4, "the second launch continues where the first ended"
    assert metrics(run)[-1]["step"] == 6
    assert metrics(run / "launches" / "1")[-1]["step"] == 4, "the evidence of the first launch is untouched"

    rows = json.loads(run_command(SLIPWAY, "status", "gpt3_tiny", "--json", cwd=workplace, **conf).stdout)
    assert (rows[0]["state"], rows[0]["step"], rows[0]["launch"]) == ("COMPLETED", 6, 2)
    log = run_command(SLIPWAY, "logs", "gpt3_tiny", "--launch", "1", cwd=workplace, **conf).stdout
    assert "step 4/4 | loss" in log
    # Both launches together; the first held-out loss is the first launch's.
    verdict = json.loads(run_command(SLIPWAY, "verify", "gpt3_tiny", "--json", cwd=workplace, **conf).stdout)
    assert verdict["verdict"] == "verified"
    assert [c["evidence"] for c in verdict["checks"] if c["name"] == "no step missing"] == ["steps 1-6"]
    run_command(SLIPWAY, "plot", "gpt3_tiny", cwd=workplace, **conf)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.trainer
def test_same_plan_trains_without_slurm(workplace: Path, warm_python: Path) -> None:
    launch = [SLIPWAY, "launch", "cluster=local", *SMALL]
    name = [
        "training.run.name=local_run",
        "training.trainer.max_steps=2",
        "training.model.data.data_impl=mock",
        "+training.model.override_vocab_size=512",
        f"cluster.python={warm_python}",
    ]
    done = run_command(*launch, *name, "--follow", cwd=workplace)
    assert "COMPLETED" in done.stdout
    assert metrics(workplace / "results" / "local_run")[-1]["step"] == 2


@pytest.mark.trainer
def test_failed_training_is_reported_with_its_reason(workplace: Path) -> None:
    launch = [SLIPWAY, "launch", "cluster=local", *SMALL]
    name = ["training.run.name=fails", "training.model.fsdp=True"]
    refusal = run_command(*launch, *name, cwd=workplace, check=2)
    assert "training.model.fsdp=True: FSDP is not in this version" in refusal.stderr
    done = run_command(*launch, *name, "--no-check=engine.megatron", "--follow", cwd=workplace, check=1)
    assert "FAILED" in done.stdout
    assert "model.fsdp" in done.stdout + done.stderr


@pytest.mark.slurm
def test_launch_that_slurm_would_refuse_writes_nothing(tmp_path: Path, sandbox: Sandbox) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    launch = [SLIPWAY, "launch", *SMALL, "cluster=sandbox"]
    nope = ["cluster.partition=nope", "--no-check=cluster.partition"]  # else it is told before Slurm is asked
    done = run_command(*launch, *nope, cwd=tmp_path, check=2, **conf)
    assert "invalid partition" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slurm
@pytest.mark.parametrize("overrides", [["training=gpt3/126m"], ["training=gpt3/5b"], ["training=gpt3/175b"]])
def test_slurm_accepts_the_scripts_of_large_clusters(
    tmp_path: Path, sandbox: Sandbox, overrides: list[str]
) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    launch = [SLIPWAY, "launch", "cluster=bcm", *overrides, "--dry-run"]
    script = tmp_path / "script.sh"
    script.write_text(run_command(*launch, cwd=tmp_path, **conf).stdout)
    done = run_command("sbatch", "--test-only", "--partition=cloud", script, cwd=tmp_path, **conf)
    assert "to start at" in done.stderr


@pytest.mark.slurm
def test_a_job_that_must_wait_is_submitted_with_a_warning(tmp_path: Path, sandbox: Sandbox) -> None:
    """`sbatch --test-only` rejects what the cluster cannot start now; sbatch queues it, and so do we."""
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    launch = [SLIPWAY, "launch", *SMALL, "cluster=sandbox", "--json"]
    drained = ["scontrol", "update", "NodeName=n[1-3]"]
    run_command(*drained, "State=DRAIN", "Reason=test", cwd=tmp_path, **conf)
    try:
        done = run_command(*launch, "--no-check=cluster.nodes", cwd=tmp_path, **conf)
        assert "the job would wait" in done.stderr
        job = json.loads(done.stdout)["job_id"]
        rows = json.loads(run_command(SLIPWAY, "status", "gpt3_tiny", "--json", cwd=tmp_path, **conf).stdout)
        run_command("scancel", job, cwd=tmp_path, **conf)
    finally:
        run_command(*drained, "State=RESUME", cwd=tmp_path, **conf)
    assert rows[0]["state"] == "PENDING"
