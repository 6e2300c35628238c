"""The marks of a job, as its script leaves them: `slipway.common.node.marks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def leave_marks(
    launch_dir: Path,
    job_id: str,
    *,
    attempt: int = 0,
    started: float | None = None,
    ended: float | None = None,
    code: int = 0,
    state: str | None = None,
    nodes: str = "n[1-2]",
) -> None:
    """Write the marks of one attempt of a job; `job_id` of an array's task is ``17_2``."""
    marks = launch_dir / "marks"
    marks.mkdir(exist_ok=True)
    base_id = job_id.partition("_")[0]
    (marks / "job").write_text(f"{base_id}\n")
    for name, fields in (
        ("started", None if started is None else {"started": started, "nodes": nodes}),
        ("ended", None if ended is None else {"exit_code": code, "ended": ended, "state": state}),
    ):
        if fields is not None:
            path = marks / f"{job_id}.{attempt}.{name}.json"
            path.write_text(json.dumps({"job_id": base_id, **fields}) + "\n")


def end_marks(launch_dir: Path) -> list[dict[str, Any]]:
    """Return the marks that the attempts of a launch's job left at their ends."""
    return [json.loads(path.read_text()) for path in sorted((launch_dir / "marks").glob("*.ended.json"))]
