"""Imports in processes of their own, and programs that report when they work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

# Like the command, it prints a user's mistake, and an interruption ends it.
_SCRIPT = """
import sys
from pathlib import Path
from launcher.images.importing import ImportOptions, import_image
from launcher.images.progress import show_progress
from launcher.images.references import Reference
from launcher.errors import UserError
try:
    with show_progress() as progress:
        done = import_image(
            Reference.parse(sys.argv[1]), Path(sys.argv[2]),
            ImportOptions(
                compression=sys.argv[3], force="force" in sys.argv[4:], plain_http="plain" in sys.argv[4:]
            ),
            progress,
        )
except UserError as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
print("reused" if done.reused else "made", done.digest)
"""


def start(
    source: str,
    target: Path,
    *words: str,
    compression: str = "auto",
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start an import as a process; it prints at its end whether the image was ``made`` or ``reused``."""
    command = [sys.executable, "-c", _SCRIPT, source, str(target), compression, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        stdout=pipe,
        stderr=pipe,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment or dict(os.environ),
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process; return its exit code and its outputs."""
    out, err = process.communicate()
    return process.returncode, out, err


def wrap_program(directory: Path, name: str, before: str) -> dict[str, str]:
    """Return an environment in which a program runs a shell command before its work."""
    directory.mkdir(exist_ok=True)
    real = shutil.which(name)
    assert real
    program = directory / name
    # A call with one argument asks for the version only.
    program.write_text(f'#!/bin/sh\nif [ $# -gt 1 ]; then\n{before}\nfi\nexec {real} "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}


def stand_ins(directory: Path, *names: str) -> str:
    """Return a PATH with only some programs; a test might overwrite the real ones through links."""
    directory.mkdir(exist_ok=True)
    for name in names:
        real = shutil.which(name)
        assert real
        (directory / name).write_text(f'#!/bin/sh\nexec {real} "$@"\n')
        (directory / name).chmod(0o755)
    return str(directory)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a file has content; the process must still run."""
    while not (path.exists() and path.read_text().strip()):
        assert process.poll() is None, end(process)
        time.sleep(0.02)


def has_ended(pid: int, patience: float = 20.0) -> bool:
    """Return True as soon as a process has ended; a killed one may need a moment on a busy machine."""
    deadline = time.monotonic() + patience
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
