"""The page of all keys agrees with the schema and the tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from launcher.config.schema import ClusterConfig, RunConfig
from launcher.images.recipes import RecipeConfig


def test_the_page_is_not_stale(repository: Path) -> None:
    command = [sys.executable, repository / "scripts" / "reference_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_page_has_every_strict_key(repository: Path) -> None:
    text = (repository / "docs" / "reference.md").read_text()
    models: list[type[BaseModel]] = [RunConfig, ClusterConfig, RecipeConfig]
    for model in models:
        for name in model.model_fields:
            assert f"| `{name}` |" in text or f"\n## `{name}`\n" in text, name
    assert "| `python` | text or null | `null` | null: the interpreter that runs the launcher" in text
