"""Stopping a sandbox: jobs, then daemons, then whatever a job left behind, and no other process."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import processes
from launcher.sandbox.clients import ask
from launcher.sandbox.layout import Layout
from launcher.sandbox.membership import Membership
from launcher.sandbox.state import State

_JOBS_SECONDS = 3.0
_KILL_SECONDS = 10.0
_ACTIVE = ("PENDING", "RUNNING", "SUSPENDED")


def stop(state: State) -> None:
    """Stop every process of a sandbox.

    Raises
    ------
    UserError
        When one of them does not end even when it is killed.
    """
    with Membership(state) as membership:
        if state.is_up:
            _cancel_jobs(state.layout)
        # Killed at once, the database too: nothing that they could still write is kept.
        deadline = time.monotonic() + _KILL_SECONDS
        while remaining := membership.alive():
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in remaining)
                raise UserError(f"these processes of the sandbox do not end: {pids}")
            processes.stop(remaining, signal.SIGKILL, 1)


def remove_files(layout: Layout) -> None:
    """Remove what lies in a sandbox's directory; the directory itself stays.

    Raises
    ------
    UserError
        When something is mounted in it, whose content would be lost.
    """
    mounts = mounts_under(layout.directory)
    if mounts:
        raise UserError(
            f"something is mounted in the sandbox's directory: {', '.join(map(str, mounts))}",
            hint="unmount it first; removing the directory would remove what is mounted",
        )
    for entry in layout.directory.iterdir():
        # The record goes last: without it, what is left would no longer be known as a sandbox.
        if entry == layout.state_file:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    layout.state_file.unlink(missing_ok=True)


def mounts_under(directory: Path) -> list[Path]:
    """Return the mount points below a directory, as this process sees them."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = (Path(line.split()[4]) for line in lines)
    return [point for point in points if point != directory and point.is_relative_to(directory)]


def _cancel_jobs(layout: Layout) -> None:
    """Cancel all jobs, so that their clients hear of it, and give their processes a moment to end."""
    conf = layout.slurm_conf
    for job_state in _ACTIVE:
        ask(conf, "scancel", "--quiet", f"--state={job_state}")
    deadline = time.monotonic() + _JOBS_SECONDS
    while time.monotonic() < deadline and ask(conf, "squeue", "--noheader", seconds=2):
        time.sleep(0.05)
