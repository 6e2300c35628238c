"""A chain of trainings, then its conversion and its evaluation, on a real Slurm; then the page about it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from slipway.common.node.marks import read_attempts
from tests.integration.conftest import SLIPWAY, run_command

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(400)]

RUNS = ("gpt3_tiny", "gpt3_tiny_conversion", "gpt3_tiny_evaluation")
STEPS = 3
TRAINING = [
    "training=gpt3/tiny",
    "training.trainer.num_nodes=1",
    f"training.trainer.max_steps={STEPS}",
    # Each link ends after its first step, and saves.
    "training.trainer.max_time='00:00:00:00'",
    "training.trainer.val_check_interval=1",
    "training.trainer.limit_val_batches=1",
    "training.model.encoder_seq_length=32",
    "training.model.max_position_embeddings=32",
    "training.model.hidden_size=64",
    "training.model.micro_batch_size=4",
    "training.model.global_batch_size=4",
    "training.model.optim.sched.warmup_steps=1",
]


class Place:
    """A directory with data, and `slipway` in it."""

    def __init__(self, directory: Path, slurm_conf: str) -> None:
        self.directory, self._slurm_conf = directory, slurm_conf

    def slipway(self, *words: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        return run_command(SLIPWAY, *words, cwd=self.directory, check=check, SLURM_CONF=self._slurm_conf)

    def json(self, *words: str) -> Any:
        return json.loads(self.slipway(*words, "--json").stdout)


@pytest.fixture(scope="module")
def place(
    sandbox: Sandbox, workplace: Path, warm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    """Launch a chain of three links with its two stages; return its directory when all are over."""
    directory = tmp_path_factory.mktemp("stages")
    (directory / "data").symlink_to(workplace / "data")
    place = Place(directory, sandbox.environment()["SLURM_CONF"])
    stages = ["stages=[training,conversion,evaluation]", "resilience.links=9", "cluster=sandbox"]
    place.slipway("launch", *stages, *TRAINING, f"cluster.python={warm_python}", "--follow", check=None)
    return place


def test_each_stage_runs_once_behind_a_chain_of_three_links(place: Place) -> None:
    training, conversion, evaluation = (place.json("history", run) for run in RUNS)
    assert [(attempt["link"], attempt["step"]) for attempt in training[0]["attempts"]] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    for launches in (training, conversion, evaluation):
        assert [launch["state"] for launch in launches] == ["COMPLETED"]
    assert conversion[0]["attempts"] == evaluation[0]["attempts"] == [], "one attempt each"
    ended = training[0]["attempts"][-1]["ended"]
    launches = [place.directory / "results" / run / "launches" / "1" for run in RUNS[1:]]
    (converted,), (evaluated,) = map(read_attempts, launches)
    # In whole seconds, of which the conversion may take none.
    times = [ended, converted.started, converted.ended, evaluated.started]
    assert times == sorted(times)
    assert [converted.started, evaluated.started] == [conversion[0]["started"], evaluation[0]["started"]]


def test_the_verbs_about_jobs_know_the_stages(place: Place) -> None:
    states = {row["run"]: row["state"] for row in place.json("status")}
    assert states == dict.fromkeys(RUNS, "COMPLETED")
    for run in RUNS[1:]:
        assert place.json("verify", run)["verdict"] == "verified", run
    written = f"{place.directory}/results/gpt3_tiny_conversion/huggingface/step-{STEPS}"
    assert written in place.slipway("logs", "gpt3_tiny_conversion").stdout
    assert "held-out loss" in place.slipway("logs", "gpt3_tiny_evaluation").stdout


def test_the_evaluation_is_of_the_last_checkpoint(place: Place) -> None:
    (result,) = place.json("plot", "gpt3_tiny")["evaluations"]
    content = json.loads((place.directory / f"results/gpt3_tiny/evaluations/step-{STEPS}.json").read_text())
    assert f"-step={STEPS}-" in content["checkpoint"]
    assert (result["step"], result["loss"]) == (STEPS, content["perplexity"]["loss"])
    table = place.slipway("history", "gpt3_tiny").stdout
    assert re.search(rf"^{STEPS} +{result['loss']:.4f} +{result['perplexity']:.2f}$", table, re.MULTILINE)


def test_the_commands_of_the_page_run_as_written(place: Place, repository: Path, warm_python: Path) -> None:
    page = (repository / "docs" / "conversion.md").read_text()
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)).splitlines()
    assert len(commands) >= 2
    for command in commands:
        place.slipway(*command.split()[1:], f"cluster.python={warm_python}")
    report = json.loads((place.directory / "models/gpt3_tiny/report.json").read_text())
    assert report["passed"] is True
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=place.directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import ")
