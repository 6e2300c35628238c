"""The files of conf/, parsed once a process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins

_CONF = Path(__file__).resolve().parents[1] / "conf"


def parse_shipped_files_once() -> None:
    """Have Hydra parse each of them once: that is a third of each of many compositions.

    Nothing changes these files; what lies elsewhere is read each time.
    """
    Plugins.instance()  # registers the sources
    files: Any = SourcesRegistry.instance().resolve("file")
    load, shipped = files.load_config, str(_CONF)
    parsed: dict[str, bytes] = {}

    def load_config(source: Any, config_path: str) -> Any:
        if source.path != shipped:
            return load(source, config_path)
        key = f"{source.provider} {config_path}"
        if key not in parsed:
            parsed[key] = pickle.dumps(load(source, config_path))
        return pickle.loads(parsed[key])

    files.load_config = load_config
