"""`slipway check`: what it prints, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.preflight.registry import CHECKS
from launcher.sandbox import Sandbox

TWO = ["training=gpt3/175b", "training.trainer.num_nodes=2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to stand in, on a machine without Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("no-slurm")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_good_launch_passes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "training=gpt3/126m", "cluster=bcm"]) == 0
    layout, skipped, verdict = capsys.readouterr().out.splitlines()
    assert layout == (
        "gpt3_126m: 8 nodes × 8 = 64 tasks: tensor 1 × pipeline 1 × context 1 × data 64;"
        " global batch 256 = micro batch 4 × data 64 × 1, 524,288 tokens a step"
    )
    assert skipped.startswith("skipped: the script was not shown to Slurm: sbatch is not on this machine")
    assert verdict == f"{len(CHECKS)} of {len(CHECKS)} checks found nothing; 1 skipped"
    assert list(here.iterdir()) == []


def test_175b_on_two_nodes_says_why_not_in_one_screen(
    here: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *TWO]) == 2
    told = capsys.readouterr().out
    assert told.startswith(
        "error: training.model.pipeline_model_parallel_size=8: tensor 4 × pipeline 8 × context 1 = 32"
        " does not divide 2 nodes × 8 GPUs = 16 [layout.world]\n"
    )
    assert f"  from {repository}/conf/training/gpt3/175b.yaml:" in told
    assert "  training.trainer.num_nodes is from the command line: training.trainer.num_nodes=2\n" in told
    assert "  node counts that would do: 4, 8, 16, 32, 64, 128, 256, 512, 1024\n" in told
    assert "  tensor × pipeline that would do on 2 nodes: 8 × 2, 4 × 4, 2 × 8, " in told
    assert len(told.splitlines()) < 24
    assert list(here.iterdir()) == []


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *TWO, "training.trainer.max_steps=100", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["choices"]["training"] == "gpt3/175b"
    assert told["layout"] is None
    assert told["errors"] == 1
    by_id = {item["id"]: item for item in told["findings"]}
    assert by_id["layout.world"]["severity"] == "error"
    assert by_id["layout.world"]["key"] == "training.model.pipeline_model_parallel_size"
    assert "node counts that would do: 4, 8" in by_id["layout.world"]["fix"]
    assert by_id["schedule.warmup"]["severity"] == "warning"
    assert by_id["scheduler"]["severity"] == "skipped"


def test_json_has_the_layout_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "training=gpt3/175b", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["world"], layout["data"], layout["micro_batches"]) == (1024, 32, 64)
    assert layout["tokens"] == 2048 * 2048


def test_a_range_of_nodes_is_told_at_both_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["check", "training=gpt3/126m", "cluster=bcm", "resilience.nodes={min: 1, max: 2}"]
    assert main(asked) == 0
    least, most, *_ = capsys.readouterr().out.splitlines()
    assert least.startswith("gpt3_126m: 1 node × 8 = 8 tasks:")
    assert most.startswith("gpt3_126m: up to 2 nodes × 8 = 16 tasks:")
    assert "micro batch 4 × data 16 × 4" in most
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["layout"]["world"], told["layout_at_most"]["world"]) == (8, 16)


def test_a_range_with_numbers_that_do_not_fit_is_refused_with_its_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Our trainer is asked of both ends; that would refuse the same is not told twice."""
    asked = ["check", "training=gpt3/tiny", "cluster=sandbox", "cluster.slurm_conf=null"]
    assert main([*asked, "resilience.nodes={min: 1, max: 3}"]) == 2
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert line.startswith("error: resilience.nodes={min: 1, max: 3}: with 3 nodes")
    assert "  from the command line: resilience.nodes={min: 1, max: 3}" in lines
    assert "  'resilience.nodes={min: 1, max: 2}'" in lines


def test_a_check_that_is_left_out_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *TWO, "--no-check=layout.world", "--no-check", "time.max_time"]) == 0
    told = capsys.readouterr().out
    assert "skipped: --no-check=layout.world [layout.world]\n" in told
    assert "skipped: --no-check=time.max_time [time.max_time]\n" in told


@pytest.mark.parametrize("name", ["machine", "scheduler"])
def test_what_a_launch_always_looks_at_is_left_out_by_a_check_alone(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = f"container={here}/no-such.sqsh"
    assert main(["check", mistake, f"--no-check={name}"]) == (0 if name == "machine" else 2)
    told = capsys.readouterr().out
    assert f"skipped: --no-check={name} [{name}]\n" in told
    assert ("not shown to Slurm" in told) == (name == "machine")
    assert main(["launch", mistake, f"--no-check={name}"]) == 2
    told = capsys.readouterr().err
    assert f"--no-check={name}: a launch always looks at that\n  slipway check --no-check={name}" in told


def test_what_this_machine_lacks_is_an_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "nemo-24.07.sqsh").touch()
    assert main(["check", f"container={here}/nemo-24.7.sqsh"]) == 2
    told = capsys.readouterr().out
    assert "there is no such file [machine]\n" in told
    assert "nemo-24.07.sqsh" in told


def test_data_preparation_has_no_layout(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["stages=[data_preparation]", f"data_preparation.inputs=[{here}]", "cluster=bcm"]
    assert main(["check", *overrides]) == 0
    assert "tensor" not in capsys.readouterr().out


@pytest.mark.slurm
def test_a_real_slurm_judges_the_script(
    plain_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in plain_sandbox.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
    overrides = ["training=gpt3/tiny", "cluster=sandbox", "cluster.python=/bin/true", "--json"]
    verdicts = {}
    for name, more in {"good": [], "no partition": ["cluster.partition=no_such"]}.items():
        code = main(["check", *overrides, *more])
        findings = json.loads(capsys.readouterr().out)["findings"]
        verdicts[name] = (code, [item["message"] for item in findings if item["id"] == "scheduler"])
    assert verdicts["good"] == (0, [])
    code, (refusal,) = verdicts["no partition"]
    assert code == 2
    assert refusal.startswith("Slurm would refuse this job: ")


def test_every_check_is_documented(repository: Path) -> None:
    page = (repository / "docs/checks.md").read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| `{check.id}` |" in page
