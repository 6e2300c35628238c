"""The evidence about a run that `launcher.monitor.verification` judges: its launches, logs and files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.jobs.launches import Launch, adopt, open_launch, read_launch
from launcher.jobs.lookup import RunRef
from launcher.jobs.status import current_statuses, poll
from launcher.monitor.checkpoints import SavedCheckpoint, find_saved
from launcher.monitor.curves import Curves
from launcher.monitor.logs import LogReader, get_change_time, get_last_start, job_logs, rank_failures
from launcher.monitor.progress import Progress
from launcher.monitor.readers import all_events
from launcher.runs.manifest import read_yaml
from launcher.runs.paths import launch_numbers
from launcher.runs.trained import node
from launcher.schedulers.base import JobStatus
from slipway.common.files import open_regular, read_int
from slipway.common.node.settings import EXIT_INTERRUPTED


@dataclass(frozen=True)
class Evidence:
    """The facts about a run, up to one of its launches.

    `step` is the last step of this launch, and `end` the trainer's reason for its end; `records_each_step` is
    True if a missing step is a hole. `diverged` is the trainer's message about a loss that is not finite,
    with which it stops. `ended_ranks` are those that recorded their end, ``None`` if the engine's do not.
    `errors` are those of ranks, libraries and Slurm, each with the file that has it, ``None`` without a log.
    `saved` is the newest checkpoint, ``None`` if the configuration writes none. `outputs` are the files that
    the job is to write, ``None`` if they are not known.
    """

    launch: Launch
    status: JobStatus
    errors: Sequence[str] | None
    ranks: int = 1
    max_steps: int | None = None
    step: int | None = None
    end: str | None = None
    records_each_step: bool = True
    curves: Curves = field(default_factory=Curves)
    diverged: str | None = None
    ended_ranks: frozenset[int] | None = None
    saved: SavedCheckpoint | None = None
    outputs: Sequence[Path] | None = None
    missing_outputs: Sequence[Path] = ()

    @property
    def is_over(self) -> bool:
        return self.status.state.is_final


# --- the files that a job writes

# The files of a data set, by its prefix.
_SUFFIXES = (".bin", ".idx")
# The record in the output of a conversion, which is there once the output is whole.
_CONVERTED = "conversion.json"
_STEP = "{step}"


def expected_outputs(config: Mapping[str, Any]) -> list[Path] | None:
    """Return the files that a job writes by its configuration; ``None`` if this does not name them."""
    if conversion := node(config, "conversion"):
        return _find_outputs(conversion.get("output"), conversion.get("step"), _CONVERTED)
    if evaluation := node(config, "evaluation"):
        directory = evaluation.get("results")
        pattern = f"{directory}/step-{_STEP}.json" if isinstance(directory, str) else None
        return _find_outputs(pattern, evaluation.get("step"))
    preparation = node(config, "data_preparation")
    prefix, splits = preparation.get("output_prefix"), preparation.get("splits")
    if not isinstance(prefix, str) or not isinstance(splits, dict | None):
        return None
    if preparation.get("phase") in ("fetch", "tokenize"):
        return []  # merging removes their output
    prefixes = [f"{prefix}_{split}" for split in splits] if splits else [prefix]
    data = [Path(f"{name}{suffix}") for name in prefixes for suffix in _SUFFIXES]
    return [*data, Path(f"{prefix}.manifest.json")]


def _find_outputs(pattern: object, steps: object, *below: str) -> list[Path] | None:
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


# --- the files that a launch left

_ERROR_LOG = "nemo_error_log.txt"
_RANK_LOG = re.compile(r"nemo_log_globalrank-(\d+)_")
_END = re.compile(r"end at step (\d{1,15}): \w+", re.ASCII)
_TAIL_BYTES = 1 << 16
# In the first line of the job script: each attempt of a requeued job writes it into the same log.
_ATTEMPT_BEGINS = "; rendezvous at "


def gather(run_dir: Path, number: int | None = None) -> Evidence:
    """Gather the evidence up to a launch (default: the current one); raise UserError without launches."""
    statuses = current_statuses([RunRef(run_dir)]) if number is None else []
    tracked = (statuses or poll([open_launch(run_dir, number)]))[0]
    launch = tracked.launch
    if launch is None:
        raise UserError(f"the run in {run_dir} cannot be read: {tracked.reason}")
    engine, config = launch.manifest.engine, _config(launch)
    searched: dict[Path, LogErrors] = {}
    for logs in (job_logs(launch, extension) for extension in ("out", "err")):
        current = logs[-1:] if launch.is_chain else logs  # of a chain those of its last link
        searched |= {log: find_errors(log, _ATTEMPT_BEGINS) for log in current}
    evidence = Evidence(launch, tracked, _errors(launch, searched))
    if launch.manifest.stage != "training":
        outputs = expected_outputs(config)
        if engine == "nemo" and outputs is not None:
            # NeMo's scripts leave no record of their output.
            outputs = [path.parent for path in outputs]
        missing = [path for path in outputs or () if _is_empty(path)]
        return replace(evidence, outputs=outputs, missing_outputs=missing)
    progress, curves = Progress(), _earlier_curves(launch)
    for event in all_events(launch):
        progress.take(event)
        curves.take(event)
    return replace(
        evidence,
        ranks=launch.nodes * launch.manifest.tasks_per_node,
        max_steps=progress.max_steps or read_int(node(config, "trainer").get("max_steps"), 1),
        step=progress.step,
        end=progress.end.reason if progress.end else None,
        records_each_step=engine == "megatron",
        curves=curves,
        diverged=next((log.divergence for log in searched.values() if log.divergence), None),
        ended_ranks=_find_ended_ranks(launch, progress.step) if engine == "megatron" else None,
        saved=find_saved(config, launch.paths, engine),
    )


def _is_empty(path: Path) -> bool:
    """Return True for a file or directory that is not there, or holds nothing."""
    if path.is_dir():
        return next(path.iterdir(), None) is None
    return not path.is_file() or not path.stat().st_size


def _config(launch: Launch) -> Mapping[str, Any]:
    """Return the configuration that the job read; an empty one if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_yaml(launch.paths.config)
    return {}


