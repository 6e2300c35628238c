"""The configuration trees in front of ours: the command line's, the variable's, the machine's."""

from __future__ import annotations

import fnmatch
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.errors import UserError, check_directory, escape
from launcher.runs.trust import user_name

VARIABLE = "SLIPWAY_CONFIG_PATH"
MACHINE_TREE = Path("/etc/slipway/conf")

_logger = logging.getLogger(__name__)


def find_config_dirs(typed: Sequence[Path]) -> tuple[Path, ...]:
    """Return the trees that a command reads before ours; the first one wins.

    Those of `--config-dir` come first, then those of the variable, then the machine's. Warn of trees that
    others may write; raise UserError for a directory of the variable that is not there.
    """
    trees = {tree.absolute(): tree for tree in typed}
    for tree in site_trees():
        if tree not in trees and (why := why_open(tree)) is not None:
            _logger.warning("warning: %s, a part of the configuration of your jobs", escape(why))
        trees.setdefault(tree, tree)
    return tuple(trees.values())


def site_trees() -> list[Path]:
    """Return the trees of the variable and of the machine; raise UserError for one that is not there."""
    trees = []
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        tree = Path(text)
        if not tree.is_absolute():
            raise UserError(f"{VARIABLE}: {escape(text)}: not a whole path", hint="such as /site/conf")
        # A site names a directory of the user's own, which not every user has.
        if tree.is_dir() or not tree.is_relative_to(Path(os.path.expanduser("~"))):  # noqa: PTH111
            check_directory(VARIABLE, tree)
            trees.append(tree)
    return [*trees, *([MACHINE_TREE] if MACHINE_TREE.is_dir() else [])]


def why_open(tree: Path) -> str | None:
    """Return who else may change a tree: everybody, or an owner who is neither root nor the caller."""
    tree = tree.resolve()
    below = [
        Path(at, name) for at, _, names in os.walk(tree) for name in ("", *fnmatch.filter(names, "*.yaml"))
    ]
    for path in (*tree.parents, *below):
        with suppress(OSError):  # a link to nowhere, or a file that was just removed
            status, is_above = path.stat(), path in tree.parents
            if not is_above and status.st_uid not in (0, os.geteuid()):
                return f"{path} belongs to {user_name(status.st_uid)}"
            # Others cannot replace files in a directory with the sticky bit.
            if status.st_mode & stat.S_IWOTH and not (is_above and status.st_mode & stat.S_ISVTX):
                return f"everybody may write {path}"
    return None
