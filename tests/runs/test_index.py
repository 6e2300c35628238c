"""The index of runs is a cache: nothing that happens to it is an error, or loses a run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from launcher.runs import index as places
from launcher.runs.index import FILE_NAME, Entry, Index, NotTrusted, cache_directory, entry_of
from launcher.runs.manifest import Manifest, write_manifest


def launch_entry(tree: Path, run: str = "a", number: int = 1, **changes: str | None) -> Entry:
    """Write a launch to disk; return its entry for the index."""
    manifest = Manifest(
        run=run,
        launch=number,
        tag=changes.pop("tag", None) or f"{tree.name}-{run}-{number}",
        stage="training",
        engine="megatron",
        scheduler="slurm",
        job_name="job",
        nodes=1,
        tasks_per_node=1,
        time_limit=None,
        command=[],
        overrides=[],
        choices={},
        created=changes.pop("created", None) or f"2026-11-21T12:00:{number:02}Z",
        version="0",
        user="u",
        host="h",
        job_id=changes.pop("job_id", None),
    )
    directory = tree / run / "launches" / str(number)
    directory.mkdir(parents=True)
    write_manifest(directory, manifest)
    return entry_of(tree / run, number, manifest, manifest.job_id)


def test_seen_runs_are_remembered(tmp_path: Path, cache_dir: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a tree of caf\xe9"))
    first, second = launch_entry(odd, job_id="17"), launch_entry(odd, number=2)
    Index().remember([first, second])
    Index().remember([first])
    assert Index().entries() == [first, second]
    assert Index().with_job("17") == [first]
    assert Index().trees() == [odd]
    assert cache_dir.stat().st_mode & 0o777 == 0o700


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path, cache_dir: Path) -> None:
    entry = launch_entry(tmp_path)
    Index().remember([entry], [tmp_path])
    file = cache_dir / FILE_NAME
    os.utime(file, (1, 1))
    Index().remember([entry], [tmp_path])
    assert file.stat().st_mtime == 1
    changed = replace(entry, job_id="18")
    Index().remember([changed])
    assert Index().entries() == [changed]


def test_copy_does_not_replace_a_launch_that_is_still_there(tmp_path: Path) -> None:
    entry = launch_entry(tmp_path / "x", tag="t")
    copy = launch_entry(tmp_path / "y", tag="t")
    Index().remember([entry])
    Index().remember([copy])
    assert Index().entries() == [entry]
    (tmp_path / "x").rename(tmp_path / "z")
    Index().remember([copy])
    assert Index().entries() == [copy]


def test_a_launch_and_a_tree_are_forgotten(tmp_path: Path) -> None:
    remaining, forgotten = launch_entry(tmp_path / "x"), launch_entry(tmp_path / "y")
    Index().remember([remaining, forgotten])
    Index().forget([forgotten.run_dir], [forgotten.run_dir.parent])
    assert (Index().entries(), Index().trees()) == ([remaining], [remaining.run_dir.parent])


OTHERS = ("[]", "17", '{"trees": [], "launches": [{"tag": "t"}], "silent": {}}', "{}", "[" * 100_000)


@pytest.mark.parametrize("how", ["deleted", "garbage", "cut", "empty", "a directory", *OTHERS])
def test_broken_index_is_made_anew(tmp_path: Path, cache_dir: Path, how: str) -> None:
    entries = [launch_entry(tmp_path, number=number) for number in range(1, 50)]
    Index().remember(entries)
    file = cache_dir / FILE_NAME
    content = file.read_bytes()
    file.unlink()
    if how == "garbage":
        file.write_bytes(b"no JSON" * 1000)
    elif how == "cut":
        file.write_bytes(content[:5000])
    elif how == "empty":
        file.touch()
    elif how == "a directory":
        file.mkdir()
    elif how in OTHERS:
        file.write_text(how)
    assert Index().entries() == []
    Index().remember(entries)
    assert Index().entries() == ([] if how == "a directory" else entries)


def test_odd_manifests_are_no_errors(tmp_path: Path) -> None:
    entry = launch_entry(tmp_path)
    odd = [
        replace(entry, tag="\ud800 is no letter"),
        replace(entry, tag="big", number=10**30),
        replace(entry, tag="nul", run="a\0b"),
    ]
    Index().remember(odd)
    assert Index().entries() == sorted(odd, key=lambda item: item.tag)


def test_locked_index_is_read_and_what_is_new_is_lost(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.runs.index._LOCK_SECONDS", 0.05)
    entry, other = launch_entry(tmp_path), launch_entry(tmp_path, number=2)
    Index().remember([entry])
    with FileLock((cache_dir / FILE_NAME).with_suffix(".lock")):
        index = Index()
        index.remember([other])
        assert index.entries() == Index().entries() == [entry]
    Index().remember([other])
    assert Index().entries() == [entry, other]


def test_twenty_processes_write_at_once(tmp_path: Path, cache_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from launcher.runs.index import Entry, Index\n"
        "who, tree = sys.argv[1:]\n"
        "for n in range(5):\n"
        "    entry = Entry(f'{who}-{n}', 'r', Path(tree, who), n, None, 'slurm', None, 'u', '2026')\n"
        "    Index().remember([entry])\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, f"p{n}", tmp_path], stderr=subprocess.PIPE)
        for n in range(20)
    ]
    assert [process.communicate()[1] for process in started] == [b""] * 20
    assert len(Index().entries()) == 100


# the directory of the index


def test_the_users_own_directory_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLIPWAY_CACHE_DIR")
    monkeypatch.setattr(places, "_SHARED", tmp_path)
    assert cache_directory() == tmp_path / f"slipway-{os.geteuid()}"
    assert cache_directory().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["link", "file", "dangling link", "open to others", "another's"])
def test_index_that_others_may_have_put_there_is_not_used(
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
    index = Index()
    index.remember([launch_entry(tmp_path / "results")])
    assert index.entries() == []
    assert index.trouble is not None and "slipway-" in index.trouble
    assert not victim.exists() or not list(victim.iterdir())


def test_unwritable_disk_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = launch_entry(tmp_path)
    for place in ("/proc/nowhere", "/dev/null/x", f"/tmp/{'x' * 300}"):
        monkeypatch.setenv("SLIPWAY_CACHE_DIR", place)
        index = Index()
        index.remember([entry])
        assert (index.entries(), index.trouble) == ([], None)


def test_full_disk_is_no_error(tmp_path: Path, cache_dir: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    program = (
        "import resource, signal; from pathlib import Path; from launcher.runs.index import Entry, Index\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "many = [Entry(f't{n}', 'r', Path('/x'), n, None, 'slurm', None, 'u', '2026') for n in range(9999)]\n"
        "Index().remember(many); print(len(Index().entries()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
    entry = launch_entry(tmp_path)
    Index().remember([entry])
    assert Index().entries() == [entry]
