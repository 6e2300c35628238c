"""`slipway resume` launches again what the newest launch of a run was."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.runs import paths
from launcher.runs.manifest import Manifest, read_manifest

Capsys = pytest.CaptureFixture[str]

LOCAL = [
    "cluster=local",
    "cluster.python=/bin/true",
    "training=gpt3/tiny",
    "training.run.dependency=null",
    "training.model.data.data_impl=mock",
]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was launched in a directory, with a tree of its own; the caller stands in another one."""
    own = tmp_path / "there/own/training/mine"
    own.mkdir(parents=True)
    (own / "small.yaml").write_text(
        "defaults:\n  - /training/gpt3/tiny@_here_\n  - _self_\nrun: {name: small}\n"
    )
    monkeypatch.chdir(tmp_path / "there")
    words = [word.replace("gpt3/tiny", "mine/small") for word in LOCAL]
    words += ["--config-dir", "own", "training.trainer.max_steps=300", "--no-check", "layout.gpus"]
    monkeypatch.setattr(sys, "argv", ["slipway", "launch", *words])  # what is on record
    assert main(sys.argv[1:]) == 0
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(paths, "typed_in", None)
    return tmp_path / "there/results/small"


def manifest(run_dir: Path, number: int) -> Manifest:
    return read_manifest(run_dir / f"launches/{number}")


def test_overrides_trees_and_directory_are_those_on_record(launched: Path, capsys: Capsys) -> None:
    capsys.readouterr()
    assert main(["resume", str(launched), "training.trainer.max_steps=400", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"] == str(launched)
    first, second = manifest(launched, 1), manifest(launched, 2)
    kept = [text for text in first.overrides if "max_steps" not in text]
    assert second.overrides == [*kept, "training.trainer.max_steps=400"]
    # The record is the whole command, which a third launch begins with, and a user can paste.
    assert second.command[1:] == [
        "launch", *second.overrides, "--config-dir=own", "--no-check=layout.gpus",
    ]  # fmt: skip
    assert main(["resume", "small"]) == 0
    assert manifest(launched, 3).overrides == second.overrides
    assert manifest(launched, 3).command == second.command


def test_a_dry_run_writes_nothing(launched: Path, capsys: Capsys) -> None:
    capsys.readouterr()
    assert main(["resume", str(launched), "--dry-run", "training.run.time_limit=1:02:03"]) == 0
    output = capsys.readouterr()
    assert "#!/bin/bash" in output.out
    assert re.search(r"^\+ +time_limit: .*1:02:03", output.err, re.MULTILINE)
    assert "slipway: what would be launched now differs, as above, from launch 1; a dry run" in output.err
    assert main(["resume", str(launched), "--dry-run"]) == 0
    same = "slipway: what would be launched now is the same as launch 1; a dry run looks at no"
    assert capsys.readouterr().err.startswith(same)
    assert [path.name for path in (launched / "launches").iterdir()] == ["1"]


def test_a_run_that_was_moved_is_resumed_where_it_is(launched: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere/small"
    moved.parent.mkdir()
    launched.rename(moved)
    assert main(["resume", str(moved)]) == 0
    assert manifest(moved, 2).overrides[-1] == f"base_results_dir='{moved.parent}'"
    assert not launched.exists()


def test_what_others_could_have_written_is_not_launched(launched: Path, capsys: Capsys) -> None:
    (launched / "launches/1/launcher.json").chmod(0o666)
    assert main(["resume", str(launched)]) == 2
    message = capsys.readouterr().err
    assert "is not trusted: everybody may write" in message
    assert "launcher_cmd.log" in message


def test_a_secret_is_asked_for_again(launched: Path, capsys: Capsys) -> None:
    path = launched / "launches/1/launcher.json"
    content = json.loads(path.read_text())
    content["overrides"].append("env_vars.HF_TOKEN=***")
    path.write_text(json.dumps(content))
    assert main(["resume", str(launched)]) == 2
    assert "env_vars.HF_TOKEN: a secret, which is not on record" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["nope", "training=gpt3/tiny"])
def test_what_is_no_run_is_refused(launched: Path, word: str, capsys: Capsys) -> None:
    assert main(["resume", word]) == 2
    assert "there is no run" in capsys.readouterr().err
