"""Launches with an unknown outcome, settled by the next launch of their run; without Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.drafting import Request, draft
from launcher.errors import UserError
from launcher.jobs.launches import Launch
from launcher.launching import launch
from launcher.runs.manifest import Manifest, read_manifest, write_manifest
from launcher.runs.paths import LaunchPaths
from slipway.common.node.marks import job_of

LONG_AGO = "2020-01-01T00:00:00Z"


def launch_locally(tmp_path: Path) -> Launch:
    chosen = ["stages=[data_preparation]", "cluster=local", "data_preparation.inputs=[/etc/hostname]"]
    request = Request(
        [*chosen, f"base_results_dir={tmp_path}/results", "cluster.python=/bin/true"], ["slipway"]
    )
    return launch(draft(request), request)


def wait_for_end(paths: LaunchPaths) -> None:
    """Wait for the mark of the end, and until the process is gone, by which the job would be found too."""
    for _ in range(300):
        if list(paths.marks.glob("*.ended.json")) and not is_alive(job_of(paths.directory)):
            return
        time.sleep(0.1)
    raise AssertionError("the job did not end")


def is_alive(pid: str | None) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def open_launch(tmp_path: Path, *, began: bool = False, **manifest: Any) -> tuple[LaunchPaths, Manifest]:
    """Leave a launch as a launcher that died leaves it, after its job began or before there was one."""
    launched = launch_locally(tmp_path)
    wait_for_end(launched.paths)
    if not began:
        shutil.rmtree(launched.paths.marks)
    fields = {"job_id": None, "launcher_pid": dead_pid(), **manifest}
    write_manifest(launched.paths.directory, replace(launched.manifest, **fields))
    return launched.paths, launched.manifest


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"launcher_pid": 1, "created": LONG_AGO},
        {"host": "elsewhere", "created": LONG_AGO},
        {"launcher_pid": 1, "unanswered": "its launcher was interrupted"},
    ],
)
def test_launch_without_a_job_is_given_up(tmp_path: Path, fields: dict[str, Any]) -> None:
    paths, _ = open_launch(tmp_path, **fields)
    second = launch_locally(tmp_path)
    assert second.paths.number == 2
    settled = read_manifest(paths.directory)
    assert settled.job_id is None
    assert settled.error == fields.get("unanswered", "its launcher died before it submitted")
    assert (paths.marks / "job").read_text() == "given-up\n"
    assert job_of(paths.directory) is None
    wait_for_end(second.paths)


@pytest.mark.parametrize("fields", [{"launcher_pid": os.getpid()}, {"host": "elsewhere"}])
def test_launch_whose_launcher_may_be_alive_is_left_alone(tmp_path: Path, fields: dict[str, Any]) -> None:
    paths, _ = open_launch(tmp_path, **fields)
    before = paths.manifest.read_bytes()
    second = launch_locally(tmp_path)
    assert paths.manifest.read_bytes() == before
    assert not paths.marks.exists()
    wait_for_end(second.paths)


def test_unreported_job_is_adopted_and_reported_once(tmp_path: Path) -> None:
    paths, before = open_launch(tmp_path, began=True)
    (paths.directory / "launcher.log").unlink()
    with pytest.raises(UserError) as raised:
        launch_locally(tmp_path)
    assert raised.value.exit_code == 2
    assert raised.value.message == f"launch 1 of tokenize_text was submitted as job {before.job_id} after all"
    assert "slipway status" in str(raised.value)
    assert "repeat the command" in str(raised.value)
    assert read_manifest(paths.directory).job_id == before.job_id
    assert (paths.directory / "launcher.log").read_text() == f"Submitted batch job {before.job_id}\n"
    second = launch_locally(tmp_path)
    assert second.paths.number == 2
    wait_for_end(second.paths)


def test_nothing_is_launched_if_slurm_cannot_be_asked(tmp_path: Path) -> None:
    paths, _ = open_launch(tmp_path, scheduler="slurm", slurm_conf=str(tmp_path / "gone.conf"))
    with pytest.raises(
        UserError, match="it is not known whether launch 1 of tokenize_text became a job"
    ) as raised:
        launch_locally(tmp_path)
    assert "gone.conf" in raised.value.message
    assert f"rm -r {paths.directory}" in str(raised.value)
    assert not (paths.run_dir / "launches" / "2").exists()


def test_launch_of_a_colleague_is_left_open(tmp_path: Path) -> None:
    """Slurm's PrivateData may hide a job of the colleague's."""
    paths, _ = open_launch(tmp_path, user="ada")
    with pytest.raises(UserError, match="it is ada's, and only ada can ask"):
        launch_locally(tmp_path)
    assert not (paths.marks / "job").exists(), "its job may still begin"


def test_launch_waits_for_an_sbatch_that_outlived_its_launcher(tmp_path: Path) -> None:
    paths, manifest = open_launch(tmp_path)
    (tmp_path / "sbatch").write_text("sleep 60; true\n")
    orphan = subprocess.Popen(["bash", tmp_path / "sbatch", paths.script, manifest.tag])
    try:
        with pytest.raises(UserError, match=f"process {orphan.pid} is still submitting it"):
            launch_locally(tmp_path)
    finally:
        orphan.kill()
        orphan.wait()
    second = launch_locally(tmp_path)
    wait_for_end(second.paths)


def test_failed_record_stops_no_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record may belong to a colleague's launch."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    open_launch(tmp_path)
    monkeypatch.setattr("launcher.launching.recovery.write_manifest", refuse)
    messages: list[str] = []
    monkeypatch.setattr(
        "launcher.launching.recovery._logger.warning", lambda text, *values: messages.append(text % values)
    )
    wait_for_end(launch_locally(tmp_path).paths)
    assert messages == ["the outcome of launch 1 could not be recorded: Permission denied"]
