"""A copy of the checkout as a clone would have it, with what is not committed yet."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def files(repository: Path) -> list[Path]:
    """The files of the checkout that git does not ignore, links to directories among them; relative."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=repository, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in names.splitlines()]
    # What was deleted and not committed is still listed.
    return [path for path in paths if (repository / path).is_file() or (repository / path).is_symlink()]


def copy(repository: Path, target: Path) -> Path:
    """Copy those files; links stay links."""
    for path in files(repository):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / path, target / path, follow_symlinks=False)
    return target
