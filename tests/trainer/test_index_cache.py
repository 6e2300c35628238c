"""Sample indices that are kept between launches: they are never stale, and never stop a training."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipway.trainer.data import index_cache
from slipway.trainer.data.index import SampleIndex, Split, Weights
from slipway.trainer.data.index_cache import IndexCache

pytestmark = pytest.mark.trainer

WEIGHTS: Weights = (90.0, 10.0, 0.0)


class Disk:
    """A data set, a cache beside it, and how often an index was computed."""

    def __init__(self, directory: Path) -> None:
        self.prefix, self.cache, self.builds = directory / "data", directory / "cache", 0
        self.write(b"one")

    def write(self, content: bytes) -> None:
        Path(f"{self.prefix}.idx").write_bytes(content)

    def build(self) -> SampleIndex:
        self.builds += 1
        tokens = int.from_bytes(Path(f"{self.prefix}.idx").read_bytes(), "big")
        return SampleIndex("uint16", tokens, (Split(1, 0, tokens), Split(0, tokens, 0), Split(0, tokens, 0)))

    def get(self, weights: Weights = WEIGHTS) -> SampleIndex:
        index = IndexCache(self.cache).get(self.prefix, weights, self.build)
        assert index.tokens == int.from_bytes(Path(f"{self.prefix}.idx").read_bytes(), "big")
        return index


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every file as written long ago; change times cannot be set back."""
    monkeypatch.setattr(index_cache, "_RESTED_SECONDS", -10.0)


def test_an_index_is_computed_once(disk: Disk) -> None:
    assert disk.get() == disk.get()
    assert disk.builds == 1
    assert [path.name[:13] for path in disk.cache.iterdir()] == ["sample-index-"]
    disk.get((80.0, 10.0, 10.0))
    assert disk.builds == 2


@pytest.mark.usefixtures("old_files")
def test_unchanged_file_is_hashed_once(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.get()
    monkeypatch.setattr(hashlib, "file_digest", None)
    disk.get()
    assert disk.builds == 1
    assert sorted(path.name.rsplit("-", 1)[0] for path in disk.cache.iterdir()) == [
        "idx-hash",
        "sample-index",
    ]


def test_fresh_file_is_hashed_again(disk: Disk, monkeypatch: Any) -> None:
    disk.get()
    # A second write within one tick of the clock leaves the same size and the same times.
    monkeypatch.setattr(index_cache, "_identity", lambda status: [1, 2, 3, 4])
    disk.write(b"two")
    disk.get()
    assert disk.builds == 2


@pytest.mark.usefixtures("old_files")
def test_a_file_that_changed_and_looks_the_same_is_read_again(disk: Disk) -> None:
    path = Path(f"{disk.prefix}.idx")
    disk.get()
    before = path.stat()
    disk.write(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    disk.get()
    assert disk.builds == 2
    disk.write(b"one")
    disk.get()
    assert disk.builds == 2


@pytest.mark.usefixtures("old_files")
def test_a_file_that_changes_while_it_is_indexed_leaves_nothing_wrong_behind(disk: Disk) -> None:
    def build() -> SampleIndex:
        disk.write(b"two!")
        return disk.build()

    IndexCache(disk.cache).get(disk.prefix, WEIGHTS, build)
    disk.write(b"one")
    disk.get()
    assert disk.builds == 2


def test_a_copy_under_another_name_shares_the_index(disk: Disk) -> None:
    disk.get()
    Path(f"{disk.prefix}.idx").rename(disk.prefix.with_name("copy.idx"))
    disk.prefix = disk.prefix.with_name("copy")
    disk.get()
    assert disk.builds == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": {}}', b"\xff\xfe", b"null"])
@pytest.mark.usefixtures("old_files")
def test_spoiled_file_is_rebuilt(disk: Disk, content: bytes) -> None:
    disk.get()
    for path in disk.cache.iterdir():
        path.write_bytes(content)
    disk.get()
    assert disk.builds == 2
    disk.get()
    assert disk.builds == 2


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"uint16"', '"object"'),
        ('"uint16"', '"of mine"'),
        ('"start": 0', '"start": -1'),
        (', {"doc', '], [{"doc'),
    ],
)
@pytest.mark.usefixtures("old_files")
def test_impossible_index_is_rebuilt(disk: Disk, old: str, new: str) -> None:
    disk.get()
    (path,) = disk.cache.glob("sample-index-*")
    text = json.dumps(json.loads(path.read_text()))
    assert old in text
    path.write_text(text.replace(old, new, 1))
    disk.get()
    assert disk.builds == 2


def test_a_directory_that_cannot_be_written_costs_time_only(disk: Disk, caplog: Any) -> None:
    disk.cache.write_text("a file is in the way")
    disk.get()
    assert disk.builds == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"model.data.index_mapping_dir={disk.cache}" in caplog.text


@pytest.mark.usefixtures("old_files")
def test_a_full_disk_costs_time_only(disk: Disk, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    disk.get()
    assert list(disk.cache.iterdir()) == []
    assert len(caplog.records) == 1
    assert "sample indices are not kept: [Errno 28] No space left on device" in caplog.text


@pytest.mark.usefixtures("old_files")
def test_concurrent_readers_see_whole_files_only(disk: Disk, caplog: Any) -> None:
    def work(number: int) -> SampleIndex:
        if number % 5 == 0:
            for path in disk.cache.glob("*-*.json"):
                path.unlink(missing_ok=True)
        return disk.get()

    with ThreadPoolExecutor(8) as pool:
        indices = list(pool.map(work, range(200)))
    assert len(set(map(repr, indices))) == 1
    assert not caplog.records
    assert all(json.loads(path.read_text()) for path in disk.cache.iterdir())
    assert not list(disk.cache.glob(".*"))
