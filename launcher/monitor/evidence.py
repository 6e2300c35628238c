"""The evidence about a run that `launcher.monitor.verification` judges: its launches, logs and files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

from launcher.errors import UserError
from launcher.jobs.launches import Launch, adopt, open_launch, read_launch
from launcher.jobs.status import LaunchStatus, current_statuses, poll
from launcher.monitor.checkpoints import SavedCheckpoint, find_saved
from launcher.monitor.curves import Curves
from launcher.monitor.events import Progress
from launcher.monitor.logs import began, job_logs, modified, rank_failures
from launcher.monitor.readers import all_events
from launcher.runs.manifest import read_yaml
from launcher.runs.paths import launch_numbers
from launcher.schedulers.base import JobStatus
from supervisor.files import open_regular, whole
from supervisor.rules import EXIT_INTERRUPTED


@dataclass(frozen=True)
class Evidence:
    """The facts about a run.

    Attributes
    ----------
    step, end
        The last step of this launch, and the trainer's reason for its end.
    records_each_step
        True if the trainer records every step, so that a missing one is a hole.
    diverged
        The trainer's message about a loss that is not finite, with which it stops.
    ranks, ended_ranks
        The number of ranks, and those that recorded their end; ``None`` if the trainer's ranks do not.
    errors
        Errors of ranks, libraries and Slurm, each with the file that has it; ``None`` without a log.
    saved
        The newest checkpoint; ``None`` if the configuration writes none.
    missing_outputs, outputs
        The missing and the expected files of a job that writes files; ``None`` if these are not known.
    """

    stage: str
    status: JobStatus
    job: str
    max_steps: int | None = None
    step: int | None = None
    end: str | None = None
    records_each_step: bool = True
    curves: Curves = field(default_factory=Curves)
    diverged: str | None = None
    ranks: int = 1
    ended_ranks: frozenset[int] | None = None
    errors: Sequence[str] | None = ()
    saved: SavedCheckpoint | None = None
    outputs: Sequence[str] | None = None
    missing_outputs: Sequence[str] = ()

    @property
    def is_over(self) -> bool:
        return self.status.state.is_final


# --- the files that a job writes

# Beside its prefix.
_SUFFIXES = (".bin", ".idx")
# The record in the output of a conversion, which is there once the output is whole.
_CONVERTED = "conversion.json"
_STEP = "{step}"


def expected_outputs(config: Mapping[str, Any]) -> list[Path] | None:
    """Return the files that a job writes by its configuration; ``None`` if this does not name them."""
    conversion, evaluation = config.get("conversion"), config.get("evaluation")
    if isinstance(conversion, dict):
        return _of_steps(conversion.get("output"), conversion.get("step"), _CONVERTED)
    if isinstance(evaluation, dict):
        directory = evaluation.get("results")
        pattern = f"{directory}/step-{_STEP}.json" if isinstance(directory, str) else None
        return _of_steps(pattern, evaluation.get("step"))
    return _prepared_files(config)


def _of_steps(pattern: object, steps: object, *below: str) -> list[Path] | None:
    """Return the path for each step, or those that are there if the job itself chose the steps."""
    if not isinstance(pattern, str):
        return None
    numbers = [step for step in (steps if isinstance(steps, list) else [steps]) if isinstance(step, int)]
    if numbers or _STEP not in pattern:
        paths = [Path(pattern.replace(_STEP, str(number))) for number in numbers] or [Path(pattern)]
    else:
        fixed = next(parent for parent in Path(pattern).parents if _STEP not in str(parent))
        relative = escape(str(Path(pattern).relative_to(fixed))).replace(_STEP, "[0-9]*")
        paths = sorted(fixed.glob(relative)) or [Path(pattern)]
    return [path.joinpath(*below) for path in dict.fromkeys(paths)]


def _prepared_files(config: Mapping[str, Any]) -> list[Path] | None:
    node = config.get("data_preparation")
    if not isinstance(node, dict):
        return None
    prefix, splits = node.get("output_prefix"), node.get("splits")
    if not isinstance(prefix, str) or not isinstance(splits, dict | None):
        return None
    if node.get("phase") in ("fetch", "tokenize"):
        return []  # what they write is removed when it is merged
    prefixes = [f"{prefix}_{split}" for split in splits] if splits else [prefix]
    data = [Path(f"{name}{suffix}") for name in prefixes for suffix in _SUFFIXES]
    return [*data, Path(f"{prefix}.manifest.json")]


# --- what a launch left behind

_ERROR_LOG = "nemo_error_log.txt"
_RANK_LOG = re.compile(r"nemo_log_globalrank-(\d+)_")
_END = re.compile(rb"end at step (\d{1,15}): \w+")
_TAIL_BYTES = 1 << 16
# In the first line of the job script: each attempt of a requeued job writes it into the same log.
_ATTEMPT_BEGINS = b"; rendezvous at "


@dataclass(frozen=True)
class RunEvidence:
    """The evidence about a run, and its launch."""

    launch: Launch
    evidence: Evidence


def gather(run_dir: Path, number: int | None = None) -> RunEvidence:
    """Gather the evidence about a run up to one of its launches, by default the current one.

    Raises
    ------
    UserError
        If there is no such launch, or it cannot be read.
    """
    tracked = _tracked(run_dir, number)
    if tracked.launch is None:
        raise UserError(f"the run in {run_dir} cannot be read: {tracked.status.reason}")
    launch, status = tracked.launch, tracked.status
    read = _read_training if launch.manifest.stage == "training" else _read_files_written
    return RunEvidence(launch, read(launch, status))


def _tracked(run_dir: Path, number: int | None) -> LaunchStatus:
    if number is None and (launches := current_statuses([run_dir])):
        return launches[0]
    launch = open_launch(run_dir, number)
    return poll([launch])[0]


def _read_training(launch: Launch, status: JobStatus) -> Evidence:
    config = _config(launch)
    progress, curves, engine = Progress(), _earlier_curves(launch), launch.manifest.engine
    for event in all_events(launch):
        progress.take(event)
        curves.take(event)
    logs = _read_logs(launch)
    return Evidence(
        stage="training",
        status=status,
        job=launch.job_in(status),
        max_steps=progress.max_steps or _whole(config, "trainer", "max_steps"),
        step=progress.step,
        end=progress.end.reason if progress.end else None,
        records_each_step=engine == "megatron",
        curves=curves,
        diverged=next((log.divergence for log in logs.values() if log.divergence), None),
        ranks=launch.nodes * launch.manifest.tasks_per_node,
        ended_ranks=_ended_ranks(launch, progress.step) if engine == "megatron" else None,
        errors=_errors(launch, logs),
        saved=find_saved(config, launch.paths, engine),
    )


def _read_files_written(launch: Launch, status: JobStatus) -> Evidence:
    outputs = expected_outputs(_config(launch))
    if launch.manifest.engine == "nemo" and outputs is not None:
        outputs = [path.parent for path in outputs]  # NeMo's scripts leave no record beside what they write
    missing = [path for path in outputs or () if _is_empty(path)]
    return Evidence(
        stage=launch.manifest.stage,
        status=status,
        job=launch.job_in(status),
        errors=_errors(launch, _read_logs(launch)),
        outputs=None if outputs is None else [str(path) for path in outputs],
        missing_outputs=[str(path) for path in missing],
    )


def _is_empty(path: Path) -> bool:
    """Return True for a file or directory that is not there, or holds nothing."""
    if path.is_dir():
        return next(path.iterdir(), None) is None
    return not path.is_file() or not path.stat().st_size


def _config(launch: Launch) -> Mapping[str, Any]:
    """Return the configuration that the job read; an empty one if it cannot be read."""
    try:
        content = read_yaml(launch.paths.config)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _whole(config: Mapping[str, Any], node: str, key: str) -> int | None:
    keys = config.get(node)
    return whole(keys.get(key), 1) if isinstance(keys, dict) else None


def _earlier_curves(launch: Launch) -> Curves:
    """Return the curves over the launches before this one; an unreadable launch leaves a hole."""
    curves = Curves()
    for number in launch_numbers(launch.paths.run_dir):
        if number >= launch.paths.number:
            break
        try:
            (earlier,) = adopt([read_launch(launch.paths.run_dir, number)])
        except UserError:
            continue
        curves.add(all_events(earlier))
    return curves


def _newest_logs(launch: Launch) -> list[Path]:
    """Return the job's logs, those of an array's tasks, or those of a chain's last link."""
    by_extension = [job_logs(launch, extension) for extension in ("out", "err")]
    return [log for logs in by_extension for log in (logs[-1:] if launch.is_chain else logs)]


