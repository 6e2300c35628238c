"""The second of two jobs of one launch leaves; and no job dies for a mark that it cannot leave."""

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
from supervisor.marks import GIVEN_UP, claim, job_of, read_attempts
from tests.fakes.programs import write_program, write_programs
from tests.fakes.slurm import JOB_COMMANDS
from tests.job_marks import leave
from tests.launch_files import write_files

TAG = "a tag; with $(touch canary)"


def written(tmp_path: Path, scheduler: str) -> Plan:
    """A launch on disk whose payload counts how often it ran."""
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


def times(tmp_path: Path) -> int:
    path = tmp_path / "ran"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("scheduler", ["slurm", "local", "allocation"])
def test_the_second_job_of_a_launch_leaves(tmp_path: Path, scheduler: str) -> None:
    plan = written(tmp_path, scheduler)
    code, told = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, times(tmp_path)) == (0, 1), told
    first = job_of(plan.paths.directory)
    assert first
    code, told = run(plan, TAG, SLURM_JOB_ID="18")
    assert code == 0
    assert f"leaves without doing anything: {plan.paths.marks}/job says {first}" in told
    assert times(tmp_path) == 1
    assert {attempt.job_id for attempt in read_attempts(plan.paths.directory)} == {first}
    assert [path.name for path in plan.paths.marks.glob(".*")] == []


@pytest.mark.parametrize("scheduler", ["slurm", "local", "allocation"])
def test_a_script_that_is_submitted_by_hand_runs(tmp_path: Path, scheduler: str) -> None:
    plan = written(tmp_path, scheduler)
    for job, arguments in (("17", [TAG]), ("18", []), ("19", ["another"])):
        code, told = run(plan, *arguments, SLURM_JOB_ID=job)
        assert code == 0, told
    assert times(tmp_path) == 3
    if scheduler == "slurm":
        assert job_of(plan.paths.directory) == "17"


def test_of_many_that_begin_at_once_one_runs(tmp_path: Path) -> None:
    plan = written(tmp_path, "slurm")
    jobs = [start(plan, TAG, SLURM_JOB_ID=str(number)) for number in range(20, 32)]
    assert {job.communicate(timeout=60) and job.returncode for job in jobs} == {0}
    assert times(tmp_path) == 1


def test_a_requeued_job_and_the_tasks_of_an_array_are_one(tmp_path: Path) -> None:
    plan = written(tmp_path, "slurm")
    for attempt in ("0", "1"):
        assert run(plan, TAG, SLURM_JOB_ID="17", SLURM_RESTART_COUNT=attempt)[0] == 0
    assert times(tmp_path) == 2
    assert [attempt.number for attempt in read_attempts(plan.paths.directory)] == [0, 1]
    shutil.rmtree(plan.paths.marks)
    tasks = [
        start(plan, TAG, SLURM_JOB_ID=str(30 + task), SLURM_ARRAY_JOB_ID="30", SLURM_ARRAY_TASK_ID=str(task))
        for task in range(3)
    ]
    assert {task.communicate(timeout=60) and task.returncode for task in tasks} == {0}
    assert times(tmp_path) == 5
    assert job_of(plan.paths.directory) == "30"
    assert run(plan, TAG, SLURM_JOB_ID="41", SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="1")[0] == 0
    assert times(tmp_path) == 5


def test_the_launcher_says_which_or_none(tmp_path: Path) -> None:
    plan = written(tmp_path, "slurm")
    claim(plan.paths.directory, "18")
    assert "says 18" in run(plan, TAG, SLURM_JOB_ID="17")[1]
    assert "leaves" not in run(plan, TAG, SLURM_JOB_ID="18")[1]
    (plan.paths.marks / "job").unlink()
    claim(plan.paths.directory, GIVEN_UP)
    assert "leaves" in run(plan, TAG, SLURM_JOB_ID="19")[1]
    assert times(tmp_path) == 1


@pytest.mark.parametrize("content", [b"", b"\n", None])
def test_a_claim_that_cannot_be_read_stops_no_job(tmp_path: Path, content: bytes | None) -> None:
    """It is of no other job that we know; a job that left for it would be lost, and nobody would know why."""
    plan = written(tmp_path, "slurm")
    plan.paths.marks.mkdir()
    mark = plan.paths.marks / "job"
    if content is None:
        mark.mkdir()
    else:
        mark.write_bytes(content)
    code, told = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, times(tmp_path)) == (0, 1), told


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_no_job_dies_for_a_mark_that_it_cannot_leave(tmp_path: Path, scheduler: str) -> None:
    plan = written(tmp_path, scheduler)
    plan.paths.marks.write_text("a file: nothing can be written below it")
    code, told = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, times(tmp_path)) == (0, 1), told
    assert "could not leave the mark" in told


def test_a_job_whose_log_is_on_a_full_disk_runs_and_keeps_its_exit_code(tmp_path: Path) -> None:
    plan = written(tmp_path, "slurm")
    plan.paths.task_script.write_text("#!/bin/bash\nbash -c 'exit 7'\n")
    plan.paths.marks.write_text("")
    with Path("/dev/full").open("w") as full:
        assert start(plan, TAG, output=full, SLURM_JOB_ID="17").wait(timeout=30) == 7


