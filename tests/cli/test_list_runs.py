"""`slipway list runs` and `slipway list --all`: the runs on disk, without asking a scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.runs.manifest import Manifest, write_manifest

Capsys = pytest.CaptureFixture[str]


def launch(run_dir: Path, number: int = 1, **changes: Any) -> None:
    directory = run_dir / "launches" / str(number)
    directory.mkdir(parents=True)
    values: dict[str, Any] = {
        "run": run_dir.name,
        "launch": number,
        "tag": f"{run_dir}-{number}",
        "created": f"2026-11-21T12:00:{number:02}Z",
        "user": "ada",
        "job_id": str(number),
        "scheduler": "slurm",
    }
    texts = ("stage", "engine", "job_name", "version", "host")
    rest: dict[str, Any] = {"nodes": 1, "tasks_per_node": 1, "time_limit": None, "choices": {}}
    rest |= dict.fromkeys(texts, "x") | {"command": [], "overrides": []}
    write_manifest(directory, Manifest(**(rest | values | changes)))


def list_rows(capsys: Capsys, *arguments: object) -> list[dict[str, Any]]:
    assert main(["list", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_runs_shows_the_runs_of_one_tree(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launch(tmp_path / "results" / "old", created="2026-11-20T12:00:00Z", job_id=None, user="grace")
    launch(tmp_path / "results" / "new")
    launch(tmp_path / "results" / "new", 2)
    assert main(["list", "runs"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["RUN", "LAUNCHES", "LAST", "LAUNCHED", "USER", "JOB", "IN"]
    assert [(line[0], line[1], line[-3], line[-2], line[-1]) for line in lines[1:]] == [
        ("new", "2", "ada", "2", "results"),
        ("old", "1", "grace", "-", "results"),
    ]


def test_newest_runs_are_named_where_a_run_is_missing(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("oldest", "old", "new", "newest"), 1):
        launch(tmp_path / "results" / name, created=f"2026-11-2{number}T12:00:00Z")
        os.utime(tmp_path / "results" / name / "launches" / "1", (number, number))
    for line in ("resume", "logs", "convert"):
        assert main([line]) == 2
        assert "the newest in results: newest, new, old\n" in capsys.readouterr().err


def test_list_all_shows_the_runs_of_all_known_trees(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = {name: tmp_path / name for name in ("here", "seen", "always", "never")}
    for name, tree in trees.items():
        launch(tree / f"run_{name}", user=name)
    monkeypatch.setenv("SLIPWAY_RESULTS_DIR", str(trees["always"]))
    assert main(["history", str(trees["seen"] / "run_seen"), "--launch", "1"]) == 0
    capsys.readouterr()
    rows = list_rows(capsys, "--all", "--base-results-dir", trees["here"])
    assert {row["run"]: (row["tree"], row["user"]) for row in rows} == {
        f"run_{name}": (str(trees[name]), name) for name in ("here", "seen", "always")
    }
    assert [row["run"] for row in list_rows(capsys, "runs", "--base-results-dir", trees["here"])] == [
        "run_here"
    ]


def test_missing_runs_and_mistakes_are_explained(tmp_path: Path, capsys: Capsys) -> None:
    assert list_rows(capsys, "--all", "--base-results-dir", tmp_path) == []
    assert main(["list", "--all", "--base-results-dir", str(tmp_path)]) == 0
    assert "no run was launched in the known directories yet" in capsys.readouterr().err
    assert main(["list", "training", "--all"]) == 2
    assert "slipway list --all" in capsys.readouterr().err


def test_a_cache_that_others_may_write_is_reported(tmp_path: Path, cache_dir: Path, capsys: Capsys) -> None:
    launch(tmp_path / "a")
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    assert main(["list", "runs", "--base-results-dir", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[1].startswith("a ")
    assert "can be written by others" in output.err
    assert main(["history", str(tmp_path / "a"), "--launch", "1"]) == 0
    assert "can be written by others" in capsys.readouterr().err


def test_runs_need_no_hydra_and_no_slurm(tmp_path: Path) -> None:
    launch(tmp_path / "a")
    program = (
        "import sys\nfrom launcher.cli.app import main\n"
        f"main(['list', '--all', '--base-results-dir', {str(tmp_path)!r}])\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "\na " in done.stdout
    loaded = set(done.stderr.split())
    assert not {"hydra", "omegaconf", "pydantic", "submitit", "rich", "launcher.schedulers.slurm"} & loaded


def test_the_newest_twenty_are_listed(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(23):
        launch(tmp_path / f"results/run{number:02}", created=f"2026-11-21T12:{number:02}:00Z")
    assert main(["list", "runs"]) == 0
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()[1:]] == [
        f"run{number:02}" for number in range(22, 2, -1)
    ]
    assert "3 older runs: slipway list --all" in output.err
    assert main(["list", "--all"]) == 0
    assert "run00" in capsys.readouterr().out
    assert len(list_rows(capsys, "runs")) == 23
