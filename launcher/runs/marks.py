"""The marks that a job leaves in its launch directory, for those who cannot ask the scheduler.

``marks/`` holds one pair of files for each life of the job, so that a requeued one writes over nothing::

    17.0.started.json   {"job_id": "17", "started": <Unix time>, "nodes": "n1,n2"}
    17.0.ended.json     {"job_id": "17", "exit_code": 0, "ended": <Unix time>}

A task of an array has its own, ``17_2.0.started.json``. Whoever cancels a job with Slipway leaves
``17.cancelled.json`` there: a job that never began leaves nothing itself, and one that did not who ended it.

``marks/job`` is the claim of the launch. Where the answer to a submission was lost there may be two jobs of
one launch, now or later: the one whose id (of an array, the array's) stands there is the launch's, and any
other leaves before it does anything. The first job that begins claims it; or the launcher does, for the job
that it puts on record, or for none at all (`GIVEN_UP`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.runs.files import umask, write_atomic
from launcher.runs.paths import IMAGE_MARK, JOB_MARK, MARKS

# In the claim: there is no job of this launch, and none may begin.
GIVEN_UP = "given-up"

_STARTED, _ENDED, _CANCELLED = ".started.json", ".ended.json", ".cancelled.json"


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a job, from its start to its end; times in Unix seconds.

    `job_id` is ``17``, or ``17_2`` of an array's task; `number` counts the requeues. What was not written
    down, because the job still runs or was killed, is ``None``.
    """

    job_id: str
    number: int
    nodes: str | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None

    @property
    def task(self) -> str | None:
        """The number of an array's task."""
        return self.job_id.partition("_")[2] or None

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None


def read_lives(launch_dir: Path, job_id: str | None = None) -> list[Life]:
    """The lives of a launch's job in the order in which they began.

    Parameters
    ----------
    job_id
        That of the job or the array; lives of another job are passed over.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in _files(launch_dir / MARKS):
        stem = path.name.removesuffix(_STARTED).removesuffix(_ENDED)
        found.setdefault(stem, {}).update(_read(path))
    lives = [life for stem, content in found.items() if (life := _life(stem, content))]
    return _in_order(life for life in lives if job_id is None or life.job_id.partition("_")[0] == job_id)


def _in_order(lives: Iterable[Life]) -> list[Life]:
    """By when they began; but a job's own by their numbers, because the clocks of hosts differ."""
    numbered = sorted(lives, key=lambda life: life.number)
    newest: dict[str, float] = {}
    begun: dict[Life, float] = {}
    for life in numbered:
        told = life.started or life.ended or 0.0
        begun[life] = newest[life.job_id] = max(told, newest.get(life.job_id, 0.0))
    return sorted(numbered, key=begun.__getitem__)


def note_cancelled(launch_dir: Path, job_id: str, user: str) -> None:
    """Leave the mark that a job was cancelled, by whom and when; where that is not possible, none is left."""
    with contextlib.suppress(OSError):
        (launch_dir / MARKS).mkdir(exist_ok=True)
        told = {"job_id": job_id, "user": user, "cancelled": round(time.time())}
        write_atomic(launch_dir / MARKS / f"{job_id}{_CANCELLED}", json.dumps(told) + "\n")


def cancelled_by(launch_dir: Path, job_id: str) -> str | None:
    """Who cancelled a job with Slipway; ``None`` if nobody did."""
    user = _read(launch_dir / MARKS / f"{job_id}{_CANCELLED}").get("user")
    return str(user) if user else None


def first_job(launch_dir: Path) -> str | None:
    """The id of the job that has claimed a launch; ``None`` as long as none has."""
    claimed = _claimed(launch_dir)
    return claimed if claimed and claimed.isdecimal() else None


def claim(launch_dir: Path, holder: str) -> str:
    """Claim a launch for a job, or for none (`GIVEN_UP`), unless it is claimed already; return who has it.

    Where nothing can be read or written, that is `holder`: a mark that cannot be left stops nobody.
    """
    directory = launch_dir / MARKS
    with contextlib.suppress(OSError):
        directory.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=directory, prefix=f".{JOB_MARK}-") as whole:
            os.fchmod(whole.fileno(), 0o666 & ~umask())
            whole.write(f"{holder}\n")
            whole.flush()
            # A link, so that the claim is there with its content, or not at all.
            try:
                (directory / JOB_MARK).hardlink_to(whole.name)
            except FileExistsError:
                pass
            except OSError:  # no links on this file system
                with (directory / JOB_MARK).open("x") as mark:
                    mark.write(f"{holder}\n")
    return _claimed(launch_dir) or holder


def _claimed(launch_dir: Path) -> str | None:
    try:
        return (launch_dir / MARKS / JOB_MARK).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def image_digest(launch_dir: Path) -> str | None:
    """The digest of the image file that a launch ran in, as its job read it: ``sha256:…``."""
    try:
        words = (launch_dir / MARKS / IMAGE_MARK).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return f"sha256:{words[0]}" if words else None


def _files(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    return [path for path in entries if path.name.endswith((_STARTED, _ENDED)) and path.name[0] != "."]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _life(stem: str, content: Mapping[str, Any]) -> Life | None:
    job_id, _, number = stem.rpartition(".")
    if not (job_id and number.isdigit() and content):
        return None
    code = _number(content, "exit_code")
    return Life(
        job_id=job_id,
        number=int(number),
        nodes=str(content["nodes"]) if content.get("nodes") else None,
        started=_number(content, "started"),
        ended=_number(content, "ended"),
        exit_code=None if code is None else int(code),
    )


def _number(content: Mapping[str, Any], key: str) -> float | None:
    value = content.get(key)
    # A number that is none would break whoever counts with it, and has no word in JSON.
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
