"""A rendered launch to its directory: complete or not there at all, and never over an older one."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.errors import explain_os_error
from launcher.runs.files import copy_package, link_atomic, sync_directory, write_atomic
from launcher.runs.manifest import newest_submitted
from launcher.runs.paths import LAUNCHES, NEWEST, LaunchPaths

# Says where runs go.
KEY = "base_results_dir"


class LaunchExists(Exception):
    """Another launcher took the number meanwhile; plan with the next one."""


def write_launch(paths: LaunchPaths, files: Mapping[Path, str], code: Path | None) -> None:
    """Write a launch directory under a temporary name and rename it into place.

    Parameters
    ----------
    files
        Text by path, each below ``paths.directory``.
    code
        A Python package to copy, so that the job runs it as it is now; ``None`` copies nothing.

    Raises
    ------
    LaunchExists
        If the launch's number is taken.
    UserError
        If the directory cannot be written.
    """
    try:
        launches = paths.run_dir / LAUNCHES
        launches.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=launches))
    except OSError as error:
        raise explain_os_error(error, paths.run_dir, KEY) from error
    try:
        temporary.chmod(0o755)  # mkdtemp's 0700 would hide the launch from colleagues
        for path, text in files.items():
            mode = 0o755 if path.suffix == ".sh" else 0o644
            write_atomic(temporary / path.relative_to(paths.directory), text, mode)
        if code is not None:
            copy_package(code, temporary / paths.code.relative_to(paths.directory) / code.name)
        sync_directory(temporary)
        _rename(temporary, paths.directory)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise explain_os_error(error, paths.run_dir, KEY) from error
        raise
    sync_directory(launches)


def link_newest(paths: LaunchPaths, names: Iterable[str], logs: Iterable[Path]) -> None:
    """Let the familiar names at the top of the run directory show the newest launch that became a job.

    They go through one link, ``newest``, so that they never show files of different launches. The logs of
    this launch, whose names no other has, stay for good.
    """
    for log in logs:
        link_atomic(paths.run_dir / log.name, log)
    for name in names:
        link_atomic(paths.run_dir / name, paths.run_dir / NEWEST / name)
    _point_newest(paths.run_dir)


def _point_newest(run_dir: Path) -> None:
    # Without a lock: whoever sets the link looks again afterwards, so the last one to set it is right.
    number = newest_submitted(run_dir)
    while True:
        link_atomic(run_dir / NEWEST, run_dir / LAUNCHES / str(number))
        if (again := newest_submitted(run_dir)) == number:
            return
        number = again


def make_directories(directories: tuple[Path, ...]) -> None:
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_os_error(error, directory, KEY) from error


def _rename(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise LaunchExists from error
        raise
