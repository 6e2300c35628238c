"""Bringing a sandbox up, and taking it down: its jobs, its daemons, processes that jobs left, its files."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.file_systems import mounts
from launcher.sandbox import Reporter, daemons, prerequisites, state
from launcher.sandbox.daemons import MARKER, DaemonStarter, StartError
from launcher.sandbox.options import Ports, SandboxOptions, SandboxPaths, choose_ports
from launcher.sandbox.state import Process, SandboxRecord, ask, client_environment

_JOBS_SECONDS = 3.0
_KILL_SECONDS = 10.0
_ACTIVE = ("PENDING", "RUNNING", "SUSPENDED")


class Membership:
    """The processes of one sandbox, listed again and again while it is being stopped.

    A process belongs to the sandbox when one of these holds:

    - it is a daemon that was recorded and still runs;
    - it shares the mount namespace of a daemon, as even a job's process that was orphaned on purpose does;
    - its root directory is a container that Enroot has unpacked in the sandbox;
    - its environment has the sandbox's marker, which still holds when the daemons were killed;
    - it descends from one of these.

    The calling process and its ancestors never do. Neither does a shell that has the sandbox's
    ``SLURM_CONF``: that is how its user talks to it.
    """

    def __init__(self, record: SandboxRecord, files: ExitStack) -> None:
        self._paths: SandboxPaths = record.paths
        self._known: set[Process] = set(record.alive.values())
        self._namespaces: set[tuple[int, int]] = set()
        for daemon in self._known:
            with suppress(OSError):
                # An open file keeps a namespace, so that its number is not given to another meanwhile.
                file = files.enter_context(state.mount_namespace(daemon.pid).open("rb"))
                status = os.fstat(file.fileno())
                self._namespaces.add((status.st_dev, status.st_ino))

    def alive(self) -> set[Process]:
        """Return the members that run now."""
        processes = state.processes()
        spared = set(state.ancestry(os.getpid(), processes))
        # A daemon that has only just been started may not have left the machine's namespace yet.
        private = self._namespaces - {_namespace(os.getpid()), _namespace(1)}
        roots = {process.pid for process in self._known if process.is_alive}
        containers = {state.inode_of(root) for root in self._paths.containers.glob("*/data-*/*")} - {None}
        roots |= {
            pid
            for pid in processes.keys() - spared
            if _namespace(pid) in private
            or (containers and state.inode_of(Path(f"/proc/{pid}/root")) in containers)
            or self._is_claimed(state.environment(pid))
        }
        for pid, process in processes.items():
            if pid not in spared and not roots.isdisjoint(state.ancestry(pid, processes)):
                self._known.add(process)
        return {process for process in self._known if process.is_alive}

    def _is_claimed(self, environment: dict[str, str]) -> bool:
        in_job = "SLURMD_NODENAME" in environment
        return environment.get(MARKER) == str(self._paths.directory) or (
            in_job and environment.get("SLURM_CONF") == str(self._paths.slurm_conf)
        )


def _namespace(pid: int) -> tuple[int, int] | None:
    return state.inode_of(state.mount_namespace(pid))


def stop(record: SandboxRecord) -> None:
    """Stop every process of a sandbox; raise UserError if one of them does not end even when it is killed."""
    with ExitStack() as files:
        membership = Membership(record, files)
        if record.is_up:
            _cancel_jobs(record.paths)
        # Everything is killed at once, the database too: its files are removed next.
        deadline = time.monotonic() + _KILL_SECONDS
        while remaining := membership.alive():
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in remaining)
                raise UserError(f"these processes of the sandbox do not end: {pids}")
            state.stop(remaining, signal.SIGKILL, 1)


def remove_files(paths: SandboxPaths) -> None:
    """Remove the content of a sandbox's directory; raise UserError if something is mounted in it."""
    if mounts_below := mounts_under(paths.directory):
        raise UserError(
            f"something is mounted in the sandbox's directory: {', '.join(map(str, mounts_below))}",
            hint="unmount it first; removing the directory would remove the mounted files",
        )
    for entry in paths.directory.iterdir():
        # The record goes last: without it, the remains would not be recognized as a sandbox.
        if entry == paths.state_file:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    paths.state_file.unlink(missing_ok=True)


