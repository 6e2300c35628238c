"""A launcher killed at any moment leaves no job, or one that `slipway status` finds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.manifest import read_manifest
from launcher.sandbox.lifecycle import Sandbox
from tests.forked_slipway import run_forked

# The job itself does nothing: the test ends with the submission.
STAGE = ["stages=[data_preparation]", "data_preparation.inputs=[/etc/hostname]", "cluster.python=/bin/true"]
MOST_STEPS = 200

# An sbatch during which the launcher is killed, before or after Slurm has the job.
SHIM = """#!/bin/bash
case " $* " in *" --test-only "*) exec {real} "$@" ;; esac
[[ {when} == before ]] && kill -KILL $PPID
{real} "$@"
code=$?
[[ {when} == after ]] && kill -KILL $PPID
exit $code
"""


def run(*command: object, cwd: Path, env: dict[str, str], check: bool = True) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout


def killed_launchers(cwd: Path, env: dict[str, str], *overrides: str) -> list[int]:
    repository = str(Path(__file__).resolve().parents[2])
    program = [sys.executable, "-m", "tests.runs.dying_launcher", "1", MOST_STEPS]
    output = run(*program, *STAGE, *overrides, cwd=cwd, env={**env, "PYTHONPATH": repository})
    return [int(line) for line in output.split()]


def status(cwd: Path, env: dict[str, str]) -> dict[str, dict[str, Any]]:
    # Exits with 1 while some launch may still be at it.
    output = run_forked(["status", "--json"], cwd=cwd, env=env, timeout=250).stdout
    return {row["run"]: row for row in json.loads(output)}


@cache
def code() -> dict[Path, bytes]:
    """Return the files that a launch copies, by their names within the checkout."""
    source = Path(__file__).resolve().parents[2]
    paths = (source / "slipway").rglob("*.py")
    return {path.relative_to(source): path.read_bytes() for path in paths}


def assert_complete(launch: Path) -> None:
    """Assert that a launch that can be seen is whole."""
    for path, content in code().items():
        assert (launch / "code" / path).read_bytes() == content
    for name in ("launcher.json", "launcher_cmd.log", "task.sh"):
        assert (launch / name).stat().st_size


def age_manifests(results: Path) -> None:
    """Let all launches be old enough that nobody can be submitting them any more."""
    for path in results.glob("*/launches/*/launcher.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "created": "2020-01-01T00:00:00Z"}))


def slurm_jobs(cwd: Path, env: dict[str, str], prefix: str) -> dict[str, str]:
    """Return job ids by run name, from Slurm itself; one job for each run that is not cancelled."""
    output = run("squeue", "--noheader", "--states=all", "--Format=JobID:|,Name:|,State:|", cwd=cwd, env=env)
    rows = [[part.strip() for part in line.split("|")] for line in output.splitlines()]
    named_jobs = [
        (name, job) for job, name, state, *_ in rows if name.startswith(prefix) and state != "CANCELLED"
    ]
    assert len(dict(named_jobs)) == len(named_jobs), f"two jobs of one run: {named_jobs}"
    return {name.removeprefix(prefix): job for name, job in named_jobs}


@pytest.mark.slurm
def test_launches_killed_before_every_step_are_known_with_slurm(
    tmp_path: Path, plain_sandbox: Sandbox
) -> None:
    """There is no accounting; the partition is down, so that no job leaves a mark of its own."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "SLURM_CONF": plain_sandbox.environment()["SLURM_CONF"]}
    names = ["cluster=sandbox", "cluster.partition=cloud", "cluster.job_name_prefix=dying-"]
    kills = killed_launchers(tmp_path, env, *names)
    for launch in (tmp_path / "results").glob("*/launches/1"):
        assert_complete(launch)
    jobs = slurm_jobs(tmp_path, env, "dying-")
    try:
        rows = status(tmp_path, env)
        with_job = {name: row["job_id"] for name, row in rows.items() if row["job_id"]}
        assert with_job == jobs
        assert {rows[name]["state"] for name in jobs} == {"PENDING"}
        # Launchers were killed before and after the submission, and only the last one got through.
        assert f"k{len(kills) + 1}" in jobs
        assert 1 < len(jobs) < len(kills) - 10
        unrecorded = [name for name in jobs if not _recorded_job(tmp_path / "results" / name)]
        assert unrecorded, "some job is known by its tag alone"
        rows_without_job = {name: row for name, row in rows.items() if not row["job_id"]}
        assert {row["state"] for row in rows_without_job.values()} == {"UNKNOWN"}
        age_manifests(tmp_path / "results")
        rows = status(tmp_path, env)
        assert {name: row["job_id"] for name, row in rows.items() if row["job_id"]} == jobs
        assert {rows[name]["state"] for name in rows_without_job} == {"NOT_SUBMITTED"}
    finally:
        run("scancel", *jobs.values(), cwd=tmp_path, env=env)


@pytest.mark.slurm
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("partition", ["gpu", "cloud"])
def test_job_of_a_launcher_killed_while_slurm_answers_is_found(
    tmp_path: Path, sandbox: Sandbox, when: str, partition: str
) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    programs = tmp_path / "bin"
    programs.mkdir()
    real = run("bash", "-c", "command -v sbatch", cwd=tmp_path, env=env).strip()
    (programs / "sbatch").write_text(SHIM.format(real=real, when=when))
    (programs / "sbatch").chmod(0o755)
    prefix = f"{when}-{partition}-"
    names = ["cluster=sandbox", f"cluster.partition={partition}", f"cluster.job_name_prefix={prefix}"]
    shimmed = {**env, "PATH": f"{programs}:{env['PATH']}"}
    done = run_forked(["launch", *STAGE, *names], cwd=tmp_path, env=shimmed, timeout=60)
    assert done.returncode == -9
    run_dir = tmp_path / "results" / "tokenize_text"
    assert not _recorded_job(run_dir)
    expected = "PENDING" if partition == "cloud" else "COMPLETED"
    for _ in range(100):  # the orphaned sbatch may still be on its way, the job running
        row = status(tmp_path, env)["tokenize_text"]
        if row["state"] == expected:
            break
        time.sleep(0.2)
    jobs = slurm_jobs(tmp_path, env, prefix)
    try:
        assert (row["state"], row["job_id"]) == (expected, jobs["tokenize_text"])
    finally:
        run("scancel", row["job_id"] or "0", cwd=tmp_path, env=env, check=False)


