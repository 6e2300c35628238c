"""Resolve a job's paths on this machine, which may not have the nodes' file systems."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from launcher.checks.facts import MissingPath
from launcher.drafting import Draft
from launcher.errors import file_mode
from launcher.estimates.values import Values
from launcher.file_systems import is_shared, mount_of
from launcher.plan import SOURCES_WITHOUT_PATH, Plan
from launcher.sandbox import is_sandbox
from launcher.stages.planning import outputs_of

# The fault of a path, and a remedy.
Fault = tuple[str, str | None]


class PathResolver:
    """A resolver of the paths of a draft's job on this machine."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.plan: Plan = draft.plan
        self.values = Values(draft.plan.job.config or {})
        # Without Slurm a job runs without its container.
        self.in_container = draft.plan.job.container is not None and draft.plan.scheduler != "local"
        self.nodes_are_here = (
            draft.plan.scheduler == "local"
            or draft.composition.choices.get("cluster") == "sandbox"
            or is_sandbox_of(draft.plan.slurm_conf or os.environ.get("SLURM_CONF"))
        )

    def host(self, value: str) -> Path | None:
        """Return a path of the job as this machine has it; None if it lies in the container's image."""
        path, container = Path(value), self.plan.job.container
        if container is None or not self.in_container:
            return path
        inside = [mount for mount in container.mounts if path.is_relative_to(mount.target)]
        if not inside:
            return None
        # The innermost covers the others, and of two with one target the later one.
        closest = max(enumerate(inside), key=lambda item: (len(Path(item[1].target).parts), item[0]))[1]
        if closest.source in SOURCES_WITHOUT_PATH:
            return None
        return Path(closest.source) / path.relative_to(closest.target)

    def input(self, key: str, value: str, prefix: str = "by its whole path: ") -> Path | MissingPath | None:
        """Return the path of a job's input on this machine.

        Return why the path cannot exist, or None if an earlier stage will create it. `prefix` comes before
        the value to write in place of a relative path.
        """
        scheme, mark, _ = value.partition("://")
        if mark:
            why = f"engine={self.plan.job.engine} reads files, and opens no {scheme}:// here"
            return MissingPath(key, value, why, True, "fetch it to a directory of the nodes, and name that")
        if not Path(value).is_absolute():
            why = "a whole path is needed: the job starts elsewhere"
            return MissingPath(key, value, why, True, f"{prefix}{Path(value).absolute()}")
        path = self.host(value)
        if path is None:
            why = "no mount of the container has it, so that it must be in the image"
            return MissingPath(key, value, why, False, f"container_mounts=[{Path(value).parent}]")
        return None if self.is_created_later(path) else path

    def look(
        self, key: str, value: str, path: Path | MissingPath | None, fault: Callable[[Path], Fault | None]
    ) -> list[MissingPath]:
        """Return the fault of an `input`, if any."""
        if not isinstance(path, Path):
            return [path] if path is not None else []
        problem = fault(path)
        return [self.missing(key, value, *problem, at=path)] if problem is not None else []

    def creates(self, directory: Path) -> bool:
        """Return True if the launch makes a directory, or one below it, before the job begins."""
        directories = (
            self.plan.paths.run_dir,
            *self.plan.job.directories,
            *outputs_of(self.draft.composition.before),
        )
        return any(path.is_relative_to(directory) for path in directories)

    def is_created_later(self, path: Path) -> bool:
        """Return True if an earlier stage of the launch will write a file."""
        return any(path.is_relative_to(output) for output in outputs_of(self.draft.composition.before))

    def is_visible(self, path: Path) -> bool:
        """Return True if a path exists on the nodes exactly if it exists here.

        A local disk may be another disk on the nodes, mounted at the same point; on a shared one that is
        mounted here, a missing directory is missing on the nodes too.
        """
        if self.nodes_are_here or is_there(path):
            return is_visible(path)
        mount = mount_of(path)
        is_mounted = mount is not None and mount.point != Path("/") and mount.kind != "autofs"
        return is_shared(path) and (is_mounted or is_visible(path))

    def missing(
        self,
        key: str,
        value: str,
        why: str,
        fix: str | None = None,
        *,
        at: Path | None = None,
        certain: bool = True,
    ) -> MissingPath:
        """Return a missing path: uncertain if the nodes may have another file `at` its place.

        A path in the run's directory, which the launcher itself writes, is certain.
        """
        dependency, run_dir = self.plan.job.queue.dependency, self.plan.paths.run_dir
        certain = certain and (at is None or at.is_relative_to(run_dir) or self.is_visible(at))
        if self.plan.scheduler == "local":
            certain = True
        elif dependency not in (None, "singleton"):
            why, certain = f"{why} yet; the job waits for {dependency}", False
        elif not certain:
            why = f"{why} on this machine; every node must have it"
        return MissingPath(key, value, why, certain, fix or None)


def is_there(path: Path) -> bool:
    """Return True if something exists at a path, even if it cannot be read."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def is_visible(path: Path) -> bool:
    """Return True if the directory of a path exists here: a file missing here is missing on the nodes."""
    try:
        return stat.S_ISDIR(file_mode(path.parent))
    except PermissionError:
        return True  # it exists, but is not readable
    except OSError:
        return False


def opened(path: Path) -> BinaryIO:
    """Open a file to read it; raise OSError for other kinds: a pipe would wait for a writer."""
    kind = path.stat().st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise OSError(errno.EINVAL, "not a file")
    return path.open("rb")


def why_unreadable(error: OSError) -> str:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "there is no such file"
    if isinstance(error, IsADirectoryError):
        return "a directory, not a file"
    return f"it cannot be read: {(error.strerror or str(error)).lower()}"


def is_sandbox_of(slurm_conf: str | None) -> bool:
    """Return True for the slurm.conf of a sandbox, with this machine as its nodes."""
    return slurm_conf is not None and is_sandbox(Path(slurm_conf).parent.parent)
