"""`slipway hold` and `release` on a real Slurm, and without one."""

from __future__ import annotations

import subprocess

import pytest
from control_project import Project, wait_until


@pytest.mark.slurm
def test_a_job_is_held_and_released(project: Project) -> None:
    job = project.launch("cluster.partition=cloud")
    code, out, err = project.slipway("hold", "run")
    assert (code, err) == (0, "")
    assert out.startswith(f"held job {job} of run (launch 1): it was PENDING")
    assert project.state(job) == "PENDING JobHeldUser"
    code, out, _ = project.slipway("hold", job)
    assert code == 0 and "it is held already: PENDING (JobHeldUser)" in out
    code, out, _ = project.slipway("release", "run")
    assert code == 0 and out.startswith(f"released job {job} of run")
    assert "JobHeld" not in project.state(job)
    code, out, _ = project.slipway("release", "run")
    assert code == 0 and "it is not held: PENDING" in out
    project.slipway("cancel", "run")
    for verb in ("hold", "release"):
        code, out, err = project.slipway(verb, "run")
        assert (code, out) == (2, "")
        assert f"job {job} of run (launch 1) cannot be" in err and "only what waits" in err


@pytest.mark.slurm
def test_running_jobs_are_not_held(project: Project) -> None:
    running = project.launch_ranks()
    project.wait_until_it_trains(ranks=4)
    code, out, err = project.slipway("hold", "run")
    assert (code, out) == (2, "")
    assert "cannot be held: it is RUNNING on n[" in err and "slipway cancel --save" in err
    code, out, err = project.slipway("release", "run")
    assert (code, out) == (2, "")
    assert "cannot be released: it is RUNNING on n[" in err and "--save" not in err
    waiting = project.launch_ranks()
    code, out, err = project.slipway("hold", "run")
    assert (code, err) == (0, "")
    held, goes_on = out.splitlines()
    assert held.startswith(f"held job {waiting} of run (launch 2): it was PENDING (Dependency")
    assert goes_on.startswith(f"left job {running} of run (launch 1) alone: it is RUNNING")
    project.slipway("cancel", running, "--wait")
    assert project.state(waiting) == "PENDING JobHeldUser"
    assert project.slipway("release", "run")[0] == 0
    # Nothing holds it any more, and its turn has come.
    wait_until(lambda: project.state(waiting).startswith(("RUNNING", "COMPLET")))


@pytest.mark.slurm
def test_the_waiting_tasks_of_an_array_are_held(project: Project) -> None:
    job = project.launch("cluster.sbatch={array: 0-2%1}")
    project.wait_until_it_trains()
    code, out, _ = project.slipway("hold", "run")
    assert code == 0 and out.startswith(f"held the waiting tasks of job {job} of run (launch 1): it was RUN")
    assert sorted(project.state(job).splitlines()) == [
        "PENDING JobHeldUser",
        "PENDING JobHeldUser",
        "RUNNING None",
    ]
    code, out, _ = project.slipway("release", "run")
    assert code == 0 and "it was RUNNING (tasks: 1 RUNNING, 2 PENDING) on n" in out
    for verb in ("hold", "cancel"):
        code, _, err = project.slipway(verb, f"{job}_7")
        assert code == 2 and f"job {job} of run has no task 7" in err and "its tasks: 0-2" in err
    assert "JobHeld" not in project.state(job)


@pytest.mark.slurm
def test_a_hold_by_an_administrator_counts_as_held(project: Project) -> None:
    """The tests run as root, who may release the job; a user reads Slurm's words."""
    job = project.launch("cluster.partition=cloud")
    subprocess.run(["scontrol", "hold", job], check=True)
    assert project.state(job) == "PENDING JobHeldAdmin"
    code, out, _ = project.slipway("hold", "run")
    assert code == 0 and "it is held already: PENDING (JobHeldAdmin)" in out
    assert project.slipway("release", "run")[0] == 0
    assert "JobHeld" not in project.state(job)


def test_without_slurm_there_is_no_queue(local_project: Project) -> None:
    job = local_project.launch()
    for verb in ("hold", "release"):
        code, _, err = local_project.slipway(verb, "run")
        assert code == 2
        assert f"job {job} of run (launch 1) cannot be" in err and "there is no queue" in err
