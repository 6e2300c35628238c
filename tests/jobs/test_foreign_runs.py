"""Runs that somebody else wrote, or copied: what they hold is shown, and neither executed nor obeyed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_project import write_launch
from run_trees import Cluster, launch

from launcher.cli.app import main
from launcher.config.compose import compose
from launcher.config.stored import stored_text
from launcher.drafting import Request, drafts
from launcher.errors import UserError
from launcher.jobs.locator import RunLocator, originals
from launcher.jobs.lookup import find_run
from launcher.launching import launch_stages
from launcher.rendering.render import TEMPLATE_DIR
from launcher.runs.known_trees import forget_trees
from launcher.runs.manifest import read_manifest, write_manifest
from launcher.schedulers.base import ChainJobs, FoundJobs, JobRef, JobStatus, Submission
from launcher.schedulers.local import LocalScheduler
from launcher.slurm.states import Action, State
from slipway.supervisor.dependent_stages import NAME, Stage, Stages, to_json
from tests.launching.fake_slurm import install, overrides

Capsys = pytest.CaptureFixture[str]
NOBODY = 65534
RUNNING = JobStatus(State.RUNNING, nodes="n[1-2]", elapsed="00:10:00")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def give_away(*paths: Path) -> None:
    """Make files somebody else's, or without root such that everybody may write them."""
    for top in paths:
        for path in (top, *top.rglob("*")):
            if os.geteuid() == 0:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
            elif not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o022)


