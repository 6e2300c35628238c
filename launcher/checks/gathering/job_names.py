"""Other runs whose jobs have the same name."""

from __future__ import annotations

import stat
from pathlib import Path

from launcher.errors import file_mode
from launcher.plan import Plan
from launcher.runs.paths import LAUNCHES


def same_job_name(plan: Plan, base: Path) -> tuple[str, ...] | None:
    """Run directories with a script of this job's name; a script at the top is that of the newest launch.

    Looked for beside this run, below `base_results_dir`, and in its like: `results-2` beside `results`.
    """
    run_dir, script = plan.paths.run_dir, plan.paths.script_name
    try:
        near = {other for folder in {base, run_dir.parent} for other in _entries(folder)}
        near.update(other / run_dir.name for other in _entries(base.parent) if _stem(other) == _stem(base))
        found = [other for other in near if other != run_dir and _is_run_with(other, script)]
    except OSError:
        return None
    return tuple(sorted(map(str, found)))


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if stat.S_ISDIR(file_mode(folder)) else []


def _stem(directory: Path) -> str:
    return directory.name.partition("-")[0]


def _is_run_with(directory: Path, script: str) -> bool:
    return stat.S_ISDIR(file_mode(directory / LAUNCHES)) and (directory / script).is_symlink()
