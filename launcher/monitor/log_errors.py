"""Errors in a job's logs: a small table of what interpreters, libraries and Slurm say, looked for in bytes.

Only words that a sound run does not write are here: NeMo's own level ``E`` is not, nor are NCCL's warnings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from supervisor.files import open_regular
from supervisor.rules import EXIT_INTERRUPTED

_TRACEBACK = b"Traceback (most recent call last)"
_SRUN = b"srun: error: "
# What is told at an interpreter's end changes nothing any more.
_HARMLESS_BEFORE = b"Exception ignored in"
# A training that was asked to stop, and has saved.
_HARMLESS_END = b"Exited with exit code %d" % EXIT_INTERRUPTED
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
_DIVERGED_BEGINS = (b"the training loss ", b"the validation loss ", b"the gradient norm ")
# Most signs have these letters, and most blocks of a log do not: one search in place of nine.
_COMMON = b"rror"
# The first line that is not a part of the stack tells what was raised.
_RAISED = re.compile(rb"Traceback \(most recent call last\)[^\n]*\n(?:[ \t][^\n]*\n)*([^\s][^\r\n]*)")
_LINE_BYTES = 1 << 12
_STACK_BYTES = 1 << 16
_LONGEST = 200
# So much is read at once, and searched for one thing after the other while the processor's cache holds it.
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class LogSigns:
    """What a log tells of errors.

    Attributes
    ----------
    errors
        The first line of each kind of error, in their order.
    divergence
        What our trainer said of a loss that is not a number.
    """

    errors: list[str] = field(default_factory=list)
    divergence: str | None = None


def find_signs(log: Path, since: bytes | None = None) -> LogSigns:
    """Look for errors in a log of any size, read once; there are none where there is no log.

    Parameters
    ----------
    since
        What is before these words, where they stand last, is of an earlier life of the job.
    """
    try:
        with open_regular(log, buffering=0) as stream:
            return _Search(stream, since).run()
    except OSError:
        return LogSigns()


class _Search:
    """Finds where each sign stands first, block by block; what surrounds it is read where one is found."""

    def __init__(self, stream: BinaryIO, since: bytes | None) -> None:
        self._stream = stream
        self._since = since
        self._begin = 0
        self._errors: dict[bytes, int] = {}
        self._divergence: str | None = None
        # As much of a block is searched with the next one again as may hold the beginning of a sign.
        self._overlap = max(map(len, (*SIGNS, *_DIVERGED_BEGINS, since or b""))) - 1

    def run(self) -> LogSigns:
        for base, content in self._blocks():
            self._begin_life(base, content)
            begin = max(self._begin - base, 0)
            has_common = content.find(_COMMON, begin) >= 0
            for sign in SIGNS:
                if sign not in self._errors and (has_common or _COMMON not in sign):
                    self._look_for(sign, base, content, begin)
            if self._divergence is None:
                self._look_for_divergence(base, content, begin)
        found = sorted((at, sign) for sign, at in self._errors.items())
        return LogSigns(list(dict.fromkeys(self._told(at, sign) for at, sign in found)), self._divergence)

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        base, rest = 0, b""
        while block := self._stream.read(_BLOCK_BYTES):
            content = rest + block
            yield base, content
            rest = content[-self._overlap :]
            base += len(content) - len(rest)

    def _begin_life(self, base: int, content: bytes) -> None:
        at = -1 if self._since is None else content.rfind(self._since)
        if at >= 0 and base + at > self._begin:
            self._begin, self._errors, self._divergence = base + at, {}, None

    def _look_for(self, sign: bytes, base: int, content: bytes, begin: int) -> None:
        at = content.find(sign, begin)
        while at >= 0 and self._is_harmless(base + at, sign):
            at = content.find(sign, at + 1)
        if at >= 0:
            self._errors[sign] = base + at

    def _look_for_divergence(self, base: int, content: bytes, begin: int) -> None:
        hits = (at for words in _DIVERGED_BEGINS for at in _all(content, words, begin))
        for at in sorted(hits):
            if found := _DIVERGED.match(self._read(base + at, base + at + _LINE_BYTES)):
                self._divergence = _text(found[0])
                return

    def _is_harmless(self, at: int, sign: bytes) -> bool:
        if sign is _SRUN:
            return self._line_at(at).rstrip().endswith(_HARMLESS_END)
        if sign is not _TRACEBACK:
            return False
        lines = self._read(max(at - _LINE_BYTES, 0), at).rstrip(b"\r\n").splitlines()
        return bool(lines) and lines[-1].startswith(_HARMLESS_BEFORE)

    def _told(self, at: int, sign: bytes) -> str:
        if sign is _TRACEBACK:
            raised = _RAISED.match(self._read(at, at + _STACK_BYTES))
            return _text(raised[1] if raised else sign)
        return _text(self._line_at(at))

    def _line_at(self, at: int) -> bytes:
        before = re.split(rb"[\r\n]", self._read(max(at - _LINE_BYTES, 0), at))[-1]
        return before + re.split(rb"[\r\n]", self._read(at, at + _LINE_BYTES), maxsplit=1)[0]

    def _read(self, begin: int, end: int) -> bytes:
        return os.pread(self._stream.fileno(), end - begin, begin)


def _all(content: bytes, words: bytes, begin: int) -> Iterator[int]:
    at = content.find(words, begin)
    while at >= 0:
        yield at
        at = content.find(words, at + 1)


def _text(line: bytes) -> str:
    text = " ".join(line.decode("utf-8", errors="replace").split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
