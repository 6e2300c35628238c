"""Reading what `launcher.monitor.verification` judges: a run's launches, logs, checkpoints and outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.jobs.launches import Launch, adopt, open_launch, read_launch
from launcher.jobs.status import LaunchStatus, current_statuses, poll
from launcher.monitor.curves import Curves
from launcher.monitor.error_signs import LogSigns, find_signs
from launcher.monitor.evidence import Evidence
from launcher.monitor.log_files import began, job_logs, modified, rank_failures
from launcher.monitor.outputs import wanted_outputs
from launcher.monitor.progress import Progress
from launcher.monitor.readers import all_events
from launcher.monitor.saved import find_saved
from launcher.runs.manifest import read_yaml
from launcher.runs.paths import launch_numbers
from launcher.schedulers.base import JobStatus
from supervisor.files import open_regular, whole

_ERROR_LOG = "nemo_error_log.txt"
_RANK_LOG = re.compile(r"nemo_log_globalrank-(\d+)_")
_END = re.compile(rb"end at step (\d{1,15}): \w+")
_TAIL_BYTES = 1 << 16
# In the line with which the job script begins: each life of a requeued job writes it into the same log.
_LIFE_BEGINS = b"; rendezvous at "


@dataclass(frozen=True)
class Gathered:
    """What was read of a run, and of which launch."""

    launch: Launch
    evidence: Evidence


def gather(run_dir: Path, number: int | None = None) -> Gathered:
    """Read a run up to one of its launches, by default that which counts now.

    Raises
    ------
    UserError
        If there is no such launch, or it cannot be read.
    """
    item = _status_of(run_dir, number)
    if item.launch is None:
        raise UserError(f"the run in {run_dir} cannot be read: {item.status.reason}")
    launch, status = item.launch, item.status
    read = _read_training if launch.manifest.stage == "training" else _read_data_preparation
    return Gathered(launch, read(launch, status))


def _status_of(run_dir: Path, number: int | None) -> LaunchStatus:
    if number is None and (current := current_statuses([run_dir])):
        return current[0]
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
        tells_each_step=engine == "megatron",
        curves=curves,
        diverged=next((log.divergence for log in logs.values() if log.divergence), None),
        ranks=launch.nodes * launch.manifest.tasks_per_node,
        ended_ranks=_ended_ranks(launch, progress.step) if engine == "megatron" else None,
        errors=_errors(launch, logs),
        saved=find_saved(config, launch.paths, engine),
    )


def _read_data_preparation(launch: Launch, status: JobStatus) -> Evidence:
    wanted = wanted_outputs(launch.paths.script)
    missing = [path for path in wanted or () if not path.is_file() or not path.stat().st_size]
    return Evidence(
        stage=launch.manifest.stage,
        status=status,
        job=launch.job_in(status),
        errors=_errors(launch, _read_logs(launch)),
        outputs=None if wanted is None else [str(path) for path in wanted],
        missing_outputs=[str(path) for path in missing],
    )


def _config(launch: Launch) -> Mapping[str, Any]:
    """The configuration that the job read; nothing where it cannot be read."""
    try:
        content = read_yaml(launch.paths.config)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _whole(config: Mapping[str, Any], node: str, key: str) -> int | None:
    keys = config.get(node)
    return whole(keys.get(key), 1) if isinstance(keys, dict) else None


def _earlier_curves(launch: Launch) -> Curves:
    """The curves over the launches before this one; a launch that cannot be read leaves its hole."""
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
    """The job's logs, those of an array's tasks, or of a chain those of its last link."""
    logs = [job_logs(launch, extension) for extension in ("out", "err")]
    return [log for found in logs for log in (found[-1:] if launch.is_chain else found)]


def _read_logs(launch: Launch) -> dict[Path, LogSigns]:
    return {log: find_signs(log, _LIFE_BEGINS) for log in _newest_logs(launch)}


def _errors(launch: Launch, logs: Mapping[Path, LogSigns]) -> list[str] | None:
    """What ranks left of errors, and then what the logs tell of them."""
    failures = [f"rank {told.rank}: {told.error}" for told in rank_failures(launch)]
    if not failures:
        # Our trainer's error log says of failed ranks what they themselves left.
        error_log = launch.paths.results / _ERROR_LOG
        logs = {error_log: find_signs(error_log, _LIFE_BEGINS), **logs}
    since = began(launch)
    found = [
        f"{log.name}: {told}"
        for log, signs in logs.items()
        if modified(log) >= since
        for told in signs.errors
    ]
    return [*failures, *found] if failures or any(log.is_file() for log in logs) else None


def _ended_ranks(launch: Launch, step: int | None) -> frozenset[int]:
    """The ranks whose own logs say, last of all, that they ended at a step."""
    ended = set()
    for path in launch.paths.results.glob("nemo_log_globalrank-*.txt"):
        named = _RANK_LOG.match(path.name)
        found = _END.findall(_tail(path))
        if named and found and int(found[-1]) == step:
            ended.add(int(named[1]))
    return frozenset(ended)


def _tail(path: Path) -> bytes:
    try:
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(size - _TAIL_BYTES, 0))
            return stream.read(_TAIL_BYTES)
    except OSError:
        return b""
