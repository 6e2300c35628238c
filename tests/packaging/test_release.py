"""`make release`: what it refuses before it builds anything. The whole needs an index of packages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import slipway

HEADING = f"## {slipway.__version__} - 2026-01-31\n"


@pytest.fixture
def tree(repository: Path, tmp_path: Path) -> Path:
    """Return a committed tree of the files that the script reads, with a dated changelog."""
    for name in ("scripts/release.sh", "slipway/__init__.py", ".gitignore"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(repository / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(HEADING)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=tree, check=True, capture_output=True, text=True
    ).stdout


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "a commit")


def refusal(tree: Path) -> str:
    done = subprocess.run([tree / "scripts/release.sh"], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert not (tree / "dist" / slipway.__version__ / "SHA256SUMS").exists()
    return done.stderr


def test_a_tree_with_changes_is_refused(tree: Path) -> None:
    (tree / "note").write_text("not committed")
    assert "changes that are not committed" in refusal(tree)


def test_a_changelog_without_the_release_is_refused(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text(f"## {slipway.__version__} (unreleased)\n")
    commit(tree)
    assert f"no heading '## {slipway.__version__} - " in refusal(tree)


def test_a_release_is_made_once(tree: Path) -> None:
    git(tree, "tag", f"v{slipway.__version__}")
    assert "is there already" in refusal(tree)
    git(tree, "tag", "--delete", f"v{slipway.__version__}")
    (tree / "dist" / slipway.__version__).mkdir(parents=True)
    assert f"dist/{slipway.__version__} is there already" in refusal(tree)