STOPPED = """#!/bin/bash
case " $* " in *" --test-only "*) exec {real} "$@" ;; esac
kill -STOP {controller}
{real} "$@"
code=$?
kill -CONT {controller}
exit $code
"""


@pytest.mark.slurm
def test_an_answer_that_is_lost_is_no_refusal(tmp_path: Path, sandbox: Sandbox) -> None:
    """The controller does not answer in time, and takes the job all the same."""
    # A shorter patience than Slurm's own ten seconds, for sbatch alone.
    conf = Path(sandbox.environment()["SLURM_CONF"])
    hasty = tmp_path / "slurm.conf"
    hasty.write_text(conf.read_text() + "\nMessageTimeout=2\n")
    env = {**os.environ, "TMPDIR": str(tmp_path), "SLURM_CONF": str(conf)}
    real = run("bash", "-c", "command -v sbatch", cwd=tmp_path, env=env).strip()
    programs = tmp_path / "bin"
    programs.mkdir()
    controller = controller_pid(conf)
    text = STOPPED.format(real=f"env SLURM_CONF={hasty} {real}", controller=controller)
    (programs / "sbatch").write_text(text)
    (programs / "sbatch").chmod(0o755)
    names = ["cluster=sandbox", "cluster.partition=cloud", "cluster.job_name_prefix=lost-"]
    path = {"PATH": f"{programs}:{env['PATH']}"}
    done = run_forked(["launch", *STAGE, *names, "--json"], cwd=tmp_path, env={**env, **path}, timeout=100)
    for _ in range(100):
        jobs = slurm_jobs(tmp_path, env, "lost-")
        if jobs:
            break
        time.sleep(0.2)
    try:
        assert list(jobs) == ["tokenize_text"], "one job, however the answer was lost"
        row = status(tmp_path, env)["tokenize_text"]
        assert (row["state"], row["job_id"]) == ("PENDING", jobs["tokenize_text"])
        assert "Slurm did not answer: Socket timed out" in done.stderr
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["job_id"] == jobs["tokenize_text"]
    finally:
        os.kill(controller, signal.SIGCONT)
        run("scancel", *jobs.values(), cwd=tmp_path, env=env, check=False)


def controller_pid(conf: Path) -> int:
    (line,) = [line for line in conf.read_text().splitlines() if line.startswith("SlurmctldPidFile=")]
    return int(Path(line.partition("=")[2]).read_text())


@pytest.mark.slurm
def test_a_job_that_only_the_accounting_knows_is_found(tmp_path: Path, accounting_sandbox: Sandbox) -> None:
    conf = accounting_sandbox.environment()["SLURM_CONF"]
    env = {**os.environ, "TMPDIR": str(tmp_path), "SLURM_CONF": conf}
    chosen = [*STAGE, "cluster=sandbox", "cluster.job_name_prefix=accounted-"]
    done = run_forked(["launch", *chosen, "--json"], cwd=tmp_path, env=env, timeout=500)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    launch = Path(answer["run_dir"]) / "launches" / "1"
    for _ in range(200):
        if list((launch / "marks").glob("*.ended.json")):
            break
        time.sleep(0.1)
    manifest = json.loads((launch / "launcher.json").read_text())
    (launch / "launcher.json").write_text(json.dumps({**manifest, "job_id": None}))
    shutil.rmtree(launch / "marks")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "squeue").write_text("#!/bin/bash\n")  # the controller has forgotten it
    (programs / "squeue").chmod(0o755)
    forgetful = {**env, "PATH": f"{programs}:{env['PATH']}"}
    for _ in range(100):  # the accounting is late
        row = status(tmp_path, forgetful)["tokenize_text"]
        if row["state"] == "COMPLETED":
            break
        time.sleep(0.2)
    assert (row["state"], row["job_id"]) == ("COMPLETED", answer["job_id"])


def test_launches_killed_before_every_step_are_known_without_slurm(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    kills = killed_launchers(tmp_path, env, "cluster=local")
    results = tmp_path / "results"
    age_manifests(results)
    for _ in range(1000):  # a job of a busy machine begins late
        rows = status(tmp_path, env)
        if not {row["state"] for row in rows.values()} & {"RUNNING", "UNKNOWN"}:
            break
        time.sleep(0.1)
    # Each job of this machine that ran has left a log in its launch directory, and only those have.
    jobs = {path.parts[-4]: path.stem.rpartition("_")[2] for path in results.glob("*/launches/1/log-*.out")}
    assert {name: row["job_id"] for name, row in rows.items() if row["job_id"]} == jobs
    assert {rows[name]["state"] for name in jobs} == {"COMPLETED"}
    assert {row["state"] for name, row in rows.items() if name not in jobs} == {"NOT_SUBMITTED"}
    assert [name for name in jobs if not _recorded_job(results / name)]
    assert 1 < len(jobs) < len(kills) - 10


def _recorded_job(run_dir: Path) -> str | None:
    return read_manifest(run_dir / "launches" / "1").job_id
