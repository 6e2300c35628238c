"""A sweep before its launch: the directories of its points, the checks, and its arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.rendering.supervision import supervisor_archive
from launcher.sweeps.arrays import (
    Array,
    array_settings,
    list_differences,
    pick_array,
    plan_arrays,
    render_array,
)
from launcher.sweeps.points import SweepDraft, SweepRequest, check_sweep, draft_sweep

LR = "training.model.optim.lr=5e-3,6e-3,7e-3"
SEED = "training.model.seed=1,2"


def draft_points(tmp_path: Path, *overrides: str, name: str | None = None) -> SweepDraft:
    all_overrides = ["training=gpt3/tiny", "cluster=bcm", f"base_results_dir={tmp_path}/results", *overrides]
    return draft_sweep(SweepRequest(overrides=all_overrides, command=["slipway", "sweep"], name=name))


def arrays(sweep: SweepDraft, largest: int = 1001, throttle: int | None = None) -> list[Array]:
    return plan_arrays(sweep, throttle, largest)


def test_each_point_is_a_run_below_the_sweeps_directory(tmp_path: Path) -> None:
    sweep = draft_points(tmp_path, LR, SEED)
    assert (sweep.name, sweep.directory) == ("gpt3_tiny_sweep", tmp_path / "results" / "gpt3_tiny_sweep")
    runs = [(point.plan.paths.run_dir, point.plan.paths.run_name) for point in sweep.points]
    assert runs[0] == (sweep.directory / "lr=5e-3_seed=1", "lr=5e-3_seed=1")
    assert len(set(runs)) == 6
    rates = [point.plan.job.config["model"]["optim"]["lr"] for point in sweep.points if point.plan.job.config]
    assert rates == [5e-3, 5e-3, 6e-3, 6e-3, 7e-3, 7e-3]


def test_points_with_equal_resources_are_one_array(tmp_path: Path) -> None:
    (array,) = arrays(draft_points(tmp_path, LR, SEED, name="mine"), throttle=2)
    assert array.numbers == "0-5%2"
    assert array.job_name == "nemo-megatron-mine"
    assert {point.plan.paths.job_name for point in array.points} == {array.job_name}


def test_points_with_different_resources_are_in_different_arrays(tmp_path: Path) -> None:
    planned = arrays(draft_points(tmp_path, "training.trainer.num_nodes=1,2,4", SEED))
    assert [len(array.points) for array in planned] == [2, 2, 2]
    assert len({array.job_name for array in planned}) == 3, "`singleton` would let them wait for each other"
    assert list_differences(planned) == ["--nodes"]


def test_more_points_than_an_array_may_have_are_split(tmp_path: Path) -> None:
    planned = arrays(draft_points(tmp_path, LR, SEED), largest=4)
    assert [array.numbers for array in planned] == ["0-3", "0-1"]
    assert list_differences(planned) == []
    assert len({point.grid_point.name for array in planned for point in array.points}) == 6


def test_the_script_of_an_array_is_sound_whatever_the_names_hold(tmp_path: Path) -> None:
    sweep = draft_points(
        tmp_path,
        *(LR, "container=null", "cluster.python='/a b/$(touch canary)/python'"),
        f"base_results_dir='{tmp_path}/a \"b\" $(touch canary) %a'",
    )
    (array,) = arrays(sweep)
    script = render_array(array, sweep.directory / "arrays" / "1", "a-tag", None)
    assert "%%a/gpt3_tiny_sweep/arrays/1/points/%a/log-" in script
    assert "\n# Tasks run '/a b/$(touch canary)/python'\n" in script
    shellcheck = Path(sys.executable).with_name("shellcheck")
    # shellcheck takes the $( in a name for an expansion.
    done = subprocess.run([shellcheck, "--exclude=SC2016", "-"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def run_task(script: Path, task: int, *arguments: str, job: str = "17") -> str:
    environment = {"PATH": "/usr/bin:/bin", "SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": str(task)}
    done = subprocess.run(
        ["bash", script, *arguments], env=environment, capture_output=True, text=True, timeout=30
    )
    return f"{done.returncode} {done.stdout}{done.stderr}"


def test_a_task_becomes_its_points_script_unless_the_array_is_another(tmp_path: Path) -> None:
    results = f"base_results_dir='{tmp_path}/a \"b\" $(touch {tmp_path}-canary) %a'"
    sweep = draft_points(tmp_path, LR, "container=null", results)
    (array,) = arrays(sweep)
    directory = sweep.directory / "arrays" / "1"
    directory.mkdir(parents=True)
    script = directory / "script.sh"
    script.write_text(render_array(array, directory, "the-tag", None))
    (directory / "supervisor.pyz").write_bytes(supervisor_archive())
    (directory / "supervisor.json").write_text(json.dumps(array_settings(array, "the-tag")._asdict()))
    for point in array.points:
        point.plan.paths.directory.mkdir(parents=True)
        point.plan.paths.script.write_text(f'echo "{point.grid_point.name} was told $*"\n')
    tags = [point.plan.tag for point in array.points]
    assert run_task(script, 1, "the-tag") == f"0 lr=6e-3 was told {tags[1]}\n"
    assert run_task(script, 2, "the-tag") == f"0 lr=7e-3 was told {tags[2]}\n"
    assert run_task(script, 0) == "0 lr=5e-3 was told \n", "by hand it is no job of the launch's"
    assert "leaves without doing anything" in run_task(script, 0, "the-tag", job="18")
    assert "was told" not in run_task(script, 0, "the-tag", job="18")
    assert run_task(script, 3, "the-tag").startswith("1 ")
    settings = array_settings(array, "another array's")._asdict()
    (directory / "supervisor.json").write_text(json.dumps(settings))
    assert run_task(script, 0, "the-tag").startswith("1 ") and "told" not in run_task(script, 0)
    (directory / "supervisor.json").write_text(json.dumps({**settings, "tag": "the-tag"}))
    array.points[0].plan.paths.script.unlink()
    assert "moved since it was launched" in run_task(script, 0, "the-tag")
    assert not Path(f"{tmp_path}-canary").exists()


def test_every_point_is_checked_and_the_same_mistake_reported_once(tmp_path: Path) -> None:
    sweep = draft_points(tmp_path, "training.model.micro_batch_size=16,5,7", SEED)
    with pytest.raises(UserError) as error:
        check_sweep(sweep, [])
    messages = [str(mistake) for mistake in error.value.mistakes]
    assert any("micro_batch_size=5" in text and "in micro_batch_size=5_seed=1, " in text for text in messages)
    assert any("micro_batch_size=7" in text for text in messages)
    assert not any("micro_batch_size=16_" in text for text in messages)
    assert not any("micro_batch_size=5_seed=1" in text for text in messages if "micro_batch_size=7" in text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=local"], "a sweep is a job array of Slurm's"),
        (["resilience.links=3"], "a point of a sweep is one job, and no chain"),
        (["cluster.sbatch.array='0-3%1'"], "a sweep is an array already"),
        (["cluster.slurm_conf=/a,/b"], "a sweep is of one cluster"),
        # These hold for all points, and not for the first alone.
        (["resilience.links=1,3"], "a point of a sweep is one job, and no chain"),
        (["cluster.scheduler=slurm,local"], "a sweep is a job array of Slurm's"),
    ],
)
def test_options_that_no_sweep_can_have_are_refused(
    tmp_path: Path, overrides: Sequence[str], message: str
) -> None:
    with pytest.raises(UserError) as error:
        draft_points(tmp_path, LR, *overrides)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "", "a\nb"])
def test_a_name_that_is_no_directorys_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="--name"):
        draft_points(tmp_path, LR, name=name)


def test_no_array_is_numbered_where_the_others_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pick_array(Path()) == Path("arrays/1")
    (tmp_path / "arrays" / "7").mkdir(parents=True)
    assert pick_array(Path()) == Path("arrays/8")
    tmp_path.chmod(0o755)
    (tmp_path / "arrays").chmod(0o311)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may list everything
    try:
        with pytest.raises(PermissionError):
            pick_array(Path())
    finally:
        os.seteuid(user)
        (tmp_path / "arrays").chmod(0o755)


def test_a_run_is_not_made_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "results" / "there" / "launches").mkdir(parents=True)
    with pytest.raises(UserError, match="is a run already"):
        draft_points(tmp_path, LR, name="there")
