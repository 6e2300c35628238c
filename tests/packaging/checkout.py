"""A copy of the checkout as a clone would have it, with changes that are not committed yet."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def files(repository: Path) -> list[Path]:
    """Return relative paths of the files that git does not ignore, links to directories among them."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=repository, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in names.splitlines()]
    # git still lists a deleted file until the deletion is committed.
    return [path for path in paths if (repository / path).is_file() or (repository / path).is_symlink()]


def copy(repository: Path, target: Path) -> Path:
    """Copy the files that git does not ignore; links stay links."""
    for path in files(repository):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / path, target / path, follow_symlinks=False)
    return target