# --- launches about a run


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training's run as a launch leaves it."""
    install(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    request = Request(overrides(tmp_path, "cluster.partition=theirs"), ["slipway", "launch"])
    (launched,) = launch_stages(drafts(request), request)
    return launched.paths.run_dir


EVIL = [
    "cluster.slurm_conf=/evil/slurm.conf",
    "cluster.python=/evil/python",
    "++env_vars.PYTHONPATH=/evil",
    "+env_vars.LD_PRELOAD=/evil.so",
    "env_files={HF_TOKEN: /evil/token}",
    "container=/evil.sqsh",
    "container_mounts=[/evil]",
    "stage_cluster.conversion.python=/evil/python",
    "cluster.sbatch={export: /evil}",
]


@pytest.mark.parametrize("verb", ["evaluate", "convert"])
@pytest.mark.parametrize("evil", EVIL)
def test_the_cluster_of_somebody_elses_run_is_not_taken(
    run_dir: Path, capsys: Capsys, verb: str, evil: str
) -> None:
    launch_dir = run_dir / "launches" / "1"
    manifest = read_manifest(launch_dir)
    write_manifest(launch_dir, replace(manifest, overrides=[*manifest.overrides, evil]))
    give_away(launch_dir / "launcher.json")
    assert main([verb, run_dir.name, "--on-cluster", "--dry-run"]) == 2
    out, err = capsys.readouterr()
    owner = "belongs to nobody" if os.geteuid() == 0 else "may write"
    assert out == ""
    assert f"{run_dir.name}/launches/1/launcher.json" in err and owner in err and "cluster=..." in err
    assert "/evil" not in err
    assert main([verb, run_dir.name, "--on-cluster", "--dry-run", "cluster=bcm", "container=null"]) == 0
    out, err = capsys.readouterr()
    assert "evil" not in out + err and "theirs" not in out


def test_a_directory_that_others_may_write_makes_its_runs_theirs(run_dir: Path, capsys: Capsys) -> None:
    run_dir.parent.chmod(0o777)
    assert main(["convert", run_dir.name, "--on-cluster", "--dry-run"]) == 2
    assert f"everybody may write {run_dir.parent}" in capsys.readouterr().err
    assert main(["convert", run_dir.name, "--dry-run"]) == 0, "on this machine nothing of it is used"


@pytest.mark.parametrize("engine", ["megatron,stages=[command]", "${oc.env:PATH}", "x y=z", "'"])
def test_an_engine_is_a_name_and_no_override(run_dir: Path, capsys: Capsys, engine: str) -> None:
    launch_dir = run_dir / "launches" / "1"
    write_manifest(launch_dir, replace(read_manifest(launch_dir), engine=engine))
    assert main(["evaluate", run_dir.name, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "engine" in err and os.environ["PATH"] not in err


# --- attach, and what acts on jobs


@dataclass
class FakeScheduler:
    """A scheduler that has all jobs, and notes the actions."""

    statuses_of: Mapping[str, JobStatus] = field(default_factory=dict)
    acts: list[str] = field(default_factory=list)

    def statuses(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        return [self.statuses_of.get(ref.job_id, RUNNING) for ref in refs]

    def find(self, submissions: Sequence[Submission]) -> FoundJobs:
        return {}

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        self.acts += job_ids
        return {}


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeScheduler:
    fake = FakeScheduler()
    monkeypatch.setattr("launcher.schedulers.scheduler_for", lambda *_: fake)
    monkeypatch.chdir(tmp_path)
    return fake


def test_attach_runs_no_script_of_somebody_else(scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = write_launch("a", 1)
    script = directory / "attach.sh"
    script.write_text("touch canary\n")
    assert main(["attach", "a", "--print"]) == 0
    assert f"bash {script} a-1 0\n" in capsys.readouterr().out, "one's own is a file"
    give_away(directory)
    assert main(["attach", "a", "--print"]) == 0
    line = capsys.readouterr().out
    assert str(script) not in line and "canary" not in line
    bash = line[line.index("bash -c ") :]
    done = subprocess.run(["bash", "-c", bash], capture_output=True, text=True)
    assert "There is no process of rank 0" in done.stderr, done


@as_root
def test_attach_leaves_processes_of_others_alone(tmp_path: Path) -> None:
    """Root can read every environment, and what it names would run as root."""
    environment = {"PATH": os.environ["PATH"], "RANK": "0", "SLIPWAY_TAG": "theirs", "LD_PRELOAD": "evil.so"}
    rank = subprocess.Popen(["sleep", "600"], env=environment, user=NOBODY)
    try:
        script = ["bash", str(TEMPLATE_DIR / "attach.sh"), "theirs", "0", "env"]
        done = subprocess.run(script, capture_output=True, text=True)
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    assert (done.returncode, done.stdout) == (1, "")
    assert "is another user's" in done.stderr


def test_any_process_is_no_allocation(scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = write_launch("a", 1)
    (directory / "attach.sh").touch()
    manifest = read_manifest(directory)
    write_manifest(directory, replace(manifest, scheduler="allocation", job_id=str(os.getpid())))
    assert main(["attach", "a", "--print"]) == 2
    assert "is in no allocation of Slurm" in capsys.readouterr().err


def test_cancelling_a_run_ends_no_job_that_does_not_follow_it(
    scheduler: FakeScheduler, capsys: Capsys
) -> None:
    theirs, mine = write_launch("theirs", 1), write_launch("mine", 2)
    (theirs / NAME).write_text(to_json(Stages(after=(Stage("mine", str(mine), "mine-2"),))))
    chain = replace(RUNNING, chain=ChainJobs(1, 1, {"1": RUNNING}, [1]))
    scheduler.statuses_of = {"1": chain, "2": JobStatus(State.PENDING)}
    for stages in (Stages(), Stages(before=Stage("other", "/other", "other-1"))):
        (mine / NAME).write_text(to_json(stages))
        assert main(["cancel", "theirs"]) == 0
        assert "mine" not in capsys.readouterr().out and "2" not in scheduler.acts


@pytest.mark.parametrize("job_id", ["1", None])
def test_no_mark_is_left_where_a_link_leads(
    scheduler: FakeScheduler, tmp_path: Path, capsys: Capsys, job_id: str | None
) -> None:
    directory = write_launch("theirs", 1)
    write_manifest(directory, replace(read_manifest(directory), job_id=job_id, links=3))
    (tmp_path / "mine").mkdir()
    (directory / "marks").symlink_to(tmp_path / "mine")
    chain = replace(RUNNING, chain=ChainJobs(1, 3, {"1": RUNNING}, [1]))
    scheduler.statuses_of = {"1": chain}
    main(["cancel", "theirs"])
    assert scheduler.acts == ["1"] * (job_id is not None)
    assert list((tmp_path / "mine").iterdir()) == []


@as_root
@pytest.mark.parametrize("is_loop", [False, True])
def test_jobs_of_others_on_this_machine_break_no_look_up(
    tmp_path: Path, other_user: int, monkeypatch: pytest.MonkeyPatch, is_loop: bool
) -> None:
    """Their directories may not be read under umask 077, and their arguments lead anywhere."""
    supervisor = tmp_path / "launches" / "1" / "supervisor.pyz"
    supervisor.parent.mkdir(parents=True)
    supervisor.write_text("import time\nprint(flush=True)\ntime.sleep(600)\n")
    supervisor.parent.parent.chmod(0o700)
    (tmp_path / "loop").symlink_to("loop")
    words = ["python3", "-IS", str(supervisor), "tag", "tag", "--"]
    if is_loop:
        words = ["bash", "-c", "echo; read -r", f"{tmp_path}/loop/x_submission.sh", "tag"]
    job = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None and job.stdout.readline() == b"\n"
        os.seteuid(other_user)
        monkeypatch.setattr(RunLocator, "_schedulers", [LocalScheduler()])
        locator = RunLocator(tmp_path / "none")
        assert locator.locate(str(job.pid)) == [] and tmp_path not in locator.trees_of_jobs()
        assert all("does not answer" not in remark for remark in locator.remarks)
        LocalScheduler().find([Submission("tag", tmp_path / "a_submission.sh", "u", "")])
    finally:
        os.seteuid(0)
        job.kill()
        job.communicate()


# --- copies


def copy_of(run: Path, target: Path) -> Path:
    """Let somebody else copy a run."""
    shutil.copytree(run, target)
    give_away(target)
    return target


@as_root
@pytest.mark.parametrize("name", ["aaa", "zzz", "deep/er/gpt"])
@pytest.mark.parametrize("is_seen_first", [False, True])
def test_a_copy_of_somebody_else_is_not_the_original(tmp_path: Path, name: str, is_seen_first: bool) -> None:
    """Its manifest has the tag, the job and the user of the original, and only its owner tells."""
    tree = tmp_path / "tree"
    run = tree / "gpt"
    launch(run, job_id="17", tag="mine", user="me")
    theirs = copy_of(run, tree / name)
    if is_seen_first:
        find_run(str(theirs), tree)
    assert find_run("17", tree).run_dir == run
    assert find_run("gpt", tmp_path / "tree").run_dir == run
    assert [launch.paths.run_dir for launch in originals(RunLocator(tree).launches())] == [run]


@as_root
def test_the_scheduler_tells_where_the_original_of_a_job_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, tree = tmp_path / "home" / "gpt", tmp_path / "tree"
    directory = launch(mine, job_id="17", tag="mine")
    theirs = copy_of(mine, tree / "gpt")
    cluster = Cluster(jobs={"17": directory / "submitted" / "mine.1_submission.sh"})
    monkeypatch.setattr(RunLocator, "_schedulers", [cluster])
    assert find_run("17", tree).run_dir == mine
    cluster.jobs = {}
    forget_trees([mine.parent])
    assert find_run("17", tree).run_dir == theirs, "of what nobody else knows the copy is shown"


# --- stored configurations


def stored(launch_dir: Path, base: Path, **changes: Any) -> None:
    words = ["training=gpt3/tiny", "cluster=bcm", "container=null", f"base_results_dir={base}"]
    content = yaml.safe_load(stored_text(compose(words).config, {}))
    (launch_dir / "root_config.yaml").write_text(json.dumps(content | changes))


REFERENCES = ["${oc.env:SHORT_TOKEN}", "a ${oc.env:USER_WORD,x}", "\\\\${oc.env:SHORT_TOKEN}", "${data_dir}"]


@pytest.mark.parametrize("value", REFERENCES)
@pytest.mark.parametrize("words", [["render", "--task"], ["render", "--config"], ["launch", "--dry-run"]])
def test_a_stored_configuration_of_somebody_else_refers_to_nothing_of_mine(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, value: str, words: list[str]
) -> None:
    monkeypatch.setenv("SHORT_TOKEN", "pa55wd")
    monkeypatch.setenv("USER_WORD", "pa55wd")
    launch_dir = launch(tmp_path / "results" / "gpt3_tiny")
    stored(launch_dir, tmp_path / "results", env_vars={"A": value})
    give_away(launch_dir / "root_config.yaml")
    assert main([*words, f"--launch-dir={launch_dir}"]) == 2
    out, err = capsys.readouterr()
    assert "pa55wd" not in out + err
    assert f"{launch_dir}/root_config.yaml: env_vars.A refers to your environment" in err
    stored(launch_dir, tmp_path / "results", env_vars={"A": "\\${oc.env:SHORT_TOKEN} {}"})
    assert main([*words, f"--launch-dir={launch_dir}"]) == 0, "an escaped one is text"
    assert "pa55wd" not in capsys.readouterr().out
