"""The remembered trees are a cache: nothing that happens to it is an error, or loses a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.runs import known_trees as places
from launcher.runs.known_trees import (
    FILE_NAME,
    NotTrusted,
    cache_directory,
    forget_trees,
    remember_trees,
    remembered_trees,
    why_not_remembered,
)


def test_seen_trees_are_remembered_in_their_order(tmp_path: Path, cache_dir: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a tree of caf\xe9\n"))
    remember_trees([tmp_path / "z"])
    remember_trees([odd, tmp_path / "z"])
    remember_trees(iter([tmp_path / "b"]))
    assert remembered_trees() == [tmp_path / "z", odd, tmp_path / "b"]
    assert cache_dir.stat().st_mode & 0o777 == 0o700
    forget_trees([odd, tmp_path / "unknown"])
    assert remembered_trees() == [tmp_path / "z", tmp_path / "b"]


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path, cache_dir: Path) -> None:
    remember_trees([tmp_path])
    file = cache_dir / FILE_NAME
    os.utime(file, (1, 1))
    remember_trees([tmp_path])
    forget_trees([tmp_path / "unknown"])
    assert file.stat().st_mtime == 1


OTHERS = ("[]", "17", '{"trees": []}', "null", "[" * 100_000, '"relative"', '"/cut')


@pytest.mark.parametrize("how", ["deleted", "garbage", "empty", "a directory", *OTHERS])
def test_broken_lines_are_passed_over(tmp_path: Path, cache_dir: Path, how: str) -> None:
    remember_trees([tmp_path / "a"])
    file = cache_dir / FILE_NAME
    file.unlink()
    if how == "garbage":
        file.write_bytes(b"no JSON \xff" * 1000)
    elif how == "empty":
        file.touch()
    elif how == "a directory":
        file.mkdir()
    elif how in OTHERS:
        file.write_text(how)
    assert remembered_trees() == []
    remember_trees([tmp_path / "a"])
    remember_trees([tmp_path / "b"])
    assert remembered_trees() == ([] if how == "a directory" else [tmp_path / "a", tmp_path / "b"])


def test_twenty_processes_write_at_once(tmp_path: Path, cache_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from launcher.runs.known_trees import remember_trees\n"
        "for n in range(5):\n"
        "    remember_trees([Path(sys.argv[1], str(n))])\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path / f"p{n}"], stderr=subprocess.PIPE)
        for n in range(20)
    ]
    assert [process.communicate()[1] for process in started] == [b""] * 20
    assert len(remembered_trees()) == 100


# the directory of the cache


def test_the_users_own_directory_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLIPWAY_CACHE_DIR")
    monkeypatch.setattr(places, "_SHARED", tmp_path)
    assert cache_directory() == tmp_path / f"slipway-{os.geteuid()}"
    assert cache_directory().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["link", "file", "dangling link", "open to others", "another's"])
def test_cache_that_others_may_have_put_there_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    monkeypatch.delenv("SLIPWAY_CACHE_DIR")
    monkeypatch.setattr(places, "_SHARED", tmp_path)
    place, victim = tmp_path / f"slipway-{os.geteuid()}", tmp_path / "victim"
    if how == "link":
        victim.mkdir(mode=0o700)
        place.symlink_to(victim)
    elif how == "file":
        place.touch()
    elif how == "dangling link":
        place.symlink_to(victim)
    elif how == "open to others":
        place.mkdir()
        place.chmod(0o777)
    else:
        place.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(place, 65534, 65534)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
            place.rename(tmp_path / "slipway-12345")
    with pytest.raises(NotTrusted, match="SLIPWAY_CACHE_DIR names another"):
        cache_directory()
    remember_trees([tmp_path / "results"])
    assert remembered_trees() == []
    assert "slipway-" in (why_not_remembered() or "")
    assert not victim.exists() or not list(victim.iterdir())


def test_unwritable_disk_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place in ("/proc/nowhere", "/dev/null/x", f"/tmp/{'x' * 300}"):
        monkeypatch.setenv("SLIPWAY_CACHE_DIR", place)
        remember_trees([tmp_path])
        assert (remembered_trees(), why_not_remembered()) == ([], None)


def test_full_disk_is_no_error(tmp_path: Path, cache_dir: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    program = (
        "import resource, signal; from pathlib import Path; from launcher.runs.known_trees import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "remember_trees([Path(f'/x/{n}') for n in range(9999)]); remember_trees([Path('/y')])\n"
        "forget_trees([Path('/x/0')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    remember_trees([tmp_path])
    assert remembered_trees()[-1] == tmp_path
    assert all(str(tree).startswith("/x/") for tree in remembered_trees()[:-1])
