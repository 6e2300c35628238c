"""The jobs that this process submitted or changed: a later failure must not hide them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

# The directory with the record of each submitted job that may still exist, by its id, the oldest first.
submitted_jobs: dict[str, Path] = {}
# The existing jobs that were acted on, by the action, which has a {} in place of the job: "cancelled {}".
acts: dict[str, list[str]] = defaultdict(list)


def forget_jobs() -> None:
    """Forget everything: several command lines may run in one process."""
    submitted_jobs.clear()
    acts.clear()
