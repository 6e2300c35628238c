"""Jobs of this machine without Slurm: processes, found by their command lines."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.runs.provenance import host, new_tag
from launcher.schedulers.base import JobRef, Submission
from launcher.schedulers.local import LocalScheduler
from launcher.slurm.states import Action, State
from tests.job_marks import leave_marks

# Records its signal in its own directory; the sleep is a child that has to end with it.
SCRIPT = """
cd "$(dirname "$0")"
trap 'echo saved >told; exit 75' USR1
trap 'echo ended >told; exit 143' TERM
sleep 100 & echo $! >child
(sleep 100; true) & wait
"""

scheduler = LocalScheduler()


def submission(script: Path, tag: str) -> Submission:
    return Submission(tag, script, "me", "2026-01-01T00:00:00Z")


@pytest.fixture
def ref(tmp_path: Path) -> Iterator[JobRef]:
    script = tmp_path / "with space" / "x_submission.sh"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    tag = new_tag()
    job_id = scheduler.submit(submission(script, tag))
    wait_until(lambda: (script.parent / "child").exists() and (script.parent / "child").read_text() != "")
    try:
        yield JobRef({1: job_id}, script.parent, [tag], host())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(job_id), signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(ref: JobRef) -> bool:
    return scheduler.statuses([ref])[0].state is not State.RUNNING


def test_a_job_is_found_once_by_its_tag(ref: JobRef) -> None:
    """Its subshells have the same command line."""
    script = ref.launch_dir / "x_submission.sh"
    (tag,) = ref.tags
    submissions = [submission(script, submission_tag) for submission_tag in (tag, new_tag())]
    assert scheduler.find(submissions) == {tag: {1: [ref.job_id]}}
    second = scheduler.submit(submissions[0])
    try:
        wait_until(lambda: scheduler.locate(second) == script)
        assert scheduler.find(submissions) == {tag: {1: [ref.job_id, second]}}
    finally:
        os.killpg(int(second), signal.SIGKILL)


def test_a_script_that_became_its_supervisor_is_still_the_job(tmp_path: Path) -> None:
    """Its command line is the supervisor's then, with the launch directory and the tag."""
    directory = tmp_path / "with space"
    directory.mkdir()
    script, tag = directory / "x_submission.sh", new_tag()
    (directory / "supervisor.pyz").write_text("import time\nprint('begun', flush=True)\ntime.sleep(100)\n")
    (tmp_path / "link").symlink_to(directory)
    script.write_text(f'exec python3 -IS "{tmp_path}/link/supervisor.pyz" {tag} "$@" -- true\n')
    job_id = scheduler.submit(submission(script, tag))
    log = directory / f"log-x_{job_id}.out"
    try:
        wait_until(lambda: log.exists() and "begun" in log.read_text())
        submissions = [submission(script, submission_tag) for submission_tag in (tag, new_tag())]
        assert scheduler.find(submissions) == {tag: {1: [job_id]}}
        assert scheduler.locate(job_id) == script
        (status,) = scheduler.statuses([JobRef({1: job_id}, directory, [tag], host())])
        assert status.state is State.RUNNING
        assert status.elapsed is not None and "00:00:00" <= status.elapsed <= "00:01:00"
        # If this machine is a node of Slurm's, the job is Slurm's.
        (directory / "supervisor.json").write_text('{"scheduler": "slurm"}')
        assert scheduler.find(submissions) == {} and scheduler.locate(job_id) is None
        assert script not in scheduler.scripts()
    finally:
        os.killpg(int(job_id), signal.SIGKILL)


def test_cancel_ends_all_processes_of_a_job(ref: JobRef) -> None:
    child = int((ref.launch_dir / "child").read_text())
    assert scheduler.locate(ref.job_id) == ref.launch_dir / "x_submission.sh"
    assert scheduler.act(Action.CANCEL, [ref.job_id]) == {}
    wait_until(lambda: has_ended(ref))
    assert (ref.launch_dir / "told").read_text() == "ended\n"
    wait_until(lambda: not Path(f"/proc/{child}/fd").exists() or "Z" in process_stat(child))
    for action in Action:
        error = scheduler.act(action, [ref.job_id])[ref.job_id]
        assert "is over already: there is no such process" in error.message
    assert scheduler.locate(ref.job_id) is None


def process_stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "Z"


def test_save_signals_the_script_alone(ref: JobRef) -> None:
    assert scheduler.act(Action.SAVE, [ref.job_id]) == {}
    wait_until(lambda: has_ended(ref))
    assert (ref.launch_dir / "told").read_text() == "saved\n"


def test_local_jobs_are_never_held(ref: JobRef) -> None:
    hold_errors, release_errors = (
        scheduler.act(action, [ref.job_id]) for action in (Action.HOLD, Action.RELEASE)
    )
    for errors in (hold_errors, release_errors):
        assert errors[ref.job_id].message == "hold and release need Slurm"
    assert not has_ended(ref)


def test_a_process_that_is_no_job_of_ours_is_left_alone() -> None:
    """Process ids are used again."""
    for action in (Action.CANCEL, Action.SAVE):
        errors = scheduler.act(action, [str(os.getpid())])
        assert "is over already" in errors[str(os.getpid())].message


def test_a_job_of_another_host_is_unknown(ref: JobRef) -> None:
    """The id belongs to another process on this machine."""
    elsewhere = replace(ref, host="login7")
    (status,) = scheduler.statuses([elsewhere])
    assert (status.state, status.reason) == (
        State.UNKNOWN,
        "it runs on login7, without Slurm: ask there",
    )
    errors = LocalScheduler(host="login7").act(Action.CANCEL, [ref.job_id])
    assert "runs on login7, without Slurm: do this there" in errors[ref.job_id].message
    assert not has_ended(ref)
    leave_marks(ref.launch_dir, ref.job_id, started=1.0, ended=2.0)
    assert scheduler.statuses([elsewhere])[0].state is State.COMPLETED


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("OSError: [Errno 28] No space left on device\n", "a file system was full"),
        ("OSError: [Errno 122] Disk quota exceeded\n", "a file system was full"),
        (
            "x.sh: line 15: module: command not found\n"
            "Job 7: exit code 127 of line 15: eval 'TOKEN=hf_0123456789abcdef module load x' on n1\n",
            "the script failed before its tasks began: exit code 127 of line 15: eval 'TOKEN=***'",
        ),
        ("Job 7: no python3 on n1\n", "the script failed before its tasks began: no python3"),
        ("step 3/9 | loss 1\n", "it was killed"),
        ("", "it was killed"),
    ],
)
def test_log_tells_why_a_process_could_leave_no_mark(ref: JobRef, log: str, why: str) -> None:
    os.killpg(int(ref.job_id), signal.SIGKILL)
    (ref.launch_dir / f"log-x_{ref.job_id}.out").write_text(log)
    wait_until(lambda: has_ended(ref))
    (status,) = scheduler.statuses([ref])
    assert status.full_reason == f"the process is gone and left no mark: {why}"
