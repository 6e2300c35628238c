"""Several stages in one launch: all are checked first, and each is a job that waits for the one before."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.drafting import Request, draft, drafts
from launcher.errors import UserError
from launcher.jobs.launches import Launch
from launcher.launching import launch_stages
from launcher.runs.manifest import read_manifest
from slipway.supervisor.dependent_stages import NAME as STAGES_FILE
from slipway.supervisor.dependent_stages import Repeated, Stage, read_stages
from tests.launching.fake_slurm import FakeSlurm, install, overrides, stages

SLIPWAY = Path(sys.executable).with_name("slipway")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path, monkeypatch)


def submit_stages(tmp_path: Path, *more: str) -> list[Launch]:
    request = Request(stages(tmp_path, *more), ["slipway", "launch", "stages=[data_preparation,training]"])
    return launch_stages(drafts(request), request)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def slipway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> object:
    def call(verb: str, *more: str) -> Result:
        code = main([verb, *stages(tmp_path), *more])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.mark.parametrize(
    ("more", "after"),
    [
        ((), "afterok:101,singleton"),
        (("training.run.dependency=null",), "afterok:101"),
        (("resilience.after_stage=afterany",), "afterany:101,singleton"),
        (("training.run.dependency='afterok:7,singleton'",), "afterok:101,afterok:7,singleton"),
    ],
)
def test_a_stage_waits_for_the_one_before_but_not_forever(
    tmp_path: Path, slurm: FakeSlurm, more: tuple[str, ...], after: str
) -> None:
    first, second = submit_stages(tmp_path, *more)
    assert slurm.submitted() == [
        f"{first.manifest.tag}.1_submission.sh {first.manifest.tag}",
        f"--dependency={after} --kill-on-invalid-dep=yes {second.manifest.tag}.1_submission.sh"
        f" {second.manifest.tag}",
    ]
    assert (first.manifest.stage, first.manifest.job_id, first.manifest.after) == (
        "data_preparation",
        "101",
        None,
    )
    on_record = read_manifest(second.paths.directory)
    assert (on_record.stage, on_record.job_id, on_record.after) == ("training", "102", after)
    assert (tmp_path / "results" / "gpt3_tiny" / "launcher.log").read_text() == "Submitted batch job 102\n"


def test_each_stage_is_rendered_as_if_it_were_launched_alone(tmp_path: Path, slurm: FakeSlurm) -> None:
    stage_drafts = drafts(Request(stages(tmp_path, "resilience.links=3"), []))
    single_draft = draft(
        Request(overrides(tmp_path, "resilience.links=3"), [], number=1, tag=stage_drafts[1].plan.tag)
    )
    assert stage_drafts[1].texts == single_draft.texts
    assert stage_drafts[1].composition.choices == single_draft.composition.choices
    assert stage_drafts[0].composition.config.training is None
    assert stage_drafts[0].plan.job.chain.links == 1, "a preparation does not go on from a checkpoint"


def test_sbatch_tests_all_stages_before_anything_is_written(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.judge(gpt3_tiny="Invalid account")
    with pytest.raises(UserError, match="Invalid account"):
        submit_stages(tmp_path)
    assert [line.split()[0] for line in slurm.calls()] == ["judged", "judged"]
    assert not (tmp_path / "results").exists()


def test_all_stages_are_checked_before_anything_is_submitted(
    tmp_path: Path, slurm: FakeSlurm, slipway: object
) -> None:
    result = slipway("launch", "training.model.global_batch_size=7", "data_preparation.run.time_limit=soon")  # type: ignore[operator]
    assert result.code == 2
    assert "time_limit" in result.err
    result = slipway("launch", "training.model.global_batch_size=7")  # type: ignore[operator]
    assert result.code == 2
    assert "training.model.global_batch_size=7" in result.err
    assert slurm.calls() == []


def test_a_stage_that_cannot_wait_beside_alternatives_is_refused(tmp_path: Path, slurm: FakeSlurm) -> None:
    with pytest.raises(UserError, match=r"training.run.dependency='afterok:7\?afterok:8': alternatives"):
        submit_stages(tmp_path, "training.run.dependency='afterok:7?afterok:8'")
    assert slurm.submitted() == []
    assert not (tmp_path / "results").exists()


def test_refused_first_stage_leaves_the_second_without_a_job(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.refuse("tokenize_text")
    with pytest.raises(UserError, match="Slurm refused the job: no tokenize_text"):
        submit_stages(tmp_path)
    assert len(slurm.submitted()) == 1
    second = read_manifest(tmp_path / "results" / "gpt3_tiny" / "launches" / "1")
    assert second.job_id is None
    assert second.error == "the stage before it, data_preparation, has no job"
    slurm.refuse()
    assert [launch.paths.number for launch in submit_stages(tmp_path)] == [2, 2]


def test_refused_second_stage_names_the_command_to_go_on_with(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.refuse("gpt3_tiny")
    with pytest.raises(UserError) as raised:
        submit_stages(tmp_path)
    assert raised.value.message == "training: Slurm refused the job: no gpt3_tiny"
    assert str(raised.value.hint).splitlines() == [
        "data_preparation is job 101, and goes on",
        "once this is fixed: the same command with stages=[training]"
        " training.run.dependency=afterok:101,singleton",
    ]
    assert read_manifest(tmp_path / "results" / "tokenize_text" / "launches" / "1").job_id == "101"
    assert "no gpt3_tiny" in str(read_manifest(tmp_path / "results" / "gpt3_tiny" / "launches" / "1").error)


@pytest.mark.parametrize(("condition", "needs_success"), [("afterok", True), ("afterany", False)])
@pytest.mark.parametrize(("submit", "after"), [("job", "afterany:101"), ("launch", "afterany:101:102:103")])
def test_stage_after_a_chain_waits_for_its_known_links(
    tmp_path: Path, slurm: FakeSlurm, condition: str, needs_success: bool, submit: str, after: str
) -> None:
    """Each link adds the link that it submits, and the stage itself decides whether the chain is done."""
    options = ["stages=[training,data_preparation]", "resilience.links=3", f"resilience.submit={submit}"]
    options += [f"resilience.after_stage={condition}", "data_preparation.run.dependency=singleton"]
    first, second = submit_stages(tmp_path, *options)
    assert (second.manifest.after, second.manifest.waits_for) == (f"{after},singleton", "gpt3_tiny")
    assert f"--dependency={after},singleton" in slurm.submitted()[-1]
    chain, stage = (read_stages(launch.paths.directory) for launch in (first, second))
    assert chain.before is None and stage.after == ()
    assert chain.after == (
        Stage("tokenize_text", str(second.paths.directory), second.manifest.tag, "singleton", needs_success),
    )
    assert stage.before == Stage(
        "gpt3_tiny", str(first.paths.directory), first.manifest.tag, "", needs_success
    )


def test_training_knows_the_stages_that_read_its_checkpoints(tmp_path: Path, slurm: FakeSlurm) -> None:
    options = ["stages=[data_preparation,training,command]", "command.argv=[true]", "command.every=3"]
    _, training, command = submit_stages(tmp_path, *options)
    paths, manifest = command.paths, command.manifest
    assert read_stages(training.paths.directory).repeated == (
        Repeated("command", str(paths.directory), manifest.tag, str(paths.script), 3),
    )
    assert (manifest.every, manifest.after) == (3, "afterok:102")
    assert not (paths.directory / STAGES_FILE).exists()


def test_only_stages_around_a_chain_know_of_each_other(tmp_path: Path, slurm: FakeSlurm) -> None:
    for launch in submit_stages(tmp_path, "resilience.links=3"):  # the chain is the last
        assert not (launch.paths.directory / STAGES_FILE).exists()


def test_refused_stage_after_a_chain_is_launched_again_when_that_is_done(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.refuse("tokenize_text")
    with pytest.raises(UserError) as raised:
        submit_stages(tmp_path, "stages=[training,data_preparation]", "resilience.links=3")
    assert str(raised.value.hint).splitlines()[-1] == (
        "once this is fixed, and gpt3_tiny is done: the same command with stages=[data_preparation]"
    )


@pytest.mark.parametrize(
    ("stage", "words", "refused", "advice"),
    [
        ("conversion", [], "gpt3_tiny_conversion", "slipway convert gpt3_tiny --on-cluster"),
        ("evaluation", [], "gpt3_tiny_evaluation", "slipway evaluate gpt3_tiny --on-cluster"),
        (
            "command",
            ["command.argv=[true]", "command.every=2"],
            "results/command/",
            "the same command with stages=[command] command.every=null",
        ),
    ],
)
def test_refused_stage_that_reads_checkpoints_names_a_command_that_works_alone(
    tmp_path: Path, slurm: FakeSlurm, stage: str, words: list[str], refused: str, advice: str
) -> None:
    slurm.refuse(refused)
    with pytest.raises(UserError) as raised:
        request = Request(overrides(tmp_path, f"stages=[training,{stage}]", "resilience.links=3", *words), [])
        launch_stages(drafts(request), request)
    assert str(raised.value.hint).splitlines()[-1] == f"once this is fixed, and gpt3_tiny is done: {advice}"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["stages=[data_preparation,training,training]"], "a stage is named twice"),
        (["cluster.scheduler=local"], "no queue in which one could wait"),
        (
            [
                *("stages=[data_preparation,training,command]", "command.argv=[true]", "command.every=1"),
                *("resilience.links=2", "resilience.submit=launch"),
            ],
            "no sbatch",
        ),
        (
            ["data_preparation.run.results_dir=/x/y", "training.run.results_dir=/x/y"],
            "both would be launches of /x/y",
        ),
    ],
)
def test_stages_that_cannot_follow_each_other_are_refused(
    tmp_path: Path, more: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        drafts(Request(stages(tmp_path, *more), []))


def test_stages_are_launched_in_the_order_of_the_user(tmp_path: Path, slurm: FakeSlurm) -> None:
    launches = submit_stages(tmp_path, "stages=[training,data_preparation]")
    assert [launch.manifest.stage for launch in launches] == ["training", "data_preparation"]
    assert launches[1].manifest.after == "afterok:101"


def test_a_dry_run_shows_all_scripts_and_writes_nothing(tmp_path: Path, slipway: object) -> None:
    result = slipway("launch", "--dry-run")  # type: ignore[operator]
    assert result.code == 0
    assert [line for line in result.out.splitlines() if line.startswith("# --- ") and ": /" in line] == [
        f"# --- data_preparation: {tmp_path}/results/tokenize_text/launches/1/"
        "nemo-megatron-tokenize_text_submission.sh ---",
        f"# --- training: {tmp_path}/results/gpt3_tiny/launches/1/nemo-megatron-gpt3_tiny_submission.sh ---",
    ]
    assert result.out.count("#!/bin/bash\n") == 2
    assert not (tmp_path / "results").exists()
    rendered = slipway("render")  # type: ignore[operator]
    assert len(rendered.out.splitlines()) == len(result.out.splitlines())


def test_each_script_is_rendered_again_byte_for_byte(
    tmp_path: Path, slurm: FakeSlurm, slipway: object
) -> None:
    for launch in submit_stages(tmp_path):
        command = (launch.paths.directory / "launcher_cmd.log").read_text().splitlines()[2]
        assert f"--stage={launch.manifest.stage}" in command
        options = ["--dry-run", f"--stage={launch.manifest.stage}", f"--tag={launch.manifest.tag}"]
        result = slipway("launch", *options, "--launch-number=1")  # type: ignore[operator]
        assert result.out == launch.paths.script.read_text()
    refused = slipway("render", "--launch-number=1")  # type: ignore[operator]
    assert refused.code == 2
    assert "--stage=training" in refused.err
    unknown = slipway("render", "--stage=trainig")  # type: ignore[operator]
    assert "did you mean 'training'?" in unknown.err
    without_dry_run = slipway("launch", "--stage=training")  # type: ignore[operator]
    assert "they need --dry-run" in without_dry_run.err


def test_each_submitted_stage_is_reported(slurm: FakeSlurm, slipway: object) -> None:
    result = slipway("launch")  # type: ignore[operator]
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if line.startswith("Submitted")]
    assert lines[0].startswith("Submitted to Slurm: job 101, run tokenize_text, launch 1, 1 × 1 tasks")
    assert lines[1].endswith("launch 1, 2 × 2 tasks, waits for afterok:101,singleton")
    result = slipway("launch", "--json")  # type: ignore[operator]
    assert [(entry["job_id"], entry["launch"]) for entry in json.loads(result.out)] == [
        ("103", 2),
        ("104", 2),
    ]


def test_smoke_is_refused_while_data_are_not_prepared(slurm: FakeSlurm, slipway: object) -> None:
    result = slipway("launch", "--smoke")  # type: ignore[operator]
    assert result.code == 2
    assert "stages=[training] --smoke" in result.err
    assert slurm.calls() == []


def test_launch_that_needs_dry_run_is_refused_before_its_smoke(slurm: FakeSlurm, slipway: object) -> None:
    result = slipway("launch", "--smoke", "--stage=training")  # type: ignore[operator]
    assert result.code == 2
    assert "they need --dry-run" in result.err
    assert "sbatch" not in str(slurm.calls())


def test_check_reports_each_stage(slurm: FakeSlurm, slipway: object) -> None:
    result = slipway("check", "--json", "training.model.global_batch_size=7")  # type: ignore[operator]
    assert result.code == 2
    first, second = json.loads(result.out)
    assert (first["run"], first["errors"]) == ("tokenize_text", 0)
    assert second["run"] == "gpt3_tiny"
    assert second["errors"] > 0
    result = slipway("check")  # type: ignore[operator]
    assert [line for line in result.out.splitlines() if line.startswith("stage ")] == [
        "stage data_preparation",
        "stage training",
    ]


def test_diff_covers_each_stage(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    submit_stages(tmp_path)
    assert main(["diff", *stages(tmp_path)]) == 0
    assert (
        main(["diff", *stages(tmp_path), "data_preparation.seed=5", "training.run.time_limit=00:20:00"]) == 1
    )
    output = capsys.readouterr().out
    assert "-  seed: 1234" in output
    assert "+#SBATCH --time=00:20:00" in output
    assert main(["diff", *stages(tmp_path), "--launch=1"]) == 2
    assert "--launch 1: name its stage" in capsys.readouterr().err


def test_several_stages_are_refused_where_one_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this needs a single stage"):
        draft(Request(stages(tmp_path), []))