def test_a_launch_that_was_moved_is_told_and_not_made_anew(tmp_path: Path) -> None:
    plan = written(tmp_path, "slurm")
    script = tmp_path / "spooled"
    shutil.copy(plan.paths.script, script)
    plan.paths.run_dir.rename(tmp_path / "elsewhere")
    done = subprocess.run(
        ["bash", script, TAG], env={**os.environ, "SLURM_JOB_ID": "17"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "moved since it was launched, or not mounted" in done.stderr
    assert not plan.paths.run_dir.exists()


def test_a_node_without_python_is_told_in_one_line(tmp_path: Path) -> None:
    plan = written(tmp_path, "slurm")
    text = plan.paths.script.read_text()
    for name in ("/usr/bin/python3", "/usr/libexec/platform-python", " python3)"):
        text = text.replace(name, name.replace("python", "no-python"))
    plan.paths.script.write_text(text)
    code, told = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, times(tmp_path)) == (1, 0)
    assert told.startswith("Job 17: no python3 on ") and told.count("\n") == 1


def test_the_job_of_a_launch_that_was_removed_leaves_the_one_in_its_place_alone(tmp_path: Path) -> None:
    plan = written(tmp_path, "slurm")
    spooled = tmp_path / "spooled"
    shutil.copy(plan.paths.script, spooled)
    write_files(dataclasses.replace(plan, tag="another tag"))
    here = set(plan.paths.directory.rglob("*"))
    for arguments in ((TAG,), ("2", TAG), ()):
        done = subprocess.run(
            ["bash", spooled, *arguments],
            env={**os.environ, "SLURM_JOB_ID": "17", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1, done.stdout
        assert "leaves without doing anything" in done.stdout
        assert set(plan.paths.directory.rglob("*")) == here
    assert times(tmp_path) == 0


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
    """srun tells 0 when a node is lost; once Slurm has forgotten the job, its mark is all there is."""
    plan = written(tmp_path, "slurm")
    code, told = run(plan, TAG, SLURM_JOB_ID="17", STATE=state)
    assert (code, times(tmp_path)) == (expected, 1), told
    (attempt,) = read_attempts(plan.paths.directory)
    assert attempt.exit_code == expected
    assert ("could not be asked" in told) == (state in ("", "a notice"))


@pytest.mark.parametrize(
    ("scheduler", "variables", "asked"),
    [
        ("slurm", {}, "17"),
        # The last task of an array has the array's own id, which stands for all of them.
        ("slurm", {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}, "17_2"),
        ("allocation", {}, "17"),  # the marks are named after the process, which is a stranger's job
    ],
)
def test_slurm_is_asked_for_this_job_alone(
    tmp_path: Path, scheduler: str, variables: dict[str, str], asked: str
) -> None:
    plan = written(tmp_path, scheduler)
    squeue = f'[[ " $* " == *" --jobs={asked} "* ]] && echo RUNNING || echo COMPLETING'
    write_program(tmp_path / "bin" / "squeue", squeue)
    code, told = run(plan, TAG, SLURM_JOB_ID="17", **variables)
    assert code == 0, told


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_job_that_is_ended_before_its_tasks_has_not_succeeded(tmp_path: Path, scheduler: str) -> None:
    """As one that waits for the job before it, or for an answer of Slurm's."""
    plan = written(tmp_path, scheduler)
    write_program(tmp_path / "bin" / "scontrol", "sleep 0.5\necho n1")
    with (plan.paths.run_dir / ".singleton").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(plan, TAG, SLURM_JOB_ID="17")
        claimed = plan.paths.marks / "job"
        deadline = time.monotonic() + 30
        while not claimed.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.terminate()
        told = process.communicate(timeout=30)[0]
    assert (process.returncode, times(tmp_path)) == (143, 0), told
    (attempt,) = read_attempts(plan.paths.directory)
    assert (attempt.exit_code, attempt.signal) == (143, "TERM")


def test_a_signal_to_the_whole_job_spoils_neither_the_verdict_nor_the_mark(tmp_path: Path) -> None:
    """Slurm ends a job by signals to all of its processes; also to the squeue that asks it."""
    plan = written(tmp_path, "slurm")
    once = '[[ -e $0.told ]] || { touch "$0.told"; kill -TERM $PPID $$; }'  # as if it came just now
    write_program(tmp_path / "bin" / "squeue", f"{once}\necho NODE_FAIL")
    code, told = run(plan, TAG, SLURM_JOB_ID="17")
    assert (code, times(tmp_path)) == (1, 1), told
    (attempt,) = read_attempts(plan.paths.directory)
    assert attempt.exit_code == 1
    assert attempt.ended


def test_the_launcher_claims_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    assert claim(tmp_path, GIVEN_UP) == GIVEN_UP
    assert claim(tmp_path, "17") == GIVEN_UP


def test_lives_are_in_their_order_on_hosts_whose_clocks_differ(tmp_path: Path) -> None:
    leave(tmp_path, "17", attempt=0, started=1000.0, ended=1100.0, code=1)
    leave(tmp_path, "17", attempt=1, started=900.0, ended=950.0)
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [0, 1]
    leave(tmp_path, "17_3", attempt=0, started=990.0)
    assert [attempt.job_id for attempt in read_attempts(tmp_path)] == ["17_3", "17", "17"]
