"""The states of a sweep's points, and the best of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import escape
from launcher.jobs.lookup import RunRef
from launcher.monitor.run_status import StatusRow, collect_status, missing_run
from launcher.runs.paths import display_path
from launcher.slurm.states import State
from launcher.sweeps.record import broken_records, read_records, record_of_job
from launcher.ui import tables
from launcher.ui.tables import REASON

_MEASURED = ("STATE", "STEP", "VAL LOSS", "LOSS", "TOKENS/S", "ELAPSED", "JOB", REASON)


@dataclass(frozen=True)
class Result:
    """A point with its number in the sweep, the values that are swept, and how its newest launch is."""

    number: int
    name: str
    values: dict[str, str]
    status: StatusRow

    @property
    def rank(self) -> tuple[int, float, int, float]:
        """Sorts the best first: by the held-out loss, then by that of training; diverged and unknown last."""
        progress = self.status.progress
        return (*_goodness(progress.validation_loss), *_goodness(progress.loss))

    @property
    def cells(self) -> list[str | None]:
        """The values of the columns that every sweep has."""
        cells = {**self.status.cells(), "ELAPSED": self.status.elapsed, REASON: self.status.full_reason}
        return [cells[name] for name in _MEASURED]

    def to_json(self) -> dict[str, Any]:
        return {"point": self.name, "number": self.number, "values": self.values, **self.status.to_json()}


@dataclass(frozen=True)
class Results:
    """The points of a sweep, the best first; `labels` has what each swept key is called in short."""

    labels: dict[str, str]
    points: list[Result]

    @property
    def states(self) -> list[State]:
        return [point.status.state for point in self.points]

    @property
    def columns(self) -> list[str]:
        return ["RANK", "POINT", *self.labels.values(), *_MEASURED]

    def rows(self) -> list[list[str]]:
        """Return the cells of `columns`; a point is identified by its values."""
        rows = [
            (rank, point.number, *map(point.values.get, self.labels), *point.cells)
            for rank, point in enumerate(self.points, start=1)
        ]
        return [[escape(tables.text(cell)) for cell in row] for row in rows]

    def summary(self) -> str:
        """Return one line: the number of points in each state, and the best so far."""
        counted = Counter(state.value for state in self.states)
        states = ", ".join(f"{count} {state}" for state, count in sorted(counted.items()))
        best = next(iter(self.points), None)
        if best is None or best.rank[0]:
            return states
        values = " ".join(f"{label}={best.values.get(key, '-')}" for key, label in self.labels.items())
        loss = tables.loss(best.status.progress.validation_loss)
        return escape(f"{states}; best so far: val loss {loss} with {values}")


def gather(sweep_dir: Path) -> Results:
    """Look at all points of a sweep: each scheduler is asked once."""
    values: dict[str, dict[str, str]] = {}
    labels: dict[str, str] = {}
    for record in read_records(sweep_dir):
        labels |= record.labels
        values |= {str(point["name"]): point["values"] for point in record.points}
    counted = Counter(labels.values())  # of several launches of a sweep one label may mean different keys
    labels = {key: label if counted[label] == 1 else key for key, label in labels.items()}
    run_dirs = [sweep_dir / name for name in values]
    # The newest of several live launches: it comes first.
    statuses = {status.run_dir: status for status in reversed(collect_status(list(map(RunRef, run_dirs))))}
    points = [
        Result(number, path.name, values[path.name], statuses.get(path) or missing_run(path))
        for number, path in enumerate(run_dirs, start=1)
    ]
    return Results(labels, sorted(points, key=lambda point: point.rank))


def failures(sweep_dir: Path) -> list[str]:
    """Return why arrays of a sweep did not become jobs, and which are unknown."""
    refused = [
        f"array of {len(record.points)} points, launched {record.created}: {record.error.splitlines()[0]}"
        for record in read_records(sweep_dir)
        if record.error and record.job_id is None
    ]
    broken = [
        f"{display_path(path)} cannot be read: "
        + ("its points have no values" if record_of_job(path.parent) else "its points are not in the table")
        for path in broken_records(sweep_dir)
    ]
    return [*refused, *broken]


def _goodness(loss: float | None) -> tuple[int, float]:
    if loss is None:
        return 2, 0.0
    return (0, loss) if math.isfinite(loss) else (1, 0.0)
