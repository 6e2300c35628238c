"""The files of conf/, composed once a process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.config import compose
from launcher.config.overrides import MAIN
from launcher.config.tree_composer import ComposedTree, TreeComposer


class KeptTrees(TreeComposer):
    """The trees of shipped files, of which each choice is composed once, as for a sweep."""

    def compose(self, overrides: Sequence[str]) -> ComposedTree:
        return self.compose_again(overrides)


def compose_shipped_files_once() -> TreeComposer:
    """Have each choice of shipped files composed once; files elsewhere are read each time."""
    kept = KeptTrees((compose.CONF_DIR,))

    def kept_or_anew(roots: Sequence[Path], primary: str = MAIN) -> TreeComposer:
        is_shipped = list(roots) == [compose.CONF_DIR] and primary == MAIN
        return kept if is_shipped else TreeComposer(roots, primary)

    compose.TreeComposer = kept_or_anew  # type: ignore[assignment,misc]
    return kept


def compose_anew(patch: pytest.MonkeyPatch) -> None:
    """Compose each time from the beginning again, as one launch does."""
    patch.setattr(compose, "TreeComposer", TreeComposer)
