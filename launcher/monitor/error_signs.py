"""Errors in a job's logs: a small table of what interpreters, libraries and Slurm say, looked for in bytes.

Only words that a sound run does not write are here: NeMo's own level ``E`` is not, nor are NCCL's warnings.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from launcher.runs.reading import open_regular

_TRACEBACK = b"Traceback (most recent call last)"
_SRUN = b"srun: error: "
# What is told at an interpreter's end changes nothing any more.
_HARMLESS_BEFORE = b"Exception ignored in"
# A training that was asked to stop, and has saved.
_HARMLESS_END = b"Exited with exit code 75"
SIGNS: tuple[bytes, ...] = (
    _TRACEBACK,
    b"NCCL error",
    b"ncclUnhandledCudaError",
    b"ncclSystemError",
    b"ncclInternalError",
    b"ncclRemoteError",
    b"Watchdog caught collective operation timeout",
    b"CUDA error",
    b"CUDA out of memory",
    b"Segmentation fault",
    b"Bus error",
    b"oom_kill",
    b"oom-kill",
    _SRUN,
    b"slurmstepd: error: ***",
)
# Our trainer stops at such a loss, and does not write it down as a step.
_DIVERGED = re.compile(
    rb"the (?:training loss|validation loss|gradient norm) [^\r\n]* is -?(?:nan|inf)[^\r\n]*"
)
# The first line that is not a part of the stack tells what was raised.
_RAISED = re.compile(rb"Traceback \(most recent call last\)[^\n]*\n(?:[ \t][^\n]*\n)*([^\s][^\r\n]*)")
_LINE_BYTES = 1 << 12
_LONGEST = 200


def find_errors(log: Path, since: bytes | None = None) -> list[str]:
    """The first line of each kind of error in a log, in their order; none where there is no log.

    Parameters
    ----------
    since
        What is before these words, where they stand last, is of an earlier life of the job.
    """
    with _Mapped(log) as content:
        begin = _begin(content, since)
        found = sorted((at, sign) for sign in SIGNS if (at := _find(content, sign, begin)) >= 0)
        return list(dict.fromkeys(_told(content, at, sign) for at, sign in found))


def find_divergence(log: Path, since: bytes | None = None) -> str | None:
    """What our trainer said of a loss that is not a number."""
    with _Mapped(log) as content:
        found = _DIVERGED.search(content, _begin(content, since))
        return _text(found[0]) if found else None


class _Mapped:
    """A file's content without reading it all into memory; nothing where there is no file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> mmap.mmap | bytes:
        try:
            with open_regular(self._path) as stream:
                self._content: mmap.mmap | bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # of an empty file there is nothing to map
            self._content = b""
        return self._content

    def __exit__(self, *details: object) -> None:
        if isinstance(self._content, mmap.mmap):
            self._content.close()


def _begin(content: mmap.mmap | bytes, since: bytes | None) -> int:
    return 0 if since is None else max(content.rfind(since), 0)


def _find(content: mmap.mmap | bytes, sign: bytes, begin: int) -> int:
    at = content.find(sign, begin)
    while at >= 0 and _is_harmless(content, at, sign):
        at = content.find(sign, at + 1)
    return at


def _is_harmless(content: mmap.mmap | bytes, at: int, sign: bytes) -> bool:
    if sign is _SRUN:
        return _line_at(content, at).rstrip().endswith(_HARMLESS_END)
    if sign is not _TRACEBACK:
        return False
    before = bytes(content[max(at - _LINE_BYTES, 0) : at])
    lines = before.rstrip(b"\r\n").splitlines()
    return bool(lines) and lines[-1].startswith(_HARMLESS_BEFORE)


def _told(content: mmap.mmap | bytes, at: int, sign: bytes) -> str:
    if sign is _TRACEBACK:
        raised = _RAISED.match(content, at)
        return _text(raised[1] if raised else sign)
    return _text(_line_at(content, at))


def _line_at(content: mmap.mmap | bytes, at: int) -> bytes:
    begin = max(content.rfind(end, 0, at) for end in (b"\n", b"\r")) + 1
    return re.split(rb"[\r\n]", bytes(content[begin : at + _LINE_BYTES]), maxsplit=1)[0]


def _text(line: bytes) -> str:
    text = " ".join(line.decode("utf-8", errors="replace").split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
