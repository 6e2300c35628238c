"""`slipway cancel` on a real Slurm, and without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from control_project import Project, wait_until

from slipway.common.node.marks import GIVEN_UP, claim


@pytest.mark.slurm
def test_pending_jobs_end_before_running_ones(project: Project) -> None:
    """The second launch would otherwise begin as soon as the first has ended."""
    running, waiting = project.launch_ranks(), project.launch_ranks()
    project.wait_until_it_trains(ranks=4)
    code, out, err = project.slipway("cancel", "run", "--wait")
    assert (code, err) == (0, "")
    first, second, *ends = out.splitlines()
    assert first.startswith(f"cancelled job {waiting} of run (launch 2): it was PENDING (Dependency")
    assert second.startswith(f"cancelled job {running} of run (launch 1): it was RUNNING on n[")
    assert sorted(line.split(":")[0] for line in ends) == [
        f"job {running} of run (launch 1) has ended",
        f"job {waiting} of run (launch 2) has ended",
    ]
    assert all(" CANCELLED" in line for line in ends)
    assert not list(project.launch_dir(2).glob("log-*")), "the second launch never began"
    code, out, err = project.slipway("cancel", "run")
    assert (code, err) == (0, "")
    assert f"job {waiting} of run (launch 2): it is over: CANCELLED" in out


@pytest.mark.slurm
def test_save_lets_what_runs_save_and_cancels_what_waits(project: Project) -> None:
    running, waiting = project.launch_ranks(), project.launch_ranks()
    project.wait_until_it_trains(ranks=4)
    code, out, err = project.slipway("cancel", "--save", "--wait", "--json", "run")
    assert (code, err) == (0, "")
    queued, saving = json.loads(out)
    assert (queued["job_id"], queued["done"], queued["state"]) == (waiting, "cancelled", "PENDING")
    assert queued["end"]["state"] == "CANCELLED"
    assert (saving["job_id"], saving["done"]) == (running, "asked to save and exit")
    assert saving["state"] == "RUNNING" and saving["node_list"].startswith("n[")
    assert saving["end"]["state"] == "INTERRUPTED"
    assert [end["exit_code"] for end in project.end_marks()] == [75]
    assert project.log().count(" saves") == 4


@pytest.mark.slurm
def test_cancel_ends_only_the_named_launches(project: Project) -> None:
    chosen = [project.launch("cluster.partition=cloud") for _ in range(3)]
    other = project.launch("cluster.partition=cloud", name="other")
    assert project.slipway("cancel", "run", "--launch", "2")[0] == 0
    assert project.slipway("cancel", chosen[2])[0] == 0
    assert [project.state(job).split()[0] for job in [*chosen, other]] == [
        "PENDING", "CANCELLED", "CANCELLED", "PENDING",
    ]  # fmt: skip
    code, _, err = project.slipway("cancel", "run", "othre")
    assert code == 2 and "'othre'" in err
    assert project.state(chosen[0]).startswith("PENDING"), "a mistake ends nothing"
    code, out, _ = project.slipway("cancel", "other", "run")
    assert code == 0 and out.count("cancelled job") == 2
    code, _, err = project.slipway("cancel", "run", "--launch", "7")
    assert code == 2 and "launches: 1, 2, 3" in err


@pytest.mark.slurm
def test_a_job_whose_answer_was_lost_is_cancelled(project: Project) -> None:
    job = project.launch("cluster.partition=cloud")
    _forget_job(project.launch_dir())
    code, out, _ = project.slipway("cancel", "run")
    assert code == 0 and f"cancelled job {job} of run" in out
    assert project.state(job).startswith("CANCELLED")


@pytest.mark.slurm
def test_a_launch_without_a_job_is_given_up(project: Project) -> None:
    """A job of the launch that comes afterwards does nothing."""
    job = project.launch("cluster.partition=cloud")
    project.slipway("cancel", "run", "--wait")
    manifest = _forget_job(project.launch_dir(), tag="a-tag-that-no-job-has")
    code, out, err = project.slipway("cancel", "run")
    assert (code, err) == (0, "")
    assert out.startswith("gave up run (launch 1): no job of it is known")
    assert claim(project.launch_dir(), job) == GIVEN_UP
    unanswering = project.directory / "slurm.conf"
    unanswering.write_text("ClusterName=gone\n")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "slurm_conf": str(unanswering)}))
    code, _, err = project.slipway("cancel", "run")
    assert code == 3 and "if there is a job, it exits as soon as it starts" in err


@pytest.mark.slurm
def test_cancel_of_an_array(project: Project) -> None:
    """Tasks run singly: when the first leaves, no other begins."""
    job = project.launch("cluster.sbatch={array: 0-2%1}")
    project.wait_until_it_trains()
    code, out, err = project.slipway("cancel", "--save", "--wait", "run")
    assert code == 0, err
    assert out.startswith(f"asked job {job} of run (launch 1) to save and exit: it is RUNNING")
    assert len(project.end_marks()) == 1
    assert project.log().count(" saves") == 1
    job = project.launch("cluster.sbatch={array: 0-2%1}")
    project.wait_until_it_trains(2)
    subprocess.run(["scontrol", "suspend", f"{job}_0"], check=True)
    code, out, err = project.slipway("cancel", "--save", "run")
    assert code == 1 and "no running task can save a checkpoint" in err
    assert project.state(job).count("PENDING") == 2, "a refusal ends nothing"
    subprocess.run(["scontrol", "resume", f"{job}_0"], check=True)
    assert project.slipway("cancel", f"{job}_2")[0] == 0
    states = project.state(job)
    assert "RUNNING" in states and "PENDING" in states


def _forget_job(launch_dir: Path, **changes: str) -> Path:
    """Write a manifest as of a launcher that died before Slurm answered; return its path."""
    manifest = launch_dir / "launcher.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "job_id": None, **changes}))
    return manifest


@pytest.mark.slurm
def test_one_refusal_does_not_stop_the_rest(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm refuses one job as another user's; the other one is our own."""
    theirs = project.launch("cluster.partition=cloud", name="theirs")
    ours = project.launch("cluster.partition=cloud", name="ours")
    programs = project.directory / "bin"
    programs.mkdir()
    (programs / "scancel").write_text(
        f"""#!/bin/bash
PATH=${{PATH#*:}}
[[ " $* " == *" {theirs} "* ]] || exec scancel "$@"
echo "scancel: error: Kill job error on job id {theirs}: Access/permission denied" >&2
exit 1
"""
    )
    (programs / "scancel").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(programs), prepend=":")
        code, out, err = project.slipway("cancel", "theirs", "ours")
    assert code == 1
    assert f"job {theirs} of theirs (launch 1) was not cancelled" in err and "permission denied" in err
    assert f"cancelled job {ours} of ours" in out
    assert [project.state(job).split()[0] for job in (theirs, ours)] == ["PENDING", "CANCELLED"]


