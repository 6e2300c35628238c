"""The programs that images are made with: which of them there are, and how they are run."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from launcher.errors import UserError
from launcher.images.complaints import explained

# What each is needed for, and the package of Debian and Ubuntu that has it.
_PACKAGES = {
    "docker": "docker.io",
    "podman": "podman",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "umoci": "umoci",
    "mksquashfs": "squashfs-tools",
    "unsquashfs": "squashfs-tools",
}
_ENROOT = "Enroot is at https://github.com/NVIDIA/enroot/blob/master/doc/installation.md"
_APPTAINER = "Apptainer is at https://apptainer.org/docs/admin/main/installation.html"

TOOLS = (*_PACKAGES, "enroot", "apptainer")

_VERSION_FLAGS = {"mksquashfs": "-version", "unsquashfs": "-version", "enroot": "version"}
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_VERSION_PATIENCE_SECONDS = 10

_TICK_SECONDS = 0.5
# From the request to end to the order.
_GRACE_SECONDS = 5.0
_KEPT_LINES = 40
_LINE_END = re.compile(rb"[\r\n]")

Line = Callable[[str], None]
Tick = Callable[[int], None]


class Tool(NamedTuple):
    """A program on this machine; its version is ``None`` if it does not tell."""

    name: str
    path: Path
    version: str | None


def which(name: str) -> Path | None:
    """Where a program is, as PATH says."""
    found = shutil.which(name)
    return Path(found) if found else None


def find(name: str) -> Tool | None:
    """A program and its version, ``None`` if there is none."""
    path = which(name)
    return Tool(name, path, _version(name, path)) if path else None


def _version(name: str, path: Path) -> str | None:
    try:
        done = subprocess.run(
            [path, _VERSION_FLAGS.get(name, "--version")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # unsquashfs exits with 1 after telling its version.
    found = _VERSION.search(done.stdout.decode(errors="replace"))
    return found[0] if found else None


def missing(*names: str) -> tuple[str, ...]:
    """Those of some programs that are not there."""
    return tuple(name for name in names if which(name) is None)


def how_to_get(*names: str) -> str:
    """What to do about programs that are missing."""
    packages = dict.fromkeys(_PACKAGES[name] for name in names if name in _PACKAGES)
    steps = [f"on Debian and Ubuntu: apt-get install {' '.join(packages)}"] if packages else []
    steps += [_ENROOT] * ("enroot" in names) + [_APPTAINER] * ("apptainer" in names)
    return "\n".join(steps)


def need(*names: str, why: str) -> None:
    """Refuse to go on without some programs.

    Parameters
    ----------
    why
        What they are needed for, such as ``to write a squashfs``.

    Raises
    ------
    UserError
        Naming those that are missing, and where they are from.
    """
    lacking = missing(*names)
    if lacking:
        are = "is" if len(lacking) == 1 else "are"
        raise UserError(
            f"{' and '.join(lacking)} {are} needed {why}, and not on PATH", hint=how_to_get(*lacking)
        )


def run(
    argv: Sequence[str | Path],
    *,
    doing: str,
    program: str | None = None,
    names: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Line | None = None,
    on_tick: Tick | None = None,
    keep: Sequence[int] = (),
) -> str:
    """Run a program to its end, alone in its process group, and return what it wrote to stdout.

    Whatever interrupts this also ends the program and all that it started; so does the end of this process,
    where ``setpriv`` (util-linux) is there.

    Parameters
    ----------
    doing
        What it is run for, as in ``cannot DOING``.
    program
        What it is called in messages, if not by its first word.
    names
        What stands for ``REGISTRY``, ``HOSTNAME`` and ``NAME`` in what is told to do next.
    env
        Variables in addition to this process's own.
    on_line
        Gets the lines of both its outputs while it runs; an end of a line is ``\\r`` too. Nothing is returned
        then.
    on_tick
        Gets its process id twice a second.
    keep
        File descriptors that it is given too, such as a lock that is to last as long as it runs.

    Raises
    ------
    UserError
        If it fails, with its last lines and what can be done about it.
    """
    command = [os.fspath(part) for part in argv]
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        process = subprocess.Popen(
            [*_dying_with_us(), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
            cwd=cwd,
            pass_fds=tuple(keep),
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"cannot {doing}: {error.strerror or error}: {command[0]}") from error
    try:
        output = _outputs(process, tail, on_line, on_tick)
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            assert stream
            stream.close()
    if code:
        said = list(tail) or output.splitlines()[-_KEPT_LINES:]
        plain_http = any(word.endswith("tls-verify=false") for word in command)
        raise explained(doing, program or command[0], code, said, names, plain_http)
    return output


def _dying_with_us() -> tuple[str, ...]:
    path = which("setpriv")
    return (str(path), "--pdeathsig", "TERM", "--") if path else ()


def _outputs(
    process: subprocess.Popen[bytes], tail: deque[str], on_line: Line | None, on_tick: Tick | None
) -> str:
    """Read both outputs to their ends; what is said on stderr, or on both, goes to `tail`."""
    assert process.stdout
    assert process.stderr
    kept: list[bytes] = []
    rest: dict[IO[bytes], bytes] = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for stream in rest:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(_TICK_SECONDS)
            if on_tick:
                on_tick(process.pid)
            for key, _ in ready:
                stream = next(one for one in rest if one is key.fileobj)
                data = os.read(key.fd, 65536)
                if stream is process.stdout and on_line is None:
                    kept.append(data)
                else:
                    *lines, rest[stream] = _LINE_END.split(rest[stream] + data)
                    _tell(lines if data else [*lines, rest[stream]], tail, on_line)
                if not data:
                    selector.unregister(stream)
    return b"".join(kept).decode(errors="replace")


def _tell(lines: Sequence[bytes], tail: deque[str], on_line: Line | None) -> None:
    for raw in lines:
        line = raw.decode(errors="replace").strip()
        if line:
            tail.append(line)
            if on_line:
                on_line(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it started, in good or in bad."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Its group is asked even after its own end: others of it may be left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
