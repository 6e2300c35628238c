"""The manifest of a launch, ``launcher.json``: what was launched, from what, and as which job."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.runs.files import write_atomic
from launcher.runs.paths import LAUNCHES, MANIFEST, launch_numbers

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of one launch; the truth about it, beside the run.

    `job_id` is ``None`` between the writing of the intent and the scheduler's answer; `error` holds the
    scheduler's words when it refused.
    """

    run: str
    launch: int
    tag: str
    stage: str
    engine: str
    scheduler: str
    job_name: str
    nodes: int
    tasks_per_node: int
    time_limit: str | None
    command: list[str]
    overrides: list[str]
    choices: dict[str, str]
    created: str
    version: str
    user: str
    host: str
    git_commit: str | None = None
    git_dirty: bool | None = None
    slurm_conf: str | None = None
    job_id: str | None = None
    error: str | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    def submitted_as(self, job_id: str) -> Manifest:
        return replace(self, job_id=job_id)

    def refused(self, error: str) -> Manifest:
        return replace(self, error=error)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def write_manifest(launch_dir: Path, manifest: Manifest) -> None:
    write_atomic(launch_dir / MANIFEST, manifest.to_json())


def read_manifest(launch_dir: Path) -> Manifest:
    """Read a launch's manifest; keys that a later version added are passed over.

    Raises
    ------
    UserError
        If the manifest is missing or is not one.
    """
    path = launch_dir / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {item.name for item in fields(Manifest)}
        return Manifest(**{key: value for key, value in content.items() if key in known})
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: that launch was never written completely") from error
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a launch's manifest: {error}") from error


def newest_submitted(run_dir: Path) -> int | None:
    """The number of a run's newest launch that is known to be a job."""
    for number in reversed(launch_numbers(run_dir)):
        with contextlib.suppress(UserError):  # a broken launch hides no other
            if read_manifest(run_dir / LAUNCHES / str(number)).job_id is not None:
                return number
    return None
