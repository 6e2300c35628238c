"""The parts that the payloads of the training stage share."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import UserError, shown
from launcher.runs.paths import LaunchPaths
from launcher.secrecy import MASK, hidden


def config_arguments(paths: LaunchPaths) -> tuple[str, str]:
    """Return Hydra's arguments for the configuration of a launch."""
    return f"--config-path={paths.directory}", f"--config-name={paths.config_name}"


def whole_path(given: str, key: str) -> str:
    """Require an absolute path: tasks start in another directory than the user's.

    Raises
    ------
    UserError
        If it is given by a relative path.
    """
    if not Path(given).is_absolute():
        secret = hidden(key, given) == MASK  # in the place of its file's path
        raise UserError(
            f"{key}={MASK if secret else shown(given)}: a whole path is needed",
            key=key,
            hint=f"{key}={'/path/of/the/file' if secret else Path(given).expanduser().absolute()}",
        )
    return given.rstrip("/") or "/"
