"""Which processes belong to a sandbox: its daemons, the steps of its jobs, and what those left behind."""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self

from launcher.sandbox import processes
from launcher.sandbox.layout import Layout
from launcher.sandbox.processes import Process
from launcher.sandbox.state import State
from launcher.sandbox.supervision import MARKER


class Membership:
    """Finds the processes of one sandbox, again and again while it is being stopped.

    A process belongs to it when one of these holds:

    - it is a daemon that was recorded and still runs;
    - it shares the mount namespace of a node, as even a job's process that was orphaned on purpose does;
    - its root directory is a container that Enroot has unpacked in the sandbox;
    - its environment says so, which still holds when the daemons were killed;
    - it descends from one of these.

    The calling process and its ancestors never do. Neither does a shell that has the sandbox's
    ``SLURM_CONF``: that is how its user talks to it.
    """

    def __init__(self, state: State) -> None:
        self._layout: Layout = state.layout
        self._known: set[Process] = set(state.alive)
        # An open file keeps a namespace, so that its number is not given to another meanwhile.
        self._namespaces: dict[int, int] = {}
        for daemon in state.isolated:
            with suppress(OSError):
                handle = os.open(processes.mount_namespace(daemon.pid), os.O_RDONLY)
                self._namespaces[handle] = os.fstat(handle).st_ino

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._namespaces:
            os.close(handle)

    def alive(self) -> set[Process]:
        """Return the members that run now."""
        entries = processes.entries()
        spared = set(processes.ancestry(os.getpid(), entries))
        # A daemon that has only just been started may not have left the machine's namespace yet.
        private = set(self._namespaces.values()) - {_namespace(os.getpid()), _namespace(1)}
        roots = {process.pid for process in self._known if process.is_alive}
        containers = self._containers()
        roots |= {
            pid
            for pid in entries.keys() - spared
            if _namespace(pid) in private
            or (containers and processes.root_directory(pid) in containers)
            or self._is_claimed(processes.environment(pid))
        }
        for pid, entry in entries.items():
            if pid not in spared and not roots.isdisjoint(processes.ancestry(pid, entries)):
                self._known.add(entry.process)
        return {process for process in self._known if process.is_alive}

    def _containers(self) -> set[tuple[int, int]]:
        """The root directories of containers, by device and inode."""
        found = set()
        for root in self._layout.containers.glob("*/data-*/*"):
            with suppress(OSError):
                status = root.stat()
                found.add((status.st_dev, status.st_ino))
        return found

    def _is_claimed(self, environment: dict[str, str]) -> bool:
        if environment.get(MARKER) == str(self._layout.directory):
            return True
        in_job = "SLURMD_NODENAME" in environment
        return in_job and environment.get("SLURM_CONF") == str(self._layout.slurm_conf)


def _namespace(pid: int) -> int | None:
    try:
        return processes.mount_namespace(pid).stat().st_ino
    except OSError:
        return None
