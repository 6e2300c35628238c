"""The runs there are, from their manifests alone: `slipway list runs` and `slipway list --all`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import one_line
from launcher.jobs.locator import RunLocator
from launcher.runs.index import Entry
from launcher.runs.paths import short
from launcher.ui.formatting import moment, text
from launcher.ui.tables import print_listing

_COLUMNS = ("RUN", "LAUNCHES", "LAST LAUNCHED", "USER", "JOB", "IN")


@dataclass(frozen=True, slots=True)
class Listed:
    """A run, by its newest launch that can be read."""

    newest: Entry
    launches: int

    def cells(self) -> tuple[str, ...]:
        """The values of the columns."""
        newest = self.newest
        values = (newest.run_dir.name, self.launches, moment(newest.created), newest.user, newest.job_id)
        return tuple(one_line(text(value)) for value in (*values, short(newest.run_dir.parent)))

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        newest = self.newest
        return {
            "run": newest.run_dir.name,
            "run_dir": str(newest.run_dir),
            "tree": str(newest.run_dir.parent),
            "launches": self.launches,
            "last_launched": newest.created,
            "user": newest.user,
            "job_id": newest.job_id,
            "scheduler": newest.scheduler,
        }


def list_runs(base_results_dir: Path, *, everywhere: bool, as_json: bool) -> int:
    """Print the runs, those launched last coming first; return the exit code."""
    known = RunLocator(base_results_dir)
    entries = known.launches(None if everywhere else [base_results_dir])
    listed = _by_run(known.originals(entries) if everywhere else entries)
    if as_json:
        print(json.dumps([run.to_json() for run in listed], indent=2))
    elif listed:
        print_listing(_COLUMNS, [run.cells() for run in listed], numbers=1)
    if not listed:
        where = "in the directories that are known" if everywhere else f"in {base_results_dir}"
        print(f"no run was launched {where} yet", file=sys.stderr)
    if known.index.trouble:
        print(f"slipway: {one_line(known.index.trouble)}", file=sys.stderr)
    return 0


def _by_run(entries: Iterable[Entry]) -> list[Listed]:
    by_run: dict[Path, list[Entry]] = {}
    for entry in entries:
        by_run.setdefault(entry.run_dir, []).append(entry)
    listed = [Listed(launches[-1], len(launches)) for launches in by_run.values()]
    return sorted(listed, key=lambda run: run.newest.created, reverse=True)
