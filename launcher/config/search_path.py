"""A configuration tree of the user's own, in front of ours.

Hydra's `hydra.searchpath` only appends, so that a file there could not replace one of ours.
"""

from __future__ import annotations

from pathlib import Path

_registered: list[Path | None] = []


def register_tree(directory: Path | None) -> None:
    """Let the compositions that follow look at `directory` first; ``None`` leaves our tree alone."""
    if not _registered:
        if directory is None:
            return
        _register_plugin()
    _registered[:] = [directory]


def _register_plugin() -> None:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class UserTree(SearchPathPlugin):
        """Hydra's own way for others to change where it looks."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            directory = _registered[0]
            if directory is not None:
                search_path.prepend(provider="user", path=f"file://{directory.absolute()}")

    Plugins.instance().register(UserTree)
