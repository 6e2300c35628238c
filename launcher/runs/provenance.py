"""Where a launch comes from: who, which machine, which commit.

A dry run needs the tag alone, so what the others need is imported by them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_tag() -> str:
    """A name that no other launch has."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"


def user() -> str:
    import pwd

    try:
        # Not getpass: LOGNAME may say anything, and the scheduler goes by the user id.
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user id without a name, as in some containers
        return str(os.getuid())


def host() -> str:
    import socket

    return socket.gethostname()


def git_state(directory: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout that `directory` is in, and whether it was changed since.

    Both are ``None`` outside a checkout, also where an installed package lies below somebody else's.
    """
    if _git(directory, "ls-files", "--error-unmatch", ".") is None:
        return None, None
    commit = _git(directory, "rev-parse", "HEAD")
    status = _git(directory, "status", "--porcelain", "--untracked-files=no") if commit else None
    return commit, None if status is None else bool(status)


def _git(directory: Path, *arguments: str) -> str | None:
    import subprocess

    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
