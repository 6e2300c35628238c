"""Programs that stand in for others: bash scripts in a folder that comes first on PATH."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

# The program of the same name further back on PATH.
_REAL = 'real=$(PATH=${PATH#"${0%/*}":} command -v "${0##*/}")\n'


def write_program(path: Path, body: str) -> Path:
    """Write a bash script that can be run; `$real` in its body is the program that it stands for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{_REAL if '$real' in body else ''}{body}\n")
    path.chmod(0o755)
    return path


def write_programs(folder: Path, bodies: Mapping[str, str]) -> Path:
    """Write several programs, by name, into a folder; return the folder."""
    for name, body in bodies.items():
        write_program(folder / name, body)
    return folder


def prepend_to_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the programs of a folder found before all others."""
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
