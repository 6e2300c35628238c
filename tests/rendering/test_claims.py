"""The second of two jobs of one launch leaves; and no job dies because it cannot leave a mark."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest

from launcher.config.compose import compose
from launcher.plan import Payload, Plan
from launcher.stages.planning import plan_launch
from slipway.common.node.marks import GIVEN_UP, claim, job_of, read_attempts
from tests.fakes.programs import write_program, write_programs
from tests.fakes.slurm import JOB_COMMANDS
from tests.job_marks import leave_marks
from tests.launch_files import write_files

TAG = "a tag; with $(touch canary)"


def write_plan(tmp_path: Path, scheduler: str) -> Plan:
    """Write a launch whose payload records each of its runs."""
    places = [
        "training.trainer.num_nodes=1",
        "training.trainer.devices=1",
        f"base_results_dir={tmp_path}/results",
    ]
    plan = plan_launch(compose(["training=gpt3/tiny", "cluster=local", *places]).config, number=1, tag=TAG)
    payload = Payload(argv=("bash", "-c", f'echo "$$" >>{tmp_path}/ran'), working_dir=str(tmp_path))
    plan = dataclasses.replace(plan, scheduler=scheduler, job=dataclasses.replace(plan.job, payload=payload))
    write_files(plan)
    write_programs(tmp_path / "bin", JOB_COMMANDS)
    return plan


def start(
    plan: Plan, *arguments: str, output: int | IO[str] = subprocess.PIPE, **variables: str
) -> subprocess.Popen[str]:
    tools = plan.paths.run_dir.parents[1] / "bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n1", **variables}
    return subprocess.Popen(
        ["bash", plan.paths.script, *arguments],
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(plan: Plan, *arguments: str, **variables: str) -> tuple[int, str]:
    process = start(plan, *arguments, **variables)
    output = process.communicate(timeout=30)[0]
    return process.returncode, output


def count_runs(tmp_path: Path) -> int:
    path = tmp_path / "ran"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("scheduler", ["slurm", "local", "allocation"])
def test_the_second_job_of_a_launch_leaves(tmp_path: Path, scheduler: str) -> None:
    plan = write_plan(tmp_path, scheduler)
    code, output = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, count_runs(tmp_path)) == (0, 1), output
    first = job_of(plan.paths.directory)
    assert first
    code, output = run(plan, TAG, SLURM_JOB_ID="18")
    assert code == 0
    assert f"leaves without doing anything: {plan.paths.marks}/job says {first}" in output
    assert count_runs(tmp_path) == 1
    assert {attempt.job_id for attempt in read_attempts(plan.paths.directory)} == {first}
    assert [path.name for path in plan.paths.marks.glob(".*")] == []


@pytest.mark.parametrize("scheduler", ["slurm", "local", "allocation"])
def test_a_script_that_is_submitted_by_hand_runs(tmp_path: Path, scheduler: str) -> None:
    plan = write_plan(tmp_path, scheduler)
    for job, arguments in (("17", [TAG]), ("18", []), ("19", ["another"])):
        code, output = run(plan, *arguments, SLURM_JOB_ID=job)
        assert code == 0, output
    assert count_runs(tmp_path) == 3
    if scheduler == "slurm":
        assert job_of(plan.paths.directory) == "17"


def test_one_of_many_simultaneous_jobs_runs(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "slurm")
    jobs = [start(plan, TAG, SLURM_JOB_ID=str(number)) for number in range(20, 32)]
    assert {job.communicate(timeout=60) and job.returncode for job in jobs} == {0}
    assert count_runs(tmp_path) == 1


def test_requeued_job_and_tasks_of_an_array_share_a_claim(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "slurm")
    for attempt in ("0", "1"):
        assert run(plan, TAG, SLURM_JOB_ID="17", SLURM_RESTART_COUNT=attempt)[0] == 0
    assert count_runs(tmp_path) == 2
    assert [attempt.number for attempt in read_attempts(plan.paths.directory)] == [0, 1]
    shutil.rmtree(plan.paths.marks)
    tasks = [
        start(plan, TAG, SLURM_JOB_ID=str(30 + task), SLURM_ARRAY_JOB_ID="30", SLURM_ARRAY_TASK_ID=str(task))
        for task in range(3)
    ]
    assert {task.communicate(timeout=60) and task.returncode for task in tasks} == {0}
    assert count_runs(tmp_path) == 5
    assert job_of(plan.paths.directory) == "30"
    assert run(plan, TAG, SLURM_JOB_ID="41", SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="1")[0] == 0
    assert count_runs(tmp_path) == 5


def test_claim_of_the_launcher_decides_which_job_runs(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "slurm")
    claim(plan.paths.directory, "18")
    assert "says 18" in run(plan, TAG, SLURM_JOB_ID="17")[1]
    assert "leaves" not in run(plan, TAG, SLURM_JOB_ID="18")[1]
    (plan.paths.marks / "job").unlink()
    claim(plan.paths.directory, GIVEN_UP)
    assert "leaves" in run(plan, TAG, SLURM_JOB_ID="19")[1]
    assert count_runs(tmp_path) == 1


@pytest.mark.parametrize("content", [b"", b"\n", None])
def test_a_claim_that_cannot_be_read_stops_no_job(tmp_path: Path, content: bytes | None) -> None:
    """The claim names no other job; a job that left because of it would be lost without a reason."""
    plan = write_plan(tmp_path, "slurm")
    plan.paths.marks.mkdir()
    mark = plan.paths.marks / "job"
    if content is None:
        mark.mkdir()
    else:
        mark.write_bytes(content)
    code, output = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, count_runs(tmp_path)) == (0, 1), output


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_no_job_dies_for_a_mark_that_it_cannot_leave(tmp_path: Path, scheduler: str) -> None:
    plan = write_plan(tmp_path, scheduler)
    plan.paths.marks.write_text("a file: nothing can be written below it")
    code, output = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, count_runs(tmp_path)) == (0, 1), output
    assert "could not leave the mark" in output


def test_a_job_whose_log_is_on_a_full_disk_runs_and_keeps_its_exit_code(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "slurm")
    plan.paths.task_script.write_text("#!/bin/bash\nbash -c 'exit 7'\n")
    plan.paths.marks.write_text("")
    with Path("/dev/full").open("w") as full:
        assert start(plan, TAG, output=full, SLURM_JOB_ID="17").wait(timeout=30) == 7


def test_moved_launch_is_reported_and_not_made_anew(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "slurm")
    script = tmp_path / "spooled"
    shutil.copy(plan.paths.script, script)
    plan.paths.run_dir.rename(tmp_path / "elsewhere")
    done = subprocess.run(
        ["bash", script, TAG], env={**os.environ, "SLURM_JOB_ID": "17"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "moved since it was launched, or not mounted" in done.stderr
    assert not plan.paths.run_dir.exists()


def test_node_without_python_is_reported_in_one_line(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "slurm")
    text = plan.paths.script.read_text()
    for name in ("/usr/bin/python3", "/usr/libexec/platform-python", " python3)"):
        text = text.replace(name, name.replace("python", "no-python"))
    plan.paths.script.write_text(text)
    code, output = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, count_runs(tmp_path)) == (1, 0)
    assert output.startswith("Job 17: no python3 on ") and output.count("\n") == 1


def test_job_of_a_removed_launch_leaves_the_new_launch_alone(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "slurm")
    spooled = tmp_path / "spooled"
    shutil.copy(plan.paths.script, spooled)
    write_files(dataclasses.replace(plan, tag="another tag"))
    files = set(plan.paths.directory.rglob("*"))
    for arguments in ((TAG,), ("2", TAG), ()):
        done = subprocess.run(
            ["bash", spooled, *arguments],
            env={**os.environ, "SLURM_JOB_ID": "17", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1, done.stdout
        assert "leaves without doing anything" in done.stdout
        assert set(plan.paths.directory.rglob("*")) == files
    assert count_runs(tmp_path) == 0


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("RUNNING", 0),
        ("SUSPENDED", 0),
        ("", 0),
        ("a notice", 0),
        ("COMPLETING", 1),
        ("NODE_FAIL", 1),
    ],
)
def test_a_job_that_slurm_ends_has_not_succeeded(tmp_path: Path, state: str, expected: int) -> None:
    """srun exits with 0 when a node is lost; once Slurm has forgotten the job, only its mark is left."""
    plan = write_plan(tmp_path, "slurm")
    code, output = run(plan, TAG, SLURM_JOB_ID="17", STATE=state)
    assert (code, count_runs(tmp_path)) == (expected, 1), output
    (attempt,) = read_attempts(plan.paths.directory)
    assert attempt.exit_code == expected
    assert ("could not be asked" in output) == (state in ("", "a notice"))


@pytest.mark.parametrize(
    ("scheduler", "variables", "job_id"),
    [
        ("slurm", {}, "17"),
        # The last task of an array has the array's own id, which stands for all of them.
        ("slurm", {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}, "17_2"),
        ("allocation", {}, "17"),  # the marks are named after the process, which is a stranger's job
    ],
)
def test_slurm_is_asked_for_this_job_alone(
    tmp_path: Path, scheduler: str, variables: dict[str, str], job_id: str
) -> None:
    plan = write_plan(tmp_path, scheduler)
    squeue = f'[[ " $* " == *" --jobs={job_id} "* ]] && echo RUNNING || echo COMPLETING'
    write_program(tmp_path / "bin" / "squeue", squeue)
    code, output = run(plan, TAG, SLURM_JOB_ID="17", **variables)
    assert code == 0, output


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_job_that_is_ended_before_its_tasks_has_not_succeeded(tmp_path: Path, scheduler: str) -> None:
    """The job may wait for the job before it, or for an answer of Slurm's."""
    plan = write_plan(tmp_path, scheduler)
    write_program(tmp_path / "bin" / "scontrol", "sleep 0.5\necho n1")
    with (plan.paths.run_dir / ".singleton").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(plan, TAG, SLURM_JOB_ID="17")
        claimed = plan.paths.marks / "job"
        deadline = time.monotonic() + 30
        while not claimed.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.terminate()
        output = process.communicate(timeout=30)[0]
    assert (process.returncode, count_runs(tmp_path)) == (143, 0), output
    (attempt,) = read_attempts(plan.paths.directory)
    assert (attempt.exit_code, attempt.signal) == (143, "TERM")


