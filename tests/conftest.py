"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

pytest_plugins = ["tests.sandbox.fixtures"]

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the golden scripts anew")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


_CACHES = count()


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The index of runs lies here, and never where the user's own is."""
    directory = tmp_path_factory.mktemp("caches")
    before = os.environ.get("SLIPWAY_CACHE_DIR")
    os.environ["SLIPWAY_CACHE_DIR"] = str(directory / "session")
    yield directory
    if before is None:
        del os.environ["SLIPWAY_CACHE_DIR"]
    else:
        os.environ["SLIPWAY_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def cache_dir(caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has an index of its own; the directory is made by whoever remembers something."""
    directory = caches / str(next(_CACHES))
    monkeypatch.setenv("SLIPWAY_CACHE_DIR", str(directory))
    monkeypatch.delenv("SLIPWAY_RESULTS_DIR", raising=False)
    return directory
