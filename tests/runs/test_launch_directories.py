"""Launch directories: complete or absent, numbered, never written over."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

import launcher.drafting
from launcher.drafting import Request, draft
from launcher.errors import UserError
from launcher.jobs.launches import Launch, open_launch
from launcher.jobs.status import poll
from launcher.launching import launch
from launcher.plan import Plan
from launcher.runs.manifest import read_manifest, write_manifest
from launcher.runs.paths import LaunchPaths, launch_numbers
from launcher.runs.provenance import checkout_of, host
from launcher.runs.write import link_atomic, link_newest, release_number, reserve_number, write_launch
from launcher.schedulers.base import JobRef, Submission
from launcher.schedulers.local import LocalScheduler
from launcher.slurm.states import Action, State
from slipway.common.files import write_atomic


def local_request(tmp_path: Path, *overrides: str) -> Request:
    chosen = ["stages=[data_preparation]", "cluster=local", "data_preparation.inputs=[/etc/hostname]"]
    return Request([*chosen, f"launcher_scripts_path={tmp_path}", *overrides], ["slipway", "launch", "a b"])


def launch_locally(tmp_path: Path, *overrides: str) -> Launch:
    request = local_request(tmp_path, *overrides)
    return launch(draft(request), request)


def wait_for_end(paths: LaunchPaths) -> None:
    for _ in range(300):
        if list(paths.marks.glob("*.ended.json")):
            return
        time.sleep(0.1)
    raise AssertionError("the job did not end")


def test_each_launch_has_its_own_directory_and_the_links_show_the_newest(tmp_path: Path) -> None:
    first = launch_locally(tmp_path).paths
    text = first.script.read_text()
    second_launch = launch_locally(tmp_path)
    second, manifest = second_launch.paths, second_launch.manifest
    assert (first.number, second.number) == (1, 2)
    assert launch_numbers(first.run_dir) == [1, 2]
    assert first.script.read_text() == text
    assert (first.run_dir / "launcher.json").resolve() == second.manifest
    assert read_manifest(second.directory) == manifest
    assert (second.code / "slipway" / "trainer" / "pretrain.py").is_file()
    for paths in (first, second):
        wait_for_end(paths)


def test_the_command_is_kept_pasteable(tmp_path: Path) -> None:
    paths = launch_locally(tmp_path).paths
    wait_for_end(paths)
    text = (paths.directory / "launcher_cmd.log").read_text()
    assert shlex.split(text, comments=True) == ["cd", str(Path.cwd()), "&&", "slipway", "launch", "a b"]


def test_number_is_reserved_once_and_leaves_nothing_when_released(tmp_path: Path) -> None:
    numbers = [reserve_number(tmp_path, "base_results_dir") for _ in range(3)]
    assert numbers == [1, 2, 3]
    assert launch_numbers(tmp_path) == [], "nothing is launched yet"
    release_number(tmp_path, 2)
    assert reserve_number(tmp_path, "base_results_dir") == 2
    for number in numbers:
        release_number(tmp_path, number)
    assert list((tmp_path / "launches").iterdir()) == []


def test_a_written_launch_is_never_written_over(tmp_path: Path) -> None:
    assert reserve_number(tmp_path, "base_results_dir") == 1
    paths = LaunchPaths(tmp_path, "run", "job", 1)
    write_launch(paths, {paths.script: "one\n"}, code=None, key="base_results_dir")
    assert reserve_number(tmp_path, "base_results_dir") == 2
    (tmp_path / "launches" / ".new-1").mkdir()  # as of a launcher that saw neither
    with pytest.raises(UserError, match="cannot write"):
        write_launch(paths, {paths.script: "two\n"}, code=None, key="base_results_dir")
    assert paths.script.read_text() == "one\n"
    assert sorted(entry.name for entry in (tmp_path / "launches").iterdir()) == [".new-2", "1"]


def test_a_refused_launch_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, script_text: str) -> str | None:
        raise UserError("no such partition")

    monkeypatch.setattr("launcher.schedulers.local.LocalScheduler.validate", refuse)
    with pytest.raises(UserError, match="no such partition"):
        launch_locally(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_launch_is_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a draft whose number another launcher took, too."""
    request = local_request(tmp_path)
    first, second = draft(request), draft(request)
    wait_for_end(launch(first, request).paths)
    rendered: list[int] = []
    real = launcher.drafting.render

    def count(plan: Plan, template_dir: Path | None) -> dict[Path, str]:
        rendered.append(plan.paths.number)
        return real(plan, template_dir)

    monkeypatch.setattr("launcher.drafting.render", count)
    wait_for_end(launch(second, request).paths)
    assert rendered == [2]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(UserError, match="cannot write") as raised:
        launch_locally(tmp_path)
    assert "base_results_dir" in str(raised.value)