def test_a_signal_to_the_whole_job_spoils_neither_the_verdict_nor_the_mark(tmp_path: Path) -> None:
    """Slurm signals all processes of a job to end it, also the squeue that the job runs."""
    plan = write_plan(tmp_path, "slurm")
    once = '[[ -e $0.told ]] || { touch "$0.told"; kill -TERM $PPID $$; }'  # as if it came just now
    write_program(tmp_path / "bin" / "squeue", f"{once}\necho NODE_FAIL")
    code, output = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, count_runs(tmp_path)) == (1, 1), output
    (attempt,) = read_attempts(plan.paths.directory)
    assert attempt.exit_code == 1
    assert attempt.ended


def test_the_launcher_claims_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert claim(tmp_path, GIVEN_UP) == GIVEN_UP
    assert claim(tmp_path, "17") == GIVEN_UP


def test_attempts_are_in_order_on_hosts_whose_clocks_differ(tmp_path: Path) -> None:
    leave_marks(tmp_path, "17", attempt=0, started=1000.0, ended=1100.0, code=1)
    leave_marks(tmp_path, "17", attempt=1, started=900.0, ended=950.0)
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [0, 1]
    leave_marks(tmp_path, "17_3", attempt=0, started=990.0)
    assert [attempt.job_id for attempt in read_attempts(tmp_path)] == ["17_3", "17", "17"]
