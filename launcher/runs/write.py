"""Write launch directories, links and copies: complete or not there at all, and never over older ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.errors import explain_os_error, file_mode
from launcher.runs.manifest import find_newest_submitted, require_readable
from launcher.runs.paths import LAUNCHES, NEWEST, LaunchPaths, next_launch_number
from slipway.common.files import sync_path, write_atomic


def umask() -> int:
    """Return the user's umask; reading it requires setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def link_or_copy(link: Path, target: Path) -> None:
    """Link to a file from a folder, created if needed, or else copy it; leave a link that exists alone."""
    link.parent.mkdir(exist_ok=True)
    try:
        link.symlink_to(os.path.relpath(target, link.parent))
    except FileExistsError:
        return
    except OSError:
        write_atomic(link, target.read_text(encoding="utf-8", errors="surrogateescape"))


def link_atomic(link: Path, target: Path) -> None:
    """Point a symbolic link at `target`, replacing an older link; leave the user's own file or directory."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}.{os.urandom(4).hex()}")
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.replace(link)


def copy_package(source: Path, target: Path) -> None:
    """Copy the files of a Python package durably, without bytecode and hidden files."""
    target.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        if entry.name == "__pycache__" or entry.name.startswith("."):  # an editor's may be a dangling link
            continue
        if entry.is_dir():
            copy_package(entry, target / entry.name)
        else:
            _write_bytes(target / entry.name, entry.read_bytes())
    sync_path(target)


def _write_bytes(path: Path, content: bytes) -> None:
    """Write a new file, and make its content durable."""
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


_TEMPORARY = ".new-"
# In seconds; no launcher takes as long: older temporary directories are those of killed launchers.
_STALE_AGE = 86400.0


def reserve_number(run_dir: Path, key: str) -> int:
    """Reserve the run's next launch number by making its directory; raise UserError if that fails."""
    launches = run_dir / LAUNCHES
    number = 0
    try:
        launches.mkdir(parents=True, exist_ok=True)
        for path in launches.glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(OSError):  # another user's, or gone by now
                if time.time() - path.stat().st_mtime > _STALE_AGE:
                    shutil.rmtree(path)
        while True:
            # Ever higher: over NFS the name of a directory may be taken before a listing shows it.
            number = max(number + 1, next_launch_number(run_dir))
            try:
                _partial_dir(run_dir, number).mkdir(parents=True)
            except FileExistsError:
                continue
            if not (launches / str(number)).exists():
                return number
            release_number(run_dir, number)  # its launch was written since the listing
    except OSError as error:
        raise explain_os_error(error, run_dir, key) from error


def release_number(run_dir: Path, number: int) -> None:
    """Give back a reserved number for which nothing was written."""
    with contextlib.suppress(OSError):
        _partial_dir(run_dir, number).rmdir()


def _partial_dir(run_dir: Path, number: int) -> Path:
    return run_dir / LAUNCHES / f"{_TEMPORARY}{number}"


def write_launch(paths: LaunchPaths, files: Mapping[Path, str | bytes], code: Path | None, key: str) -> None:
    """Write a launch into the directory that reserves its number, and rename that into place.

    `files` are contents by their paths, each below ``paths.directory``. The Python package `code` is
    copied, so that the job runs it as it is now. Raise UserError if something cannot be written.
    """
    temporary = _partial_dir(paths.run_dir, paths.number)
    try:
        for path, content in files.items():
            mode = 0o777 if path.suffix == ".sh" else 0o666
            if path.suffix in (".json", ".yaml"):
                require_readable(path, content)
            target = temporary / path.relative_to(paths.directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                _write_bytes(target, content)
            else:
                write_atomic(target, content, mode)
        if code is not None:
            copy_package(code, temporary / paths.code.relative_to(paths.directory) / code.name)
        sync_path(temporary)
        temporary.rename(paths.directory)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        name = error.filename if isinstance(error, OSError) else None
        is_about_code = name and code and Path(name).is_relative_to(code)
        if isinstance(error, OSError) and not is_about_code:
            raise explain_os_error(error, paths.run_dir, key) from error
        raise
    sync_path(paths.run_dir / LAUNCHES)


def discard_launch(paths: LaunchPaths, directories: Iterable[Path]) -> None:
    """Remove a launch that was never submitted, and the empty directories that were created for it."""
    shutil.rmtree(paths.directory, ignore_errors=True)
    remove_empty([*directories, paths.run_dir / LAUNCHES, paths.run_dir])


def list_missing_directories(path: Path) -> list[Path]:
    """Return the missing ones of a directory and its parents, the innermost first."""
    return [directory for directory in (path, *path.parents) if not file_mode(directory)]


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove directories, the innermost first, unless they hold something."""
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()


def link_newest(paths: LaunchPaths, names: Iterable[str], logs: Iterable[Path]) -> None:
    """Point the familiar names at the top of the run directory to the newest launch that became a job.

    They go through one link, ``newest``, so that they never show files of different launches. The links to
    the logs of this launch have unique names and stay.
    """
    for log in logs:
        link_atomic(paths.run_dir / log.name, log)
    for name in names:
        link_atomic(paths.run_dir / name, paths.run_dir / NEWEST / name)
    # Without a lock: every process that sets the link checks again afterwards, so the last one is right.
    number, newest = None, find_newest_submitted(paths.run_dir)
    while newest != number:
        number = newest
        link_atomic(paths.run_dir / NEWEST, paths.run_dir / LAUNCHES / str(number))
        newest = find_newest_submitted(paths.run_dir)


def make_directories(directories: Iterable[Path], key: str) -> None:
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_os_error(error, directory, key) from error