def test_atomic_writing_leaves_the_old_content_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_the_users_is_not_replaced_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("t")
    (tmp_path / "results").write_text("mine")
    link_atomic(tmp_path / "results", tmp_path / "target")
    assert (tmp_path / "results").read_text() == "mine"


def test_a_refused_submission_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, submission: Submission) -> str:
        raise UserError("no thanks")

    monkeypatch.setattr("launcher.schedulers.local.LocalScheduler.submit", refuse)
    with pytest.raises(UserError, match="no thanks"):
        launch_locally(tmp_path)
    written = json.loads((tmp_path / "results/tokenize_text/launches/1/launcher.json").read_text())
    assert written["error"] == "no thanks"
    assert written["job_id"] is None


def test_a_refused_launch_does_not_hide_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch_locally(tmp_path).paths
    wait_for_end(first)

    def refuse(_: object, submission: Submission) -> str:
        raise UserError("no thanks")

    monkeypatch.setattr("launcher.schedulers.local.LocalScheduler.submit", refuse)
    with pytest.raises(UserError, match="no thanks"):
        launch_locally(tmp_path)
    assert launch_numbers(first.run_dir) == [1, 2]
    assert (first.run_dir / "launcher.json").resolve() == first.manifest
    assert open_launch(first.run_dir).paths.number == 1


def test_the_commit_is_that_of_our_own_checkout_only(tmp_path: Path, repository: Path) -> None:
    ours = checkout_of(repository / "slipway")
    assert ours is not None and ours.top == repository and len(ours.commit) == 40
    # The package may be installed below a project of the user's.
    theirs = tmp_path / "venv" / "slipway"
    theirs.mkdir(parents=True)
    (theirs / "pretrain.py").touch()
    (tmp_path / "theirs.txt").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "-q"], ["add", "theirs.txt"], ["commit", "-q", "-m", "theirs"]):
        subprocess.run([*git, *arguments], check=True)
    assert checkout_of(theirs) is None


def test_interrupted_submission_is_not_recorded_as_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object, submission: Submission) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.schedulers.local.LocalScheduler.submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch_locally(tmp_path)
    assert read_manifest(tmp_path / "results/tokenize_text/launches/1").error is None


def test_a_local_job_is_found_through_a_link(tmp_path: Path) -> None:
    """A kill of the number that `follow` shows ends the job's tasks, too."""
    script = tmp_path / "real" / "1" / "job_submission.sh"
    script.parent.mkdir(parents=True)
    script.write_text("trap 'exit 0' TERM; sleep 60 & wait")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    scheduler = LocalScheduler()
    job = scheduler.submit(Submission("a-tag", script, "", ""))
    ref = JobRef({1: job}, tmp_path / "link" / "1", ["a-tag"], host())
    try:
        for _ in range(300):  # also while the shell starts
            assert scheduler.statuses([ref])[0].state is State.RUNNING
    finally:
        assert scheduler.act(Action.CANCEL, [job]) == {}


def test_tag_tells_two_jobs_with_one_script_apart(tmp_path: Path) -> None:
    script = tmp_path / "job_submission.sh"
    script.write_text("sleep 60 & wait")
    scheduler = LocalScheduler()
    jobs = {tag: scheduler.submit(Submission(tag, script, "", "")) for tag in ("one", "two")}
    try:
        for tag, job in jobs.items():
            # A process has no command line for a moment, while one program takes the place of another.
            deadline = time.monotonic() + 10
            while not (jobs_by_tag := scheduler.find([Submission(tag, script, "", "")])):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert jobs_by_tag == {tag: {1: [job]}}
        assert scheduler.find([Submission("three", script, "", "")]) == {}
    finally:
        assert scheduler.act(Action.CANCEL, [*jobs.values()]) == {}


