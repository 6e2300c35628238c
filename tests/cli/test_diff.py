"""`slipway diff` shows exactly what another launch would change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.cli.app import main

Capsys = pytest.CaptureFixture[str]

LOCAL = [
    "cluster=local",
    "cluster.python=/bin/true",
    "training=gpt3/tiny",
    "training.run.dependency=null",
    "training.model.data.data_impl=mock",
]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of two launches; the second has 300 steps."""
    directory = tmp_path_factory.mktemp("launched")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main(["launch", *LOCAL]) == 0
        assert main(["launch", *LOCAL, "training.trainer.max_steps=300"]) == 0
    return directory


@pytest.fixture(autouse=True)
def cwd(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workdir)
    return workdir


def diff(capsys: Capsys, *words: str, check: int) -> list[str]:
    """Return the lines that differ, without the headers of files and hunks."""
    capsys.readouterr()
    assert main(["diff", *LOCAL, *words]) == check
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line[0] in "+-" and not line.startswith(("---", "+++"))]


def test_equal_launch_has_no_difference(capsys: Capsys) -> None:
    assert diff(capsys, "training.trainer.max_steps=300", check=0) == []
    assert diff(capsys, "--launch=1", check=0) == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.trainer.limit_val_batches=7", ["-  limit_val_batches: 4", "+  limit_val_batches: 7"]),
        ("env_vars.NCCL_DEBUG=INFO", ["+export NCCL_DEBUG=INFO", "+  NCCL_DEBUG: INFO"]),
        # Where neither the script nor the job's configuration differs.
        ("estimates.gpu_hour_price=2.5", ["-  gpu_hour_price: null", "+  gpu_hour_price: 2.5"]),
        ("+training.model.new_key=[1,2]", ["+  new_key: [1, 2]"]),
        ("~training.model.make_vocab_size_divisible_by", ["-  make_vocab_size_divisible_by: 128"]),
    ],
)
def test_one_override_shows_exactly_its_change(capsys: Capsys, override: str, expected: list[str]) -> None:
    assert diff(capsys, "training.trainer.max_steps=300", override, check=1) == expected


def test_diff_against_an_earlier_launch(capsys: Capsys) -> None:
    expected = ["-  max_steps: 200", "+  max_steps: 300"]
    assert diff(capsys, "training.trainer.max_steps=300", "--launch=1", check=1) == expected


def test_diff_names_the_files(capsys: Capsys) -> None:
    assert main(["diff", *LOCAL]) == 1
    out = capsys.readouterr().out
    assert out.startswith("--- results/gpt3_tiny/launches/2/gpt3_tiny_hydra.yaml\n+++ as it would be now\n@@")
    assert "\x1b" not in out


def test_another_name_is_a_difference_and_not_another_file(capsys: Capsys, cwd: Path) -> None:
    words = ["training.trainer.max_steps=300", "training.run.name=other"]
    lines = diff(capsys, *words, f"training.run.results_dir={cwd}/results/gpt3_tiny", check=1)
    assert "-  name: gpt3_tiny" in lines and "+  name: other" in lines
    assert all("gpt3_tiny" in line or "other" in line for line in lines)


def test_a_run_that_was_never_launched_is_refused(capsys: Capsys) -> None:
    assert main(["diff", "training=gpt3/126m"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "gpt3_126m was never launched: there is nothing in results/gpt3_126m" in output.err


def test_a_missing_launch_is_refused(capsys: Capsys) -> None:
    assert main(["diff", *LOCAL, "--launch=7"]) == 2
    assert "--launch 7: gpt3_tiny has no such launch\n  launches: 1, 2" in capsys.readouterr().err


def test_a_broken_launch_is_reported(capsys: Capsys, cwd: Path) -> None:
    broken = cwd / "results/gpt3_tiny/launches/3"
    shutil.copytree(cwd / "results/gpt3_tiny/launches/2", broken, symlinks=True)
    try:
        (broken / "launcher.json").write_text("{")
        assert main(["diff", *LOCAL]) == 2
        assert "is not a launch's manifest" in capsys.readouterr().err
    finally:
        shutil.rmtree(broken)


def test_diff_writes_nothing(capsys: Capsys, cwd: Path) -> None:
    before = sorted(cwd.rglob("*"))
    main(["diff", *LOCAL])
    assert sorted(cwd.rglob("*")) == before


def test_two_runs_are_compared_by_their_configurations(capsys: Capsys) -> None:
    assert main(["launch", *LOCAL, "training.run.name=second", "training.trainer.max_steps=7"]) == 0
    capsys.readouterr()
    assert main(["diff", "gpt3_tiny", "second"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "+++ results/second/launches/1/root_config.yaml"
    assert {"-    max_steps: 300", "+    max_steps: 7"} <= set(lines)
    assert main(["diff", "second", "second"]) == 0
