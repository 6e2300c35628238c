"""Runs on disk as the launcher and the trainer write them, and a scheduler with the answers of a test."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.cli import history, logs, status, watch
from launcher.cli.app import VerbParser
from launcher.errors import UserError
from launcher.runs.manifest import Manifest, write_manifest
from launcher.schedulers.base import JobRef, JobStatus
from launcher.slurm.states import State

JOB_NAME = "nemo-megatron-gpt3_tiny"

RUNNING = JobStatus(State.RUNNING, None, "n[1-2]", "00:00:50")
COMPLETED = JobStatus(State.COMPLETED, None, "n[1-2]", "00:01:30", 0)
FAILED = JobStatus(State.FAILED, "exit code 1", "n[1-2]", "00:00:03", 1)
PENDING = JobStatus(State.PENDING, "Resources")


@dataclass
class FakeScheduler:
    """A scheduler with a table of answers: each question moves a job to its next status, the last stays."""

    table: dict[str, list[JobStatus]] = field(default_factory=dict)
    questions: list[list[str]] = field(default_factory=list)
    error: str | None = None
    # Events in the world before a question is answered, by its number (from 1).
    events: dict[int, Callable[[], object]] = field(default_factory=dict)

    def set(self, job_id: str, *statuses: JobStatus | State) -> None:
        self.table[job_id] = [s if isinstance(s, JobStatus) else JobStatus(s) for s in statuses]

    def statuses(self, refs: Iterable[JobRef]) -> list[JobStatus]:
        if self.error:
            raise UserError(self.error)
        jobs = list(refs)
        self.questions.append([ref.job_id for ref in jobs])
        self.events.get(len(self.questions), lambda: None)()
        return [self._next(ref.job_id) for ref in jobs]

    def _next(self, job_id: str) -> JobStatus:
        row = self.table.get(job_id, [JobStatus(State.UNKNOWN, "the scheduler does not know this job")])
        return row.pop(0) if len(row) > 1 else row[0]


class Runs:
    """A writer of run directories below one results directory."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def launch(self, name: str = "gpt3_tiny", number: int = 1, **changes: Any) -> Path:
        """Write a launch as the launcher does; return its directory."""
        directory = self.base / name / "launches" / str(number)
        (directory / "results").mkdir(parents=True)
        values: dict[str, Any] = {
            "run": name,
            "launch": number,
            "tag": f"{name}-{number}",
            "stage": "training",
            "engine": "megatron",
            "scheduler": "slurm",
            "job_name": JOB_NAME,
            "nodes": 2,
            "tasks_per_node": 2,
            "time_limit": "00:30:00",
            "command": ["slipway", "launch"],
            "overrides": [],
            "choices": {},
            "created": "2026-11-21T12:00:00+00:00",
            "version": "0.1.0",
            "user": "u",
            "host": "login",
            "job_id": str(10 + number),
        }
        write_manifest(directory, Manifest(**(values | changes)))
        return directory


def start(step: int = 0, time: float = 1000.0, **changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = {
        "kind": "start",
        "time": time,
        "step": step,
        "max_steps": 300,
        "consumed_samples": step * 16,
        "world_size": 4,
        "tensor": 2,
        "data": 2,
        "parameters": 4_200_000,
        "tokens_per_step": 2048,
        "resumed_from": None,
    }
    return event | changes


def held_out(entropy: float = 6.1, **changes: Any) -> dict[str, Any]:
    return {"kind": "data", "split": "validation", "tokens": 90_000, "unigram_entropy": entropy, **changes}


def train(step: int, time: float | None = None, loss: float | None = None) -> dict[str, Any]:
    return {
        "kind": "train",
        "time": 1000.0 + step * 0.5 if time is None else time,
        "step": step,
        "loss": curve(step) if loss is None else loss,
        "lr": 6e-4,
        "grad_norm": 1.5,
        "consumed_samples": step * 16,
        "step_time": 0.5,
        "tokens_per_second": 4096.0,
    }


def validation(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "validation", "time": 1000.0 + step * 0.5, "step": step, "val_loss": loss}


def end(step: int, time: float) -> dict[str, Any]:
    return {"kind": "end", "time": time, "step": step, "reason": "max_steps"}


def curve(step: int) -> float:
    return 4.2 + 4.8 * math.exp(-step / 70) + 0.12 * math.sin(step * 12.9898) * math.cos(step * 78.233)


def whole_training(first: int = 0, last: int = 300) -> list[dict[str, Any]]:
    """Return the events of a launch that trains from one step to another and validates every 25 steps."""
    origin = 1000.0 + first * 0.5
    events = [start(first, origin), held_out()]
    for step in range(first + 1, last + 1):
        events.append(train(step))
        if step % 25 == 0:
            events.append(validation(step, 4.3 + 4.7 * math.exp(-step / 70)))
    return [*events, end(last, 1000.0 + last * 0.5)]


def append(directory: Path, events: Iterable[dict[str, Any]]) -> Path:
    """Append events to a launch's metrics as the trainer does."""
    path = directory / "results" / "metrics.jsonl"
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(event) + "\n" for event in events)
    return path


def log(directory: Path, job_id: str = "11", extension: str = "out") -> Path:
    """Return the path of the log of a launch's job."""
    return directory / f"log-{JOB_NAME}_{job_id}.{extension}"


def slipway(runs: Runs, *arguments: str) -> int:
    """Run a verb about runs through its parser; return its exit code."""
    parser = VerbParser(prog="slipway")
    subparsers = parser.add_subparsers(required=True)
    for verb in (status, logs, history, watch):
        verb.add_parser(subparsers)
    args = parser.parse_args([*arguments, "--base-results-dir", str(runs.base)])
    return int(args.run(args) or 0)
