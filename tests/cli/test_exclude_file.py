"""`slipway nodes --exclude`: the file of nodes that a team avoids."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from launcher.cli.app import main
from slipway.common.node.excluded import read_exclude_file

Capsys = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    """Run `slipway nodes`; return the exit code."""
    try:
        return int(main(["nodes", *words]) or 0)
    except SystemExit as end:
        return int(end.code or 0)


def test_last_line_of_a_node_counts(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "bad.tsv"
    add = ["--why", "Xid\t79\nagain", "--exclude-file", str(file)]
    assert run("--exclude", "n1", "--exclude", "n2", *add) == 0
    (first, second) = read_exclude_file(file, 4e9)
    assert (first.node, first.why, second.node) == ("n1", "Xid?79?again", "n2")
    assert "@" in first.job and first.job.endswith("Z"), "who, and when"
    assert run("--exclude", "n1", "--for", "2d", *add) == 0
    capsys.readouterr()
    assert run("--exclude", "n2", "--why", "new GPU", "--for", "0d", "--exclude-file", str(file)) == 0
    assert capsys.readouterr().out.startswith("n2 is excluded no longer: new GPU (")
    assert [node.node for node in read_exclude_file(file, 0.0)] == ["n1", "n2"]
    assert [node.node for node in read_exclude_file(file, 1.8e9)] in ([], ["n1"])
    assert len(file.read_text().splitlines()) == 4, "nothing is removed"
    capsys.readouterr()
    run("--exclude-file", str(file), "--base-results-dir", str(tmp_path))
    assert "n1 is excluded, and none of these runs used it: until 20" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--exclude", "n1"], "--exclude n1: which file?"),
        (["--exclude", "n[1-3]", "--exclude-file", "f", "--why", "x"], "n[1-3]: not the name of one node"),
        (["--exclude", "$(x)", "--exclude-file", "f", "--why", "x"], "$(x): not the name of one node"),
        (["--exclude", "n1", "--exclude-file", "f"], "--exclude n1: the others want to know the reason"),
        (["--exclude", "n1", "--exclude-file", "f", "--why", "x", "--for", "soon"], "--for soon: not an age"),
        (
            ["--exclude", "n1", "--exclude-file", "f", "--why", "x", "run"],
            "--exclude n1 run: it takes no run",
        ),
        (["--why", "x"], "--why: only with --exclude"),
        (["--since", "1y"], "--since 1y: not an age"),
        (["--exclude-file", "missing"], "--exclude-file missing: it cannot be read: no such file"),
        (["--exclude", "n1", "--exclude-file", ".", "--why", "x"], "it cannot be written: is a directory"),
        (
            ["--exclude", "n1", "--exclude-file", "pipe", "--why", "x"],
            "written: not a regular file",
        ),
    ],
)
def test_mistakes_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert run(*words) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_torn_line_does_not_hide_the_next(tmp_path: Path) -> None:
    file = tmp_path / "bad.tsv"
    file.write_text("n1\t99999999999\tada\tx\nn2\t9999")
    run("--exclude", "n3", "--why", "x", "--exclude-file", str(file))
    assert [node.node for node in read_exclude_file(file, 0.0)] == ["n1", "n3"]


def _write_many(file: Path, who: int) -> None:
    for number in range(25):
        run("--exclude", f"n{who}-{number}", "--why", "x", "--exclude-file", str(file))


def test_writers_at_once_lose_no_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.tsv"
    writers = [
        multiprocessing.get_context("fork").Process(target=_write_many, args=(file, who)) for who in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len({node.node for node in read_exclude_file(file, 0.0)}) == 100
