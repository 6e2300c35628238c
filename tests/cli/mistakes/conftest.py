"""Fixtures: the paths that the mistakes name, and an empty directory on a machine without Slurm."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

from tests.cli.mistakes.places import TREE, Places


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Return the paths that the mistakes name."""
    root = tmp_path_factory.mktemp("places")
    for folder in ("tree/cluster", "tree/training", "syntax", "undefined", "images"):
        (root / folder).mkdir(parents=True)
    for name, text in TREE.items():
        (root / "tree/cluster" / f"{name}.yaml").write_text(text)
    (root / "tree/training/bare.yaml").write_text("defaults:\n  - /training/gpt3/126m\n")
    (root / "tree/cluster/latin.yaml").write_bytes(b"account: \xff\n")
    (root / "syntax/sbatch.sh.j2").write_text("#!/bin/bash\n{% if %}\n")
    (root / "undefined/task.sh.j2").write_text("#!/bin/bash\n\n{{ jobb.stage }}\n")
    (root / "images/nemo-24.07.sqsh").touch()
    (root / "file").touch()
    venv.create(root / "bare", with_pip=False)
    return Places(root / "tree", root, root / "images", root / "bare/bin/python", root / "file")


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, which is empty, on a machine without Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("no-slurm")))
    monkeypatch.chdir(tmp_path)
    return tmp_path
