"""Hostile values through the real `sbatch` and `srun`: they arrive byte for byte, and nothing is executed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from launcher.config.overrides import hydra_value
from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

CASES = [
    "two  words ",
    """it's "quoted" twice""",
    "$HOME ${HOME} $$ $1",
    "`touch canary`",
    "$(touch canary)",
    "100%j %A_%a %% %",
    "a;touch canary;b && touch canary | touch canary",
    "x # not a comment",
    "größe 日本 🚀 é",
    "\t,:&|<>*?~!()[]{}=@^-- \x01\x7f'\"`$;%#ü",
]
# Backslashes cannot be in a log's path.
WITH_BACKSLASH = r"\ \\ \n \" \' \$HOME \${HOME} %\j"

# Each task records its environment and arguments under its rank.
RECORDER = """#!/bin/sh
printf '%s\\0' "$HOSTILE" "$PWD" "$@" >"$RECORD/$SLURM_PROCID"
"""


@pytest.mark.slurm
def test_values_arrive_in_the_tasks_of_a_job(tmp_path: Path, sandbox: Sandbox) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    launches = [_launch(tmp_path / str(number), case, conf) for number, case in enumerate(CASES)]
    for number, (case, launch) in enumerate(zip(CASES, launches, strict=True)):
        place = tmp_path / str(number)
        run_dir = Path(launch["run_dir"])
        assert run_dir.parent.name == case
        _wait_for(run_dir / "launches" / "1" / "marks" / f"{launch['job_id']}.0.ended.json")
        log = run_dir / f"log-nemo-megatron-tokenize_text_{launch['job_id']}.out"
        assert "the tasks ended with exit code 0" in log.read_text(), log.read_text()
        recorded = (place / "record" / "0").read_bytes().decode().split("\0")[:-1]
        assert recorded[:6] == [case, f"{run_dir}/launches/1/code", "-u", "-m", "slipway.corpus", "run"]
        assert recorded[6:] == [
            f"--config-path={run_dir}/launches/1",
            "--config-name=tokenize_text_hydra.yaml",
        ]
        config = yaml.safe_load((run_dir / "launches" / "1" / "tokenize_text_hydra.yaml").read_text())
        assert config["data_preparation"]["pattern"] == f"{case}{WITH_BACKSLASH}"
        assert config["data_preparation"]["inputs"] == [f"{place}/{case}/input"]
    assert not list(tmp_path.rglob("canary*"))
    # The verbs find such runs too.
    runs = [launch["run_dir"] for launch in launches]
    status = json.loads(run_command(SLIPWAY, "status", *runs, "--json", cwd=tmp_path).stdout)
    assert [row["job_id"] for row in status] == [launch["job_id"] for launch in launches]
    assert {row["state"] for row in status} == {"COMPLETED"}


def _launch(place: Path, case: str, conf: dict[str, str]) -> dict[str, str]:
    (place / "record").mkdir(parents=True)
    (place / case).mkdir()
    (place / case / "input").touch()
    recorder = place / case / "recorder"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    overrides = {
        "base_results_dir": f"{place}/{case}",
        "cluster.python": str(recorder),
        "data_preparation.pattern": case + WITH_BACKSLASH,
        "env_vars.HOSTILE": case,
        "env_vars.RECORD": str(place / "record"),
    }
    words = [f"{key}={hydra_value(value)}" for key, value in overrides.items()]
    words += [
        "stages=[data_preparation]",
        f"data_preparation.inputs=[{hydra_value(f'{place}/{case}/input')}]",
    ]
    done = run_command(SLIPWAY, "launch", "cluster=sandbox", *words, "--json", cwd=place, **conf)
    launch: dict[str, str] = json.loads(done.stdout)
    return launch


@pytest.mark.slurm
def test_values_arrive_in_every_task_of_a_training(tmp_path: Path, sandbox: Sandbox) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    place = tmp_path / "it's; $(touch canary) #1 %j"
    (place / "record").mkdir(parents=True)
    (place / "recorder").write_text(RECORDER)
    (place / "recorder").chmod(0o755)
    overrides = {
        "base_results_dir": f"{place}/results",
        "cluster.python": f"{place}/recorder",
        "env_vars.HOSTILE": "$(touch canary)",
        "env_vars.RECORD": f"{place}/record",
    }
    words = [f"{key}={hydra_value(value)}" for key, value in overrides.items()]
    command = [SLIPWAY, "launch", "training=gpt3/tiny", "cluster=sandbox", *words, "--follow"]
    run_command(*command, cwd=place, **conf)
    launch = f"{place}/results/gpt3_tiny/launches/1"
    arguments = [
        "-u",
        "-m",
        "slipway.trainer.pretrain",
        f"--config-path={launch}",
        "--config-name=gpt3_tiny_hydra.yaml",
    ]
    for rank in range(4):
        recorded = (place / "record" / str(rank)).read_bytes().decode().split("\0")[:-1]
        assert recorded == ["$(touch canary)", f"{launch}/code", *arguments]
    assert not list(tmp_path.rglob("canary*"))


@pytest.mark.slurm
def test_slurm_variables_of_the_shell_change_nothing_and_are_reported(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    shell = {
        "SBATCH_PARTITION": "cloud",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_EXPORT": "NONE",
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": "4",
        "SLURM_EXPORT_ENV": "NONE",
        "SLURM_CONF": sandbox.environment()["SLURM_CONF"],
    }
    stage = [
        "stages=[data_preparation]",
        "data_preparation.inputs=[/etc/hostname]",
        "cluster.python=/bin/true",
    ]
    command = [SLIPWAY, "launch", "cluster=sandbox", *stage]
    done = run_command(*command, "--json", cwd=tmp_path, **shell)
    assert "SBATCH_PARTITION=cloud of your shell is not passed on" in done.stderr
    assert "instead: cluster.partition=cloud" in done.stderr
    assert "job 1, in which you are" in done.stderr
    job = json.loads(done.stdout)["job_id"]
    fields = ["--noheader", "--states=all", f"--jobs={job}", "--Format=Partition:|,TimeLimit:|,NumNodes:|"]
    conf = {"SLURM_CONF": shell["SLURM_CONF"]}
    assert run_command("squeue", *fields, cwd=tmp_path, **conf).stdout.strip() == "gpu|1:00:00|1|"


def _wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} did not appear")
