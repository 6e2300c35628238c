"""The record of a sandbox that was started: enough to stop exactly that one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import processes
from launcher.sandbox.options import Ports, SandboxOptions
from launcher.sandbox.paths import SandboxPaths
from launcher.sandbox.processes import Process

_VERSION = 1
STARTING, UP, FAILED = "starting", "up", "failed"


@dataclass(slots=True)
class SandboxRecord:
    """The record of a sandbox, kept in ``sandbox.json`` from before its first daemon to its end."""

    options: SandboxOptions
    ports: Ports
    phase: str = STARTING
    boot_id: str = field(default_factory=processes.boot_id)
    daemons: dict[str, Process] = field(default_factory=dict)

    @property
    def paths(self) -> SandboxPaths:
        return SandboxPaths(self.options.directory)

    @property
    def missing(self) -> tuple[str, ...]:
        """The daemons that no longer run."""
        return tuple(name for name, process in self.daemons.items() if not self._is_alive(process))

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.daemons.values() if self._is_alive(process)]

    @property
    def isolated(self) -> list[Process]:
        """The running daemons whose mount namespace their child processes share."""
        names = ("slurmctld", *self.options.node_names)
        return [self.daemons[name] for name in names if name in self.daemons and name not in self.missing]

    @property
    def is_up(self) -> bool:
        return self.phase == UP and not self.missing

    def _is_alive(self, process: Process) -> bool:
        return self.boot_id == processes.boot_id() and process.is_alive

    def save(self) -> None:
        """Write the record; a reader sees the old one or the new one."""
        record = {
            "version": _VERSION,
            "phase": self.phase,
            "boot_id": self.boot_id,
            "options": self.options.to_json(),
            "ports": self.ports.to_json(),
            "daemons": {name: process.to_json() for name, process in self.daemons.items()},
        }
        path = self.paths.state_file
        new = path.with_suffix(".new")
        new.write_text(json.dumps(record, indent=2) + "\n")
        new.replace(path)


def load(directory: Path) -> SandboxRecord | None:
    """Read the record of the sandbox in a directory; `None` when there is no sandbox.

    Raises
    ------
    UserError
        If the record cannot be parsed: its processes are then unknown.
    """
    path = SandboxPaths(directory).state_file
    try:
        record = json.loads(path.read_text())
        return SandboxRecord(
            options=SandboxOptions.from_json(record["options"]),
            ports=Ports.from_json(record["ports"]),
            phase=record["phase"],
            boot_id=record["boot_id"],
            daemons={name: Process.from_json(each) for name, each in record["daemons"].items()},
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the record of a sandbox of this version: {error!r}",
            hint="stop the processes that it names by hand and remove the directory",
        ) from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory, which must exist, against another `up` or `down` at the same time.

    Raises
    ------
    UserError
        If another process has locked it.
    """
    busy = UserError(f"another process is starting or stopping the sandbox in {directory}")
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise busy from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A `down` that held the lock a moment ago has removed the directory, perhaps for a new one.
        if not directory.is_dir() or not os.path.samestat(os.fstat(handle), directory.stat()):
            raise busy
        yield
    except BlockingIOError:
        raise busy from None
    finally:
        os.close(handle)
