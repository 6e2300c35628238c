"""Settings of Hydra and OmegaConf: the user's own tree in front of ours, and libyaml to read files."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import _utils

_registered: list[Path | None] = []


def register_tree(directory: Path | None) -> None:
    """Let the compositions that follow search `directory` first; ``None`` leaves our tree alone.

    Hydra's `hydra.searchpath` only appends, so that a file there could not replace one of ours.
    """
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
        """Hydra's own way to change its search path."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            directory = _registered[0]
            if directory is not None:
                search_path.prepend(provider="user", path=f"file://{directory.absolute()}")

    Plugins.instance().register(UserTree)


@cache
def use_libyaml() -> None:
    """Let OmegaConf read files with libyaml: the parser in Python takes a fifth of a composition's time.

    OmegaConf has no setting for this; its version is pinned.
    """
    if not yaml.__with_libyaml__:
        return
    from yaml._yaml import CParser

    loader: Any = _utils.get_yaml_loader()

    class LibyamlLoader(CParser, loader):  # type: ignore[misc]
        """OmegaConf's loader with libyaml's parser."""

        def __init__(self, stream: Any) -> None:
            self._text = stream if isinstance(stream, str) else stream.read()
            self._name = getattr(stream, "name", None)
            CParser.__init__(self, self._text)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

        def get_single_data(self) -> Any:
            try:
                return super().get_single_data()
            except yaml.YAMLError:
                # Read again for the message: libyaml's names neither the file nor the column.
                stream = io.StringIO(self._text)
                if self._name is not None:
                    stream.name = self._name
                return loader(stream).get_single_data()

    _utils.get_yaml_loader = lambda: LibyamlLoader
