"""Sweeps on a real Slurm: one submission, a run for each point, and a table at the end.

The sweeps that take time are launched first, and tested last.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.forked_slipway import run_forked
from tests.runs.faulty_sbatch import accepted_jobs, calls, install, plan

pytestmark = pytest.mark.slurm

PATIENCE_SECONDS = 280
# Nothing is trained: the tests are about the jobs. One point fails, and one runs until it is cancelled.
PAYLOAD = """#!/bin/bash
[[ ${SLURM_JOB_ID:-} ]] || exit 0
echo "the payload got $*"
case "$* " in
*/vocab_size=2000/*) exit 3 ;;
*/vocab_size=3000/*) exec sleep 3600 ;;
esac
"""
PREPARE = ["stages=[data_preparation]", "data_preparation.inputs=[/etc/hostname]", "cluster=sandbox"]
SEEDS = "data_preparation.seed="
LATER = "cluster.begin=now+5hours"
TRAIN = [
    "training=gpt3/tiny",
    "cluster=sandbox",
    "training.trainer.num_nodes=1",
    "training.trainer.devices=1",
    "training.trainer.max_steps=4",
    "training.trainer.val_check_interval=2",
    "training.trainer.limit_val_batches=1",
    "training.model.tensor_model_parallel_size=1",
    "training.model.micro_batch_size=2",
    "training.model.global_batch_size=4",
    "training.model.encoder_seq_length=32",
    "training.model.data.data_impl=mock",
    "+training.model.override_vocab_size=512",
    "env_vars.OMP_NUM_THREADS=1",
    "training.model.optim.sched.min_lr=0",
    "training.model.optim.sched.warmup_steps=0",
]
# Programs in front of squeue, which counts its calls, and of scontrol, whose site takes arrays of two tasks.
COUNTING = '#!/bin/bash\necho "$*" >>{calls}\nexec {real} "$@"\n'
SMALL_ARRAYS = (
    '#!/bin/bash\n[[ "$*" != "show config" ]] || exec echo "MaxArraySize            = 2"\nexec {real} "$@"\n'
)

Done = subprocess.CompletedProcess[str]


@dataclass
class Site:
    """A cluster whose sbatch is counted, and may be made to fail."""

    directory: Path
    environment: dict[str, str]

    def run(self, *words: object, code: int = 0, **variables: str) -> Done:
        command = [str(word) for word in words]
        environment = {**self.environment, **variables}
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
        return done

    def slipway(self, *words: object, code: int = 0, **variables: str) -> Done:
        """Run `slipway`, forked from a process that has imported it."""
        environment = {**self.environment, **variables}
        done = run_forked(words, cwd=self.directory, env=environment, timeout=PATIENCE_SECONDS)
        assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
        return done

    def sweep(self, name: str, *words: object, faults: tuple[str, ...] = (), **variables: str) -> Any:
        """Launch a sweep; return its JSON output."""
        faults_dir = str(plan(self.faults(name), faults))
        done = self.slipway("sweep", f"--name={name}", "--json", *words, FAULTS=faults_dir, **variables)
        return {**json.loads(done.stdout), "said": done.stderr}

    def prepare(self, name: str, *words: object, faults: tuple[str, ...] = (), **variables: str) -> Any:
        options = ["cluster.job_name_prefix=sweeps-", f"cluster.python={self.directory}/payload"]
        return self.sweep(name, *PREPARE, *options, *words, faults=faults, **variables)

    def faults(self, name: str) -> Path:
        return self.directory / "faults" / name

    def rows(self, *runs: object, **variables: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.slipway("status", "--json", *runs, **variables).stdout)
        return rows

    def results(self, name: str, code: int = 0) -> dict[str, dict[str, Any]]:
        """Return the points of a sweep once all have ended, by name, the best first."""
        output = self.slipway("sweep", "--results", name, "--wait", "--json", code=code).stdout
        return {point["point"]: point for point in json.loads(output)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, sandbox: Sandbox) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("sweeps")
    (directory / "payload").write_text(PAYLOAD)
    (directory / "payload").chmod(0o755)
    install(directory / "programs")
    environment = {
        **os.environ,
        "PATH": f"{directory}/programs:{os.environ['PATH']}",
        "SLURM_CONF": sandbox.environment()["SLURM_CONF"],
        "SLIPWAY_CACHE_DIR": str(directory / "cache"),
        "COLUMNS": "250",
    }
    site = Site(directory, environment)
    yield site
    jobs = [job for path in (directory / "faults").glob("*") for job in accepted_jobs(path)]
    if jobs:
        site.run("scancel", *jobs)


@pytest.fixture(scope="module")
def under_way(site: Site, warm_python: Path) -> dict[str, Any]:
    """Launch two sweeps that run while other things are tested."""
    prepared = site.prepare("prepared", "data_preparation.vocab_size=1000,2000,3000,4000")
    words = [*TRAIN, f"cluster.python={warm_python}", "training.model.optim.lr=1.0,1e-3"]
    trained = site.sweep("trained", *words)
    return {"prepared": prepared, "trained": trained}


def program(site: Site, name: str, text: str) -> str:
    """Write a program in front of all others; return the PATH that has it."""
    folder = site.directory / f"with-{name}"
    folder.mkdir()
    (folder / name).write_text(text.format(real=shutil.which(name), calls=folder / "calls"))
    (folder / name).chmod(0o755)
    return f"{folder}:{site.environment['PATH']}"


def test_two_hundred_points_are_one_submission_and_one_question(
    site: Site, under_way: dict[str, Any]
) -> None:
    sweep = site.prepare(
        "large", f"{SEEDS}range(0,100)", "data_preparation.max_files=1,2", LATER, "--throttle=7"
    )
    assert calls(site.faults("large")) == 1
    assert len(sweep["points"]) == 200
    (array,) = sweep["arrays"]
    queued = site.run("squeue", "--noheader", "--Format=JobArrayID:|,StdOut:|", f"--jobs={array}").stdout
    assert queued.startswith(f"{array}_[0-199%7]|")

    path = program(site, "squeue", COUNTING)
    rows = site.rows("large", PATH=path)
    queries = (site.directory / "with-squeue" / "calls").read_text().splitlines()
    assert len(queries) == 1
    assert {row["state"] for row in rows} == {"PENDING"}
    assert [row["job_id"] for row in rows] == [f"{array}_{task}" for task in range(200)]

    site.slipway(
        "hold", f"large/{sweep['points'][5]['run_dir'].rpartition('/')[2]}", "--base-results-dir=results"
    )
    reason = site.run("squeue", "--noheader", "--Format=Reason", f"--jobs={array}_5").stdout
    assert "JobHeldUser" in reason
    site.slipway("cancel", f"{array}_9")
    (cancelled_row,) = site.rows(f"{array}_9")
    assert cancelled_row["state"] == "CANCELLED"
    assert cancelled_row["reason"].startswith("by ")
    site.run("scancel", array)
    assert {row["state"] for row in site.rows("large")} == {"CANCELLED"}


def test_arrays_are_as_large_as_the_site_takes_them_and_keep_the_throttle(
    site: Site, under_way: dict[str, Any]
) -> None:
    path = program(site, "scontrol", SMALL_ARRAYS)
    sweep = site.prepare("split", f"{SEEDS}1,2,3", LATER, "--throttle=1", PATH=path)
    first, second = sweep["arrays"]
    waits = site.run("squeue", "--noheader", "--Format=JobID:|,Dependency:|", f"--jobs={second}").stdout
    assert f"afterany:{first}_*" in waits
    assert [point["job_id"] for point in sweep["points"]] == [f"{first}_0", f"{first}_1", f"{second}_0"]
    # The id of an array names its own points, and no others.
    job_ids = [row["job_id"] for row in site.rows(first)]
    assert job_ids == [f"{first}_0", f"{first}_1"]
    assert "is a sweep of 2 points" in site.slipway("logs", first, code=2).stderr
    assert "no launch of a job of that id" in site.slipway("status", f"{first}_2", code=2).stderr
    site.slipway("cancel", first)
    assert [row["state"] for row in site.rows("split")] == ["CANCELLED", "CANCELLED", "PENDING"]
    site.slipway("cancel", "split")
    assert {row["state"] for row in site.rows("split")} == {"CANCELLED"}


def test_an_answer_that_is_lost_makes_no_second_array(site: Site, under_way: dict[str, Any]) -> None:
    sweep = site.prepare("lost", f"{SEEDS}1,2", LATER, faults=("timeout",))
    assert "looking for the job by its tag" in sweep["said"]
    assert accepted_jobs(site.faults("lost")) == sweep["arrays"]
    assert {row["state"] for row in site.rows("lost")} == {"PENDING"}

    # A launcher that died before it wrote the ids down: the points are found by the tag of the array.
    point = Path(sweep["points"][1]["run_dir"])
    path = point / "launches" / "1" / "launcher.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "job_id": None, "launcher_pid": 2**22}))
    (point / "launches" / "1" / "marks" / "job").unlink(missing_ok=True)
    (row,) = site.rows(point)
    assert (row["state"], row["job_id"]) == ("PENDING", f"{sweep['arrays'][0]}_1")
    words = ["sweep", "--name=lost", *PREPARE, f"cluster.python={site.directory}/payload", f"{SEEDS}1,2"]
    refusal = site.slipway(
        *words, "cluster.job_name_prefix=sweeps-", LATER, code=2, FAULTS=str(site.faults("lost"))
    )
    assert f"was submitted as job {sweep['arrays'][0]}_1 after all" in refusal.stderr
    assert json.loads(path.read_text())["job_id"] == f"{sweep['arrays'][0]}_1"
    site.slipway("cancel", "lost")


def test_a_mistake_in_one_point_keeps_all_from_being_launched(site: Site) -> None:
    words = ["sweep", "--name=wrong", *TRAIN, "training.model.micro_batch_size=2,3"]
    refusal = site.slipway(*words, code=2, FAULTS=str(plan(site.faults("wrong"), ())))
    assert "in micro_batch_size=3" in refusal.stderr
    words = ["sweep", "--name=wrong", *TRAIN, "training.model.optim.lr=1e-3,2e-3", "cluster.partition=nope"]
    words.append("--no-check=cluster.partition")  # so that Slurm is asked
    refusal = site.slipway(*words, code=2, FAULTS=str(site.faults("wrong")))
    assert "invalid partition" in refusal.stderr
    assert calls(site.faults("wrong")) == 0
    assert not (site.directory / "results" / "wrong").exists()


def test_a_dry_run_shows_points_and_script_and_writes_nothing(site: Site) -> None:
    output = site.slipway(
        "sweep", "--name=dry", *TRAIN, "training.model.optim.lr=1e-3,2e-3", "--dry-run"
    ).stdout
    assert "\n2 points, each a run in results/dry" in output
    assert "#SBATCH --array=0-1\n" in output
    assert not (site.directory / "results" / "dry").exists()


def test_each_point_is_a_run_of_its_own(site: Site, under_way: dict[str, Any]) -> None:
    (array,) = under_way["prepared"]["arrays"]
    endless = site.directory / "results" / "prepared" / "vocab_size=3000"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and "the payload got" not in site.slipway("logs", endless).stdout:
        time.sleep(0.3)
    site.slipway("cancel", endless)
    points = site.results("prepared", code=1)
    states = {name: (point["state"], point["job_id"]) for name, point in points.items()}
    assert states == {
        "vocab_size=1000": ("COMPLETED", f"{array}_0"),
        "vocab_size=2000": ("FAILED", f"{array}_1"),
        "vocab_size=3000": ("CANCELLED", f"{array}_2"),
        "vocab_size=4000": ("COMPLETED", f"{array}_3"),
    }
    assert points["vocab_size=2000"]["reason"] == "exit code 3"
    for size in (1000, 2000, 3000, 4000):
        log = site.slipway("logs", f"{array}_{size // 1000 - 1}").stdout
        assert log.count("the payload got") == 1
        assert f"/vocab_size={size}/" in log
    assert "exit code 3" in site.slipway("history", "vocab_size=2000").stdout
    assert "name one of them, such as" in site.slipway("logs", "prepared", code=2).stderr
    once = ["squeue", "--noheader", "--states=all", "--Format=JobArrayID:|", f"--jobs={array}"]
    assert len(site.run(*once).stdout.split()) == 4, "there was one job for each point"


def test_sweeping_again_goes_on_with_the_same_runs(site: Site, under_way: dict[str, Any]) -> None:
    words = [*PREPARE, "cluster.job_name_prefix=sweeps-", f"cluster.python={site.directory}/payload"]
    words += ["data_preparation.vocab_size=1000,5000", "--name=prepared", "--wait", "--json"]
    done = site.slipway("sweep", *words, code=1, FAULTS=str(plan(site.faults("prepared"), ())))
    assert "1 of these points were launched before, and resume from their checkpoints" in done.stderr
    points = {point["point"]: point for point in json.loads(done.stdout)}
    launches = {name: point["launch"] for name, point in points.items()}
    assert (launches["vocab_size=1000"], launches["vocab_size=5000"], launches["vocab_size=4000"]) == (
        2,
        1,
        1,
    )
    assert points["vocab_size=5000"]["state"] == "COMPLETED"


@pytest.mark.trainer
def test_the_best_training_comes_first(site: Site, under_way: dict[str, Any]) -> None:
    """Nothing is learned with a learning rate of 1.0."""
    points = site.results("trained")
    assert list(points) == ["lr=1e-3", "lr=1.0"]
    assert [point["values"] for point in points.values()] == [
        {"training.model.optim.lr": "1e-3"},
        {"training.model.optim.lr": "1.0"},
    ]
    assert points["lr=1e-3"]["val_loss"] < points["lr=1.0"]["val_loss"]
    assert all(point["step"] == 4 and point["tokens_per_second"] for point in points.values())
    table = site.slipway("sweep", "--results", "trained").stdout.splitlines()
    assert table[0].split()[:5] == ["RANK", "POINT", "lr", "STATE", "STEP"]
    assert [line.split()[:5] for line in table[1:]] == [
        ["1", "2", "1e-3", "COMPLETED", "4/4"],
        ["2", "1", "1.0", "COMPLETED", "4/4"],
    ]
