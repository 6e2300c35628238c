"""`slipway image prune` removes the images that nobody needs, and none that a live run uses."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.cli.options import parse_age
from launcher.errors import UserError
from launcher.images.pruning import ImageUse, PruneRules, decide, decide_leftovers, remove
from launcher.images.scratch import lock_image
from launcher.images.store import RecipeOrigin, Sidecar, Stored, list_images, read_stored, sidecar_path
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.provenance import host

Capsys = pytest.CaptureFixture[str]

DAY = 86400.0
NOW = 1000 * DAY


def put(store: Path, name: str, *, record: bool = True, age: float = 0.0) -> Path:
    """Write a file of the store; its content does not matter."""
    image = store / name
    store.mkdir(exist_ok=True)
    image.write_bytes(b"x" * 100)
    if record:
        origin = RecipeOrigin("nemo", "run", "0" * 64)
        words = {"source": "a", "digest": None, "sha256": "", "size": 100, "compression": "lz4"}
        rest = {"squash_options": (), "block_size": 1, "created": "2026-11-21T12:00:00+00:00", "made_by": "x"}
        Sidecar(**words, **rest, recipe=origin).write(image)  # type: ignore[arg-type]

    os.utime(image, (NOW - age * DAY, NOW - age * DAY))
    return image


def removals(store: Path, uses: dict[Path, list[ImageUse]], rules: PruneRules) -> dict[str, bool]:
    choices = decide(list_images(store), uses, rules, NOW)
    return {choice.entry.path.name: choice.remove for choice in choices}


def test_images_that_runs_need_stay(tmp_path: Path) -> None:
    names = ("free", "ended", "live", "theirs")
    images = {name: put(tmp_path, f"{name}.sqsh", record=name != "theirs", age=40) for name in names}
    uses = {
        images["ended"]: [ImageUse("a", False, NOW - 35 * DAY)],
        images["live"]: [ImageUse("b", False, 0.0), ImageUse("c", True, 0.0)],
        images["theirs"]: [],
    }
    needed = {"ended.sqsh": False, "live.sqsh": False, "theirs.sqsh": False}
    assert removals(tmp_path, uses, PruneRules()) == {**needed, "free.sqsh": True}
    assert removals(tmp_path, uses, PruneRules(ended=True)) == {
        **needed,
        "free.sqsh": True,
        "ended.sqsh": True,
    }
    # The age of a used image is that of its last launch.
    old = PruneRules(ended=True, older_than=38 * DAY)
    assert removals(tmp_path, uses, old) == {**needed, "free.sqsh": True}
    assert removals(tmp_path, uses, PruneRules(older_than=41 * DAY)) == {**needed, "free.sqsh": False}
    reasons = {
        choice.entry.path.name: choice.why
        for choice in decide(list_images(tmp_path), uses, PruneRules(), NOW)
    }
    assert reasons["live.sqsh"] == "c waits or runs, or may"
    assert reasons["theirs.sqsh"] == "not made by slipway: it has no record"


def test_images_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.sqsh")
    assert removals(tmp_path, {}, PruneRules()) == {"a.sqsh": True}
    monkeypatch.setattr("os.getuid", lambda: 4321)
    assert removals(tmp_path, {}, PruneRules(ended=True)) == {"a.sqsh": False}


def test_the_newest_stay(tmp_path: Path) -> None:
    for days in (1, 2, 3):
        put(tmp_path, f"{days}.sqsh", age=days)
    assert removals(tmp_path, {}, PruneRules(keep=2)) == {"1.sqsh": False, "2.sqsh": False, "3.sqsh": True}


@pytest.mark.parametrize(("text", "seconds"), [("30d", 30 * DAY), ("12h", DAY / 2), ("2w", 14 * DAY)])
def test_ages_are_parsed(text: str, seconds: float) -> None:
    assert parse_age(text, "--older-than") == seconds


@pytest.mark.parametrize("text", ["30", "d", "", "-1d", "3 d", "1y", "١d"])
def test_a_wrong_age_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not an age"):
        parse_age(text, "--older-than")


def test_an_image_being_imported_stays(tmp_path: Path) -> None:
    store = tmp_path / "images"
    entry = read_stored(put(store, "a.sqsh"))
    assert isinstance(entry, Stored)
    with lock_image(entry.path, lambda _: None), pytest.raises(UserError, match="imports it just now"):
        remove(entry)
    assert entry.path.exists() and sidecar_path(entry.path).exists()
    remove(entry)
    assert list(store.iterdir()) == []


def test_a_replaced_file_is_removed_when_no_job_may_have_it_open(tmp_path: Path) -> None:
    image = put(tmp_path, "a.sqsh")
    old = put(tmp_path, ".a.sqsh.old-0123456789ab", record=False)
    put(tmp_path, ".a.sqsh.lock", record=False)
    for is_live in (True, False):
        (choice,) = decide_leftovers(tmp_path, {image: [ImageUse("b", is_live, 0.0)]})
        assert (choice.entry.path, choice.remove) == (old, not is_live)


def test_a_partial_file_is_removed_when_nobody_imports(tmp_path: Path) -> None:
    store = tmp_path / "images"
    partial = put(store, ".a.sqsh.tmp-0123456789ab", record=False)
    (store / ".a.sqsh.lock").touch()  # an import leaves its lock too
    with lock_image(store / "a.sqsh", lambda _: None):
        (choice,) = decide_leftovers(store, {})
        assert not choice.remove and "just now" in choice.why
        with pytest.raises(UserError, match="just now"):
            remove(choice.entry)
    (choice,) = decide_leftovers(store, {})
    assert (choice.entry.path, choice.remove) == (partial, True)
    remove(choice.entry)
    assert list(store.iterdir()) == []


def write_launch(tree: Path, name: str, image: Path, job: str, machine: str) -> Path:
    directory = tree / name / "launches" / "1"
    directory.mkdir(parents=True)
    values: dict[str, Any] = dict.fromkeys(("stage", "engine", "job_name", "version", "user"), "x")
    values |= {"run": name, "launch": 1, "tag": name, "created": "2026-11-21T12:00:00Z", "scheduler": "local"}
    values |= {"nodes": 1, "tasks_per_node": 1, "time_limit": None, "choices": {}, "command": []}
    write_manifest(directory, Manifest(**values, overrides=[], image=str(image), job_id=job, host=machine))
    return directory


@pytest.fixture
def process(tmp_path: Path) -> Iterator[int]:
    """A process that is the job of the run `running`, as this machine sees it."""
    script = tmp_path / "results" / "running" / "launches" / "1" / "x_submission.sh"
    with subprocess.Popen([sys.executable, "-c", "input()", script], stdin=subprocess.PIPE) as job:
        yield job.pid
        job.kill()


def test_prune_asks_and_removes(
    tmp_path: Path, process: int, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, tree = tmp_path / "images", tmp_path / "results"
    images = {name: put(store, f"{name}.sqsh") for name in ("free", "ended", "running", "elsewhere")}
    ended = str(2**22 + 1)  # beyond Linux' largest process id
    write_launch(tree, "ended", images["ended"], ended, host())
    write_launch(tree, "running", images["running"], str(process), host())
    write_launch(tree, "elsewhere", images["elsewhere"], "1", "another.machine")
    command = ["image", "prune", "--images-dir", str(store)]

    assert main([*command, "--dry-run", "--json"]) == 0
    entries = {Path(entry["path"]).stem: entry for entry in json.loads(capsys.readouterr().out)}
    assert {name for name, entry in entries.items() if entry["remove"]} == {"free"}
    assert "running waits or runs" in entries["running"]["why"] and not entries["free"]["removed"]

    assert main(command) == 2
    printed = capsys.readouterr()
    assert "1 of 4 to remove: 100 bytes" in printed.out and "--yes" in printed.err
    assert all(image.exists() for image in images.values())

    # The command asks on a terminal; anything but a yes is a no.
    for reply, code in (("\n", 2), ("yes\n", 0)):
        terminal = io.StringIO(reply)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        assert main(command) == code
        assert "remove 1? [y/N]" in capsys.readouterr().out
        assert images["free"].exists() == (code != 0)

    assert main([*command, "--ended", "--yes"]) == 0
    remaining = {path.name for path in store.iterdir()}
    assert remaining == {
        name for stem in ("running", "elsewhere") for name in (f"{stem}.sqsh", f"{stem}.sqsh.json")
    }
    capsys.readouterr()


def test_an_image_launched_during_the_question_stays(
    tmp_path: Path, process: int, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images = {name: put(tmp_path / "images", f"{name}.sqsh") for name in ("free", "running")}

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
            write_launch(tmp_path / "results", "running", images["running"], str(process), host())
            return "y\n"

    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["image", "prune", "--images-dir", str(tmp_path / "images")]) == 1
    assert (images["free"].exists(), images["running"].exists()) == (False, True)
    assert "running.sqsh: needed just now; it stays" in capsys.readouterr().err


def test_wrong_options_are_refused_and_an_empty_store_is_not(tmp_path: Path, capsys: Capsys) -> None:
    assert main(["image", "prune", "--images-dir", str(tmp_path / "none")]) == 0
    assert "there is no image in" in capsys.readouterr().err
    assert main(["image", "prune", "--images-dir", str(tmp_path), "--keep", "-1"]) == 2
    assert main(["image", "prune", "--images-dir", str(tmp_path), "--older-than", "soon"]) == 2
    assert "30d" in capsys.readouterr().err
