"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["tests.sandbox.fixtures"]

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the golden scripts anew")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY
