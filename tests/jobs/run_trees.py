"""Runs on disk for the tests of finding them: only manifests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.runs.manifest import Manifest, write_manifest
from launcher.slurm.commands import SchedulerSilent


def launch(run_dir: Path, number: int = 1, **changes: Any) -> Path:
    """Write a launch as the launcher does; return its directory."""
    directory = run_dir / "launches" / str(number)
    directory.mkdir(parents=True)
    values: dict[str, Any] = {
        "run": run_dir.name,
        "launch": number,
        "tag": f"{run_dir}-{number}",
        "stage": "training",
        "engine": "megatron",
        "scheduler": "slurm",
        "job_name": f"job-{run_dir.name}",
        "nodes": 1,
        "tasks_per_node": 1,
        "time_limit": None,
        "command": ["slipway", "launch"],
        "overrides": [],
        "choices": {},
        "created": f"2026-11-21T12:00:{number:02}Z",
        "version": "0.1.0",
        "user": "somebody",
        "host": "login",
    }
    write_manifest(directory, Manifest(**(values | changes)))
    return directory


@dataclass
class Cluster:
    """A scheduler that knows scripts, and records the questions."""

    jobs: dict[str, Path] = field(default_factory=dict)
    own: list[Path] = field(default_factory=list)
    error: str | None = None
    questions: list[str] = field(default_factory=list)

    def locate(self, job_id: str) -> Path | None:
        self._record(job_id)
        return self.jobs.get(job_id)

    def scripts(self) -> list[Path]:
        self._record("scripts")
        return self.own

    def _record(self, question: str) -> None:
        self.questions.append(question)
        if self.error:
            raise SchedulerSilent(self.error)