def mounts_under(directory: Path) -> list[Path]:
    """Return the mount points below a directory, as this process sees them."""
    points = (mount.point for mount in mounts())
    return [point for point in points if point != directory and point.is_relative_to(directory)]


def _cancel_jobs(paths: SandboxPaths) -> None:
    """Cancel all jobs, so that their clients are notified, and give their processes a moment to end."""
    conf = paths.slurm_conf
    for job_state in _ACTIVE:
        ask(conf, "scancel", "--quiet", f"--state={job_state}")
    deadline = time.monotonic() + _JOBS_SECONDS
    while time.monotonic() < deadline and ask(conf, "squeue", "--noheader", seconds=2):
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox that is up; `was_up` is True if `up` did not have to boot it."""

    options: SandboxOptions
    ports: Ports
    was_up: bool = False

    @property
    def directory(self) -> Path:
        return self.options.directory

    @property
    def slurm_conf(self) -> Path:
        return SandboxPaths(self.directory).slurm_conf

    def environment(self) -> dict[str, str]:
        """Return an environment in which Slurm's commands, and jobs, use this sandbox."""
        return client_environment(self.slurm_conf)


def up(options: SandboxOptions, reporter: Reporter | None = None) -> Sandbox:
    """Boot a sandbox, unless one with the same options is up already.

    The remains of a sandbox that crashed, or never came up, are stopped and removed first. Raise UserError if
    something is missing on the machine, a sandbox with other options is up in the same directory, or a daemon
    does not start; nothing is left running then.
    """
    reporter = reporter or Reporter()
    prerequisites.check(options.accounting)
    if options.pyxis is not None:
        prerequisites.check_containers(options.pyxis)
    SandboxPaths(options.directory).check_socket_length(options.nodes)
    try:
        options.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot create {options.directory}: {error.strerror}"
        raise UserError(message, hint="choose another directory: --dir") from error
    with state.locked(options.directory):
        record = state.load(options.directory)
        if record is not None and record.is_up:
            if differences := record.options.differences(options):
                raise UserError(
                    f"a sandbox with other options is up in {options.directory}: {'; '.join(differences)}",
                    hint="stop it first with `slipway sandbox down`, or choose another --dir",
                )
            return Sandbox(record.options, record.ports, was_up=True)
        if record is not None:
            reporter.step("removing an incomplete sandbox")
            stop(record)
            remove_files(record.paths)
            reporter.done("removed an incomplete sandbox")
        try:
            return _boot(options, reporter)
        except BaseException:
            # Succeeds if nothing was left in it.
            with suppress(OSError):
                options.directory.rmdir()
            raise


def down(directory: Path, reporter: Reporter | None = None) -> bool:
    """Stop a sandbox and remove its directory; return True if there was one."""
    reporter = reporter or Reporter()
    directory = directory.resolve()
    if state.load(directory) is None:
        return False
    prerequisites.check_root()
    with state.locked(directory):
        record = state.load(directory)
        if record is None:
            return False
        reporter.step("stopping jobs and daemons")
        stop(record)
        reporter.done("stopped jobs and daemons")
        remove_files(record.paths)
        directory.rmdir()
    return True


def _boot(options: SandboxOptions, reporter: Reporter) -> Sandbox:
    if any(options.directory.iterdir()):
        raise UserError(
            f"{options.directory} contains files that are not a sandbox's",
            hint="choose an empty or a new directory with --dir",
        )
    record = SandboxRecord(options, choose_ports(options))
    record.save()
    try:
        daemons.write_files(record)
        daemons.start_all(DaemonStarter(record, reporter))
    except StartError:
        # The logs stay, to find out why; the next `up` or `down` removes them.
        stop(record)
        record.phase = state.FAILED
        record.save()
        raise
    except BaseException:
        stop(record)
        remove_files(record.paths)
        raise
    record.phase = state.UP
    record.save()
    return Sandbox(options, record.ports)
