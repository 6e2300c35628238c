"""What a container is to mount: Pyxis starts none without it."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher.checks.gathering.path_resolver import Ground, is_there
from launcher.checks.path_facts import Lack
from launcher.errors import nearest_files
from launcher.plan import SOURCES_WITHOUT_PATH, Mount

_WHY = "there is no such file or directory to mount"


def lost_mounts(ground: Ground) -> tuple[Lack, ...] | None:
    """The mounts whose sources are not there, and will not be when the job begins."""
    container = ground.plan.job.container
    if container is None or not ground.in_container:
        return None
    sources = {mount.source: mount for mount in container.mounts if mount.source not in SOURCES_WITHOUT_PATH}
    return tuple(
        _lost(ground, mount)
        for source, mount in sources.items()
        if not is_there(Path(source)) and not ground.makes(Path(source))
    )


def _lost(ground: Ground, mount: Mount) -> Lack:
    path = Path(mount.source)
    key, fix = _named(ground, path)
    return ground.lost(key, mount.source, _WHY, certain=ground.tells_of(path), fix=fix)


def _named(ground: Ground, path: Path) -> tuple[str, str | None]:
    """The key that a mount comes from, and what to do about it."""
    config = ground.made.composition.config
    for key, given in (("data_dir", config.data_dir), ("base_results_dir", config.base_results_dir)):
        if path == Path(given):
            return key, f"mkdir -p {shlex.quote(given)}, or {key}=..."
    text = config.data_preparation
    if text is not None and path in {Path(given).absolute() for given in text.inputs}:
        return "data_preparation.inputs", nearest_files(path)
    return "container_mounts", None