def _earlier_curves(launch: Launch) -> Curves:
    """Return the curves over the launches before this one; an unreadable launch leaves a hole."""
    curves = Curves()
    for number in launch_numbers(launch.paths.run_dir):
        if number < launch.paths.number:
            with contextlib.suppress(UserError):
                curves.add(all_events(*adopt([read_launch(launch.paths.run_dir, number)])))
    return curves


def _errors(launch: Launch, logs: Mapping[Path, LogErrors]) -> list[str] | None:
    """Return the failures that ranks recorded, and then the errors in the logs."""
    failures = [f"rank {failure.rank}: {failure.error}" for failure in rank_failures(launch)]
    if not failures:
        # Our trainer's error log repeats the failures that ranks recorded.
        error_log = launch.paths.results / _ERROR_LOG
        logs = {error_log: find_errors(error_log, _ATTEMPT_BEGINS), **logs}
    since = get_last_start(launch)
    current = [(log, errors.errors) for log, errors in logs.items() if get_change_time(log) >= since]
    errors = [f"{log.name}: {error}" for log, messages in current for error in messages]
    return [*failures, *errors] if failures or any(log.is_file() for log in logs) else None


def _find_ended_ranks(launch: Launch, step: int | None) -> frozenset[int]:
    """Return the ranks whose own logs end with the message that they ended at a step."""
    ended = set()
    for path in launch.paths.results.glob("nemo_log_globalrank-*.txt"):
        with contextlib.suppress(OSError):
            end = LogReader(path, max(path.stat().st_size - _TAIL_BYTES, 0)).poll()
            rank, steps = _RANK_LOG.match(path.name), _END.findall(end)
            if rank and steps and int(steps[-1]) == step:
                ended.add(int(rank[1]))
    return frozenset(ended)