def test_link_to_the_newest_launch_is_checked_after_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another launcher links its own launch just before the slower one links an older one."""
    first, second = launch_locally(tmp_path), launch_locally(tmp_path)
    run_dir = first.paths.run_dir
    late_manifest = replace(second.manifest, job_id=None)
    write_manifest(second.paths.directory, late_manifest)

    def link_overtaken(link: Path, target: Path) -> None:
        if link.name == "newest" and target.name == "1":
            write_manifest(second.paths.directory, second.manifest)
            link_atomic(link, second.paths.directory)
        link_atomic(link, target)

    monkeypatch.setattr("launcher.runs.write.link_atomic", link_overtaken)
    link_newest(first.paths, [], [])
    assert (run_dir / "newest").resolve() == second.paths.directory
    for launched in (first, second):
        wait_for_end(launched.paths)


def test_permissions_are_what_the_umask_says(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        private = launch_locally(tmp_path, "data_preparation.run.name=private").paths
        os.umask(0o022)
        public = launch_locally(tmp_path, "data_preparation.run.name=public").paths
    finally:
        os.umask(previous)
    for paths, directory, script, text in ((private, 0o750, 0o750, 0o640), (public, 0o755, 0o755, 0o644)):
        assert paths.directory.stat().st_mode & 0o777 == directory
        assert paths.script.stat().st_mode & 0o777 == script
        assert paths.manifest.stat().st_mode & 0o777 == text
        assert (paths.code / "slipway" / "trainer" / "pretrain.py").stat().st_mode & 0o777 == text
        wait_for_end(paths)


def test_old_remains_of_killed_launchers_are_removed(tmp_path: Path) -> None:
    launches = launch_locally(tmp_path).paths.directory.parent
    for name, age in ((".new-old", 2 * 86400), (".new-young", 60)):
        (launches / name / "code").mkdir(parents=True)
        os.utime(launches / name, (time.time() - age,) * 2)
    second = launch_locally(tmp_path).paths
    assert {path.name for path in launches.iterdir()} == {"1", "2", ".new-young"}
    for number in (1, 2):
        wait_for_end(replace(second, number=number))


def test_a_command_with_line_breaks_stays_one_line(tmp_path: Path) -> None:
    """The replay stands behind a `#`: a second line of it would be a command."""
    request = replace(local_request(tmp_path), command=["printf", "%s|", "a\ntouch canary\t'\\"])
    paths = launch(draft(request), request).paths
    lines = (paths.directory / "launcher_cmd.log").read_text().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("#") for line in lines[1:])
    output = subprocess.run(["bash", "-c", lines[0]], capture_output=True, text=True, check=True).stdout
    assert output == "a\ntouch canary\t'\\|"
    wait_for_end(paths)


def test_job_that_is_not_on_record_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("launcher.launching.writing.write_manifest", fail_full_disk)
    launched = launch_locally(tmp_path)
    assert launched.manifest.job_id is not None
    assert "could not be written" in launched.warnings[-1]
    wait_for_end(launched.paths)
    assert open_launch(launched.paths.run_dir).manifest.job_id == launched.manifest.job_id


def test_state_is_unknown_while_the_scheduler_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launch_locally(tmp_path)
    wait_for_end(launched.paths)
    shutil.rmtree(launched.paths.marks)
    lost = replace(launched.manifest, job_id=None, created="2020-01-01T00:00:00Z", scheduler="slurm")
    write_manifest(launched.paths.directory, replace(lost, slurm_conf=str(tmp_path / "gone.conf")))
    opened = open_launch(launched.paths.run_dir)
    status = poll([opened])[0]
    assert status.state is State.UNKNOWN
    assert "gone.conf" in (status.reason or "")
