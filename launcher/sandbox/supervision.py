"""Starting daemons one by one, each recorded before it can be lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import namespaces, processes
from launcher.sandbox.configuration import CONTROLLER
from launcher.sandbox.prerequisites import program, search_path
from launcher.sandbox.reporting import Reporter
from launcher.sandbox.state import State

# Marks the daemons, and through them slurmstepd, as belonging to a sandbox.
MARKER = "SLIPWAY_SANDBOX_MEMBER"
# Of no matter where it starts in seconds; a daemon that ends is noticed at once.
_PATIENCE_SECONDS = 60.0
_TAIL_LINES = 15


class StartError(UserError):
    """A daemon of the sandbox ended or never became ready."""


class Supervisor:
    """Starts the daemons of one sandbox."""

    def __init__(self, state: State, reporter: Reporter) -> None:
        self.state = state
        self.layout = state.layout
        self.reporter = reporter

    def start(
        self,
        name: str,
        command: Sequence[str],
        host: str = CONTROLLER,
        mounts: Mapping[Path, Path] | None = None,
        **environment: str,
    ) -> None:
        """Start a daemon that stays in the foreground, detached from the terminal, and record it.

        No daemon depends on the machine's name, nor on whether it resolves: each sees the name `host` and the
        sandbox's hosts file.

        Parameters
        ----------
        mounts
            Further files and directories, and what the daemon sees them in place of.
        """
        self.reporter.step(f"starting {name}")
        layout = self.layout
        seen = namespaces.name_files(layout) | {layout.daemon_communication: layout.communication}
        words = namespaces.enter(host, seen | dict(mounts or {}), [program(command[0]), *command[1:]])
        output = self.layout.output(name)
        write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        # Not subprocess: the child outlives this process, which Popen objects warn about.
        pid = os.posix_spawn(
            program("env"),
            ["env", "--chdir=/", *words],
            self._environment() | environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(output), write, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self.state.daemons[name] = processes.child(pid)
        self.state.save()

    def wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Wait until a daemon is ready.

        Raises
        ------
        StartError
            When it, or one started before, ends instead, or when it takes too long.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not ready():
            for each, process in self.state.daemons.items():
                code = processes.reap(process.pid)
                if code is not None or not process.is_alive:
                    raise self._failure(each, f"ended with exit code {code}" if code is not None else "ended")
            if time.monotonic() > deadline:
                raise self._failure(name, f"was not ready after {_PATIENCE_SECONDS:.0f} s")
            time.sleep(0.01)

    def _environment(self) -> dict[str, str]:
        # None of the user's: what a job sees of it comes with the submission.
        return {
            "PATH": search_path(),
            "SLURM_CONF": str(self.layout.slurm_conf),
            MARKER: str(self.layout.directory),
        }

    def _failure(self, name: str, what: str) -> StartError:
        output = self.layout.output(name)
        return StartError(f"{name} {what}; the end of {output}:\n{tail(output)}")


def tail(path: Path) -> str:
    """Return the last lines of a log, indented."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join(f"    {line}" for line in lines) or "    (empty)"
