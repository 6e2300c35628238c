"""`slipway clean` removes what nobody needs, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.jobs import cleaning

Capsys = pytest.CaptureFixture[str]

LOCAL = [
    "cluster=local",
    "training=gpt3/tiny",
    "training.run.dependency=null",
    "training.model.data.data_impl=mock",
]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def launch(name: str, *words: str, python: str = "/bin/true") -> None:
    assert main(["launch", *LOCAL, f"training.run.name={name}", f"cluster.python={python}", *words]) == 0


def ended(run_dir: Path) -> None:
    """Wait for the end of a local job."""
    for _ in range(200):
        if not any(item.may_live for item in cleaning.current_statuses([cleaning.RunRef(run_dir)])):
            return
        time.sleep(0.05)
    raise AssertionError


@pytest.fixture
def run_dir(tree: Path) -> Path:
    """A run with checkpoints of the steps 10, 20, 30, 40 and a damaged one of step 50."""
    launch("a")
    for serial, step in enumerate((10, 20, 30, 40, 50), start=1):
        path = tree / f"a/checkpoints/megatron_gpt--step={step}"
        path.mkdir(parents=True)
        (path / "part").write_text("x" * 1000)
        files = {"part": 1000 if step < 50 else 2000}
        (path / "complete.json").write_text(json.dumps({"step": step, "serial": serial, "files": files}))
    ended(tree / "a")
    return tree / "a"


def steps(run_dir: Path) -> list[int]:
    paths = (run_dir / "checkpoints").glob("megatron_gpt*")
    return sorted(int(path.name.rpartition("=")[2]) for path in paths)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], [10, 20, 30, 40, 50]),
        (["--keep-last", "1"], [40, 50]),
        (["--keep-last", "2"], [30, 40, 50]),
        (["--keep-every", "20"], [20, 40, 50]),
        (["--keep-every", "1000"], [40, 50]),
        (["--keep-every", "10", "--keep-last", "1"], [10, 20, 30, 40, 50]),
        (["--keep-last", "1", "--dry-run"], [10, 20, 30, 40, 50]),
    ],
)
def test_checkpoints_are_thinned(run_dir: Path, options: list[str], left: list[int]) -> None:
    assert main(["clean", "a", *options, "--yes"]) == 0
    assert steps(run_dir) == left
    assert not list((run_dir / "checkpoints").glob(".removing*"))


def test_what_is_used_stays(run_dir: Path, capsys: Capsys) -> None:
    (run_dir / "checkpoints/best").symlink_to("megatron_gpt--step=10")
    checkpoint = f"{run_dir}/checkpoints/megatron_gpt--step=20"
    launch("b", f"training.restore_from_path='{checkpoint}'")
    ended(run_dir.parent / "b")
    assert main(["clean", "a", "--keep-last", "1", "--yes"]) == 0
    assert steps(run_dir) == [10, 20, 40, 50]
    output = capsys.readouterr().out
    assert all(why in output for why in ("best leads to it", "launch 1 of b uses it", "damaged: part has"))
    assert main(["clean", "a", "--remove", "--yes"]) == 2
    assert "launch 1 of b uses its files" in capsys.readouterr().err
    assert steps(run_dir) == [10, 20, 40, 50]


def test_the_newest_goes_with_its_run(run_dir: Path, capsys: Capsys) -> None:
    assert main(["clean", "a", "--remove", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "stays" not in output
    assert "goes with the run" in output
    assert output.endswith("remove 1 run\n")


def test_a_run_is_archived_and_removed(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "outside").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("x")
    assert main(["clean", "a", "--archive", "old", "--remove", "--yes"]) == 0
    assert not run_dir.exists()
    assert not list(run_dir.parent.glob(".*"))
    assert (tmp_path / "precious/file").exists()
    with tarfile.open(tmp_path / "old/a.tar") as packed:
        names = packed.getnames()
    assert {"a/launches/1/launcher.json", "a/checkpoints/megatron_gpt--step=40/part", "a/outside"} <= {*names}
    assert "a/outside/file" not in names
    launch("a")
    ended(run_dir)
    assert main(["clean", "a", "--archive", "old", "--remove", "--yes"]) == 2  # the first archive stays
    assert run_dir.exists()


def test_nobody_to_ask_is_no_consent(run_dir: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["clean", "a", "--remove"]) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdin, "readline", lambda: "n\n")
    assert main(["clean", "a", "--remove"]) == 2
    assert run_dir.exists()


def test_a_run_that_is_none_of_ours_is_left_alone(
    run_dir: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(run_dir)
    assert main(["clean", str(tmp_path / "link"), "--remove", "--yes"]) == 2
    assert "a link to a run, which is left alone" in capsys.readouterr().err
    monkeypatch.setattr("launcher.jobs.cleaning.is_own", lambda path: False)
    assert main(["clean", str(run_dir), "--remove", "--yes"]) == 2
    assert "another user's run, which is left alone" in capsys.readouterr().err
    assert run_dir.is_dir()


def test_a_run_under_way_is_refused(tree: Path, tmp_path: Path, capsys: Capsys) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text('#!/bin/sh\ncase "$*" in *pretrain*) exec sleep 60 ;; esac\n')
    sleeper.chmod(0o755)
    launch("a", python=str(sleeper))
    assert main(["clean", "a", "--remove", "--yes"]) == 2
    assert "slipway cancel results/a --wait" in capsys.readouterr().err
    assert main(["cancel", "a", "--wait"]) == 0
    assert main(["clean", "a", "--remove", "--yes"]) == 0
    assert not (tree / "a").exists()


def test_links_out_of_the_run_are_not_followed(run_dir: Path, tmp_path: Path, capsys: Capsys) -> None:
    (run_dir / "checkpoints").rename(tmp_path / "scratch")
    (run_dir / "checkpoints").symlink_to(tmp_path / "scratch")
    assert main(["clean", "a", "--keep-last", "1", "--yes"]) == 2
    assert "leads out of the run" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(run_dir)
    assert main(["clean", "link", "--remove", "--yes"]) == 2
    assert steps(run_dir) == [10, 20, 30, 40, 50]


def test_a_removal_that_was_killed_is_finished_by_the_next(run_dir: Path) -> None:
    """Whenever the process dies, a checkpoint is there as a whole, or no checkpoint any more."""
    program = (
        "import os, shutil, sys; from pathlib import Path; from launcher.jobs import cleaning\n"
        "shutil.rmtree = lambda path: os._exit(9)\n"
        "cleaning.remove(Path(sys.argv[1]))"
    )
    for name in ("checkpoints/megatron_gpt--step=10", "."):
        done = subprocess.run([sys.executable, "-c", program, run_dir / name], check=False)
        assert done.returncode == 9
    assert not run_dir.exists()
    assert main(["status", "a"]) == 2
    shutil.copytree(next(run_dir.parent.glob(".removing-*/a")), run_dir, symlinks=True)
    assert steps(run_dir) == [20, 30, 40, 50]
    assert main(["clean", "a", "--keep-last", "2", "--yes"]) == 0
    assert not list((run_dir / "checkpoints").glob(".removing*"))
    assert main(["clean", "a", "--remove", "--yes"]) == 0
    assert not list(run_dir.parent.glob(".removing*"))


def test_other_engines_checkpoints(run_dir: Path, capsys: Capsys) -> None:
    path = run_dir / "launches/1/launcher.json"
    shutil.rmtree(run_dir / "checkpoints")
    for engine, names, tracker in (
        ("nemo", ["gpt--step=10.ckpt", "gpt--step=20.ckpt", "gpt--step=20-last.ckpt"], ""),
        ("megatron_lm", ["iter_0000010", "iter_0000020", "iter_0000030"], "20"),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), "engine": engine}))
        for name in names:
            (run_dir / "checkpoints" / name).mkdir(parents=True)
        if tracker:
            (run_dir / "checkpoints/latest_checkpointed_iteration.txt").write_text(tracker)
        assert main(["clean", "a", "--keep-last", "1", "--yes"]) == 0
        left = {path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir()}
        assert left == set(names[1:])
        shutil.rmtree(run_dir / "checkpoints")