def _read_logs(launch: Launch) -> dict[Path, LogErrors]:
    return {log: find_errors(log, _ATTEMPT_BEGINS) for log in _newest_logs(launch)}


def _errors(launch: Launch, logs: Mapping[Path, LogErrors]) -> list[str] | None:
    """Return the failures that ranks recorded, and then the errors in the logs."""
    failures = [f"rank {failure.rank}: {failure.error}" for failure in rank_failures(launch)]
    if not failures:
        # Our trainer's error log repeats the failures that ranks recorded.
        error_log = launch.paths.results / _ERROR_LOG
        logs = {error_log: find_errors(error_log, _ATTEMPT_BEGINS), **logs}
    since = began(launch)
    errors = [
        f"{log.name}: {error}"
        for log, log_errors in logs.items()
        if modified(log) >= since
        for error in log_errors.errors
    ]
    return [*failures, *errors] if failures or any(log.is_file() for log in logs) else None


def _ended_ranks(launch: Launch, step: int | None) -> frozenset[int]:
    """Return the ranks whose own logs end with the message that they ended at a step."""
    ended = set()
    for path in launch.paths.results.glob("nemo_log_globalrank-*.txt"):
        rank = _RANK_LOG.match(path.name)
        steps = _END.findall(_tail(path))
        if rank and steps and int(steps[-1]) == step:
            ended.add(int(rank[1]))
    return frozenset(ended)


def _tail(path: Path) -> bytes:
    try:
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(size - _TAIL_BYTES, 0))
            return stream.read(_TAIL_BYTES)
    except OSError:
        return b""


# --- errors in logs

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
