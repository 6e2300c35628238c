"""The versions of Python that `setup.cfg` claims, and the places that have to agree with it."""

from __future__ import annotations

import configparser
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def metadata(repository: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(repository / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def versions(metadata: configparser.ConfigParser) -> list[str]:
    """The versions of the classifiers, the oldest first."""
    return re.findall(
        r"^Programming Language :: Python :: (3\.\d+)$", metadata["metadata"]["classifiers"], re.M
    )


@pytest.fixture(scope="module")
def tools(repository: Path) -> dict[str, Any]:
    tables: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]
    return tables


def test_the_classifiers_leave_no_version_out(versions: list[str]) -> None:
    minors = [int(version.removeprefix("3.")) for version in versions]
    assert minors == list(range(minors[0], minors[0] + len(minors)))


def test_the_oldest_version_is_required(
    repository: Path, metadata: configparser.ConfigParser, versions: list[str]
) -> None:
    oldest = versions[0]
    assert metadata["options"]["python_requires"] == f">={oldest}"
    script = (repository / "scripts" / "venv.sh").read_text()
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in script
    assert f"Python {oldest} or newer" in script


def test_lint_holds_the_supervisor_to_its_oldest_python(repository: Path) -> None:
    recipe = (repository / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    (oldest,) = re.findall(r"/vermin --target=(\d\.\d+)- --violations .*\bslipway/supervisor ", recipe)
    main = (repository / "slipway" / "supervisor" / "__main__.py").read_text()
    assert f"sys.version_info < ({oldest.replace('.', ', ')}, " in main
    assert re.search(rf"Python {re.escape(oldest)}(\.\d+)? or newer", main)


def test_lint_checks_the_oldest_and_the_newest_version(
    repository: Path, versions: list[str], tools: dict[str, Any]
) -> None:
    assert tools["ruff"]["target-version"] == f"py{versions[0].replace('.', '')}"
    assert tools["mypy"]["python_version"] == versions[0]
    recipe = (repository / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert "/mypy\n" in recipe
    assert f"/mypy --python-version {versions[-1]}\n" in recipe


def test_the_documentation_lists_the_same_versions(repository: Path, versions: list[str]) -> None:
    page = (repository / "docs" / "versions.md").read_text()
    assert re.findall(r"^\| (3\.\d+) \|", page, re.M) == versions


def test_no_text_installs_slipway_from_an_index(repository: Path) -> None:
    for folder in ("launcher", "slipway", "conf", "docs", "containers"):
        for path in (repository / folder).rglob("*.*"):
            if path.suffix in (".py", ".md", ".yaml", ".j2"):
                assert "pip install 'slipway[" not in path.read_text(encoding="utf-8"), path


def test_the_running_python_is_among_the_versions(versions: list[str]) -> None:
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in versions
