"""Preparations that are killed and continued."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.corpus.killing import KILLS_OF_EACH_PHASE
from tests.corpus.preparing import configuration, write_configuration, write_sources

REPOSITORY = Path(__file__).parents[2]
KILLS = 200
MEMORY = Path("/dev/shm")


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """Yield a directory in memory, where syncing a file to disk takes no time."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        yield Path(directory)


def test_results_are_the_same_after_200_kills(fast_path: Path) -> None:
    write_sources(fast_path / "in")
    node = configuration(
        fast_path,
        fast_path / "in",
        fast_path / "out" / "bpe",
        deduplicate={"exact": True},
        splits={"train": 0.9, "test": 0.1},
        shard_bytes=8192,
    )
    command = [sys.executable, "-m", "tests.corpus.killing", str(fast_path / "out"), str(fast_path / "log")]
    command += [str(KILLS), *write_configuration(fast_path, node)]
    scratch = fast_path / "tmp"  # where a killed process leaves its temporary files
    scratch.mkdir()
    env = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert sum(report["kills"].values()) >= KILLS
    assert min(report["kills"].values()) >= KILLS_OF_EACH_PHASE
    assert set(report["kills"]) == {"fetch", "tokenize", "merge"}
    assert report["completed"] > 0
    assert report["leftovers"] == []