def test_cancel_without_slurm(local_project: Project) -> None:
    project = local_project
    job = project.launch()
    project.wait_until_it_trains()
    code, out, _ = project.slipway("cancel", "run", "--save", "--wait")
    assert code == 0
    assert out.startswith(f"asked job {job} of run (launch 1) to save and exit: it is RUNNING on ")
    assert "has ended: INTERRUPTED (saved before its end" in out
    job = project.launch()
    project.wait_until_it_trains(2)
    code, out, _ = project.slipway("cancel", "run", "--wait")
    assert code == 0 and f"cancelled job {job} of run (launch 2)" in out
    assert "has ended: CANCELLED (by " in out
    wait_until(lambda: project.end_marks(2))
    code, _, err = project.slipway("cancel", "run", "-i")
    assert code == 2 and "not a terminal" in err


@pytest.mark.parametrize("ending", ["slipway cancel", "slipway cancel --save", "kill"])
def test_second_local_launch_of_a_run_waits_and_is_cancelled(local_project: Project, ending: str) -> None:
    """It is told of at launch, PENDING, and CANCELLED without a mark of `slipway cancel`, too."""
    project, turns = local_project, "data_preparation.run.dependency=singleton"
    first = project.launch(turns)
    project.wait_until_it_trains()
    second = project.launch(turns)
    holder = f"it waits for the end of job {first} (launch 1)"
    assert f"{holder}, of the same run" in project.told
    wait_until(lambda: f"waits for the end of job {first} (launch 1)" in project.log(2))
    code, out, _ = project.slipway("status", "run", "--json")
    rows = {item["job_id"]: (item["state"], item["reason"]) for item in json.loads(out)}
    assert (code, rows) == (0, {first: ("RUNNING", None), second: ("PENDING", holder)})
    if ending == "kill":
        os.killpg(int(second), signal.SIGTERM)
    else:
        assert project.slipway("cancel", second, *ending.split()[2:])[0] == 0
    wait_until(lambda: project.end_marks(2))
    assert project.slipway("cancel", "run", "--save", "--wait")[0] == 0
    (interrupted,) = json.loads(project.slipway("status", "run", "--json")[1])
    assert (interrupted["job_id"], interrupted["state"]) == (first, "INTERRUPTED")
    (cancelled,) = json.loads(project.slipway("status", second, "--json")[1])
    assert cancelled["state"] == "CANCELLED"
