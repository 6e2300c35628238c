"""Errors in a job's logs: a small table of messages of interpreters, libraries and Slurm, searched as bytes.

A healthy run writes none of them: the table lacks NeMo's own level ``E`` and NCCL's warnings.
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
# An exception at an interpreter's exit has no effect on the run.
_HARMLESS_BEFORE = b"Exception ignored in"
# A training that was told to stop, and has saved.
_HARMLESS_END = b"Exited with exit code %d" % EXIT_INTERRUPTED
PATTERNS: tuple[bytes, ...] = (
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
# Our trainer stops at such a loss, and does not record it as a step.
_DIVERGED = re.compile(
    rb"the (?:training loss|validation loss|gradient norm) [^\r\n]* is -?(?:nan|inf)[^\r\n]*"
)
_DIVERGED_BEGINS = (b"the training loss ", b"the validation loss ", b"the gradient norm ")
# Most patterns have these letters, and most blocks of a log do not: one search in place of nine.
_COMMON = b"rror"
# The first line that is not a part of the stack names the exception.
_RAISED = re.compile(rb"Traceback \(most recent call last\)[^\n]*\n(?:[ \t][^\n]*\n)*([^\s][^\r\n]*)")
_LINE_BYTES = 1 << 12
_STACK_BYTES = 1 << 16
_LONGEST = 200
# A block is searched for one pattern after the other while the processor's cache holds it.
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class LogErrors:
    """The errors in a log.

    Attributes
    ----------
    errors
        The first line of each kind of error, in their order.
    divergence
        Our trainer's message about a loss that is not finite.
    """

    errors: list[str] = field(default_factory=list)
    divergence: str | None = None


def find_errors(log: Path, since: bytes | None = None) -> LogErrors:
    """Search a log of any size for errors, in one pass; a missing log has none.

    Parameters
    ----------
    since
        Everything before the last occurrence of these words is of an earlier attempt of the job.
    """
    try:
        with open_regular(log, buffering=0) as stream:
            return _Search(stream, since).run()
    except OSError:
        return LogErrors()


class _Search:
    """A search for the first occurrence of each pattern, block by block, and for its line."""

    def __init__(self, stream: BinaryIO, since: bytes | None) -> None:
        self._stream = stream
        self._since = since
        self._begin = 0
        self._errors: dict[bytes, int] = {}
        self._divergence: str | None = None
        # The end of a block that may hold the beginning of a pattern is searched again with the next block.
        self._overlap = max(map(len, (*PATTERNS, *_DIVERGED_BEGINS, since or b""))) - 1

    def run(self) -> LogErrors:
        for base, content in self._blocks():
            self._begin_attempt(base, content)
            begin = max(self._begin - base, 0)
            has_common = content.find(_COMMON, begin) >= 0
            for pattern in PATTERNS:
                if pattern not in self._errors and (has_common or _COMMON not in pattern):
                    self._search(pattern, base, content, begin)
            if self._divergence is None:
                self._search_divergence(base, content, begin)
        matches = sorted((at, pattern) for pattern, at in self._errors.items())
        errors = dict.fromkeys(self._message(at, pattern) for at, pattern in matches)
        return LogErrors(list(errors), self._divergence)

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        base, rest = 0, b""
        while block := self._stream.read(_BLOCK_BYTES):
            content = rest + block
            yield base, content
            rest = content[-self._overlap :]
            base += len(content) - len(rest)

    def _begin_attempt(self, base: int, content: bytes) -> None:
        at = -1 if self._since is None else content.rfind(self._since)
        if at >= 0 and base + at > self._begin:
            self._begin, self._errors, self._divergence = base + at, {}, None

    def _search(self, pattern: bytes, base: int, content: bytes, begin: int) -> None:
        at = content.find(pattern, begin)
        while at >= 0 and self._is_harmless(base + at, pattern):
            at = content.find(pattern, at + 1)
        if at >= 0:
            self._errors[pattern] = base + at

    def _search_divergence(self, base: int, content: bytes, begin: int) -> None:
        hits = (at for words in _DIVERGED_BEGINS for at in _all(content, words, begin))
        for at in sorted(hits):
            if match := _DIVERGED.match(self._read(base + at, base + at + _LINE_BYTES)):
                self._divergence = _text(match[0])
                return

    def _is_harmless(self, at: int, pattern: bytes) -> bool:
        if pattern is _SRUN:
            return self._line_at(at).rstrip().endswith(_HARMLESS_END)
        if pattern is not _TRACEBACK:
            return False
        lines = self._read(max(at - _LINE_BYTES, 0), at).rstrip(b"\r\n").splitlines()
        return bool(lines) and lines[-1].startswith(_HARMLESS_BEFORE)

    def _message(self, at: int, pattern: bytes) -> str:
        if pattern is _TRACEBACK:
            raised = _RAISED.match(self._read(at, at + _STACK_BYTES))
            return _text(raised[1] if raised else pattern)
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