# --- errors in logs

_TRACEBACK = "Traceback (most recent call last)"
_SRUN = "srun: error: "
# An exception at an interpreter's exit has no effect on the run.
_HARMLESS_BEFORE = "Exception ignored in"
# A training that was asked to stop, and has saved.
_HARMLESS_END = f"Exited with exit code {EXIT_INTERRUPTED}"
PATTERNS: tuple[str, ...] = (
    _TRACEBACK,
    "NCCL error",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclRemoteError",
    "Watchdog caught collective operation timeout",
    "CUDA error",
    "CUDA out of memory",
    "Segmentation fault",
    "Bus error",
    "oom_kill",
    "oom-kill",
    _SRUN,
    "slurmstepd: error: ***",
)
# Each pattern contains one of these words; most blocks of a log contain none.
_CUES = ("rror", _TRACEBACK, "Watchdog caught", "CUDA out", "Segmentation", "oom_kill", "oom-kill")
# Our trainer stops at such a loss, and does not record it as a step.
_DIVERGED = re.compile(r"the (?:training loss|validation loss|gradient norm) .* is -?(?:nan|inf).*")
_BLOCK_CHARACTERS = 1 << 18
_LONGEST_LINE = 1 << 16
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class LogErrors:
    """The errors in a log, and our trainer's message about a loss that is not finite."""

    errors: list[str] = field(default_factory=list)
    divergence: str | None = None


def find_errors(log: Path, since: str | None = None) -> LogErrors:
    """Search a log of any size for the first line with each pattern; a missing log has no errors.

    Everything before the last occurrence of the words of `since` is of an earlier attempt of the job.
    """
    found: dict[str, str] = {}
    divergence, before, is_in_stack = None, "", False
    for line in _telling_lines(log, since):
        if since and since in line:
            line = line[line.rindex(since) :]
            found, divergence, is_in_stack = {}, None, False
        if is_in_stack and line[:1] not in (" ", "\t"):
            # The first line that is not a part of the stack names the exception.
            found[_TRACEBACK] = _text(line) or _TRACEBACK
            is_in_stack = False
        for pattern in PATTERNS:
            if pattern in line and pattern not in found and not _is_harmless(pattern, line, before):
                found[pattern] = _TRACEBACK if pattern is _TRACEBACK else _text(line)
                is_in_stack |= pattern is _TRACEBACK
        if divergence is None and (match := _DIVERGED.search(line)):
            divergence = _text(match[0])
        before = line
    return LogErrors(list(dict.fromkeys(found.values())), divergence)


def _telling_lines(log: Path, since: str | None) -> Iterator[str]:
    """Yield the lines of the blocks of a log that may have errors, and those of the block after each."""
    cues, is_near = (*_CUES, *filter(None, [since])), False
    with (
        contextlib.suppress(OSError),
        open_regular(log) as stream,
        TextIOWrapper(stream, "latin-1") as lines,
    ):
        while block := lines.read(_BLOCK_CHARACTERS):
            block += lines.readline(_LONGEST_LINE)
            was_near, is_near = is_near, any(cue in block for cue in cues) or bool(_DIVERGED.search(block))
            # Not splitlines(), to which the second byte of a letter may be an end.
            text = block.removesuffix("\n").split("\n")
            yield from text if is_near or was_near else text[-1:]


def _is_harmless(pattern: str, line: str, before: str) -> bool:
    if pattern is _SRUN:
        return line.rstrip().endswith(_HARMLESS_END)
    return pattern is _TRACEBACK and before.startswith(_HARMLESS_BEFORE)


def _text(line: str) -> str:
    text = " ".join(line.encode("latin-1").decode("utf-8", errors="replace").split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
