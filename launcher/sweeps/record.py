"""The records of a sweep's job arrays, ``arrays/N/sweep.json``, next to the runs of its points."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from launcher.errors import UserError, escape
from launcher.runs.manifest import require_readable
from slipway.common.files import (
    RECORD_LIMIT,
    UnfitFile,
    is_job_id,
    names_in,
    read_int,
    read_json,
    write_atomic,
)
from slipway.common.node.settings import NAME as SETTINGS

# The directory of a sweep's arrays, and in an array the links by the numbers of its tasks.
ARRAYS = "arrays"
POINTS = "points"
SWEEP_FILE = "sweep.json"
_NUMBER = re.compile("[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """A job array of a sweep.

    `points` are in the order of the tasks' numbers: each has the `name` of its run, which is its directory
    next to `arrays`, its `launch`, and its `values` by the keys that are swept. `labels` are those keys in
    short.
    """

    sweep: str
    tag: str
    script: str
    created: str
    user: str
    host: str
    slurm_conf: str | None
    command: list[str]
    overrides: list[str]
    throttle: int | None
    labels: dict[str, str]
    points: list[dict[str, Any]]
    job_id: str | None = None
    error: str | None = None


def write_record(array_dir: Path, record: ArrayRecord) -> None:
    """Write the record of an array; raise UserError if it is too large to read and has no job yet."""
    text = json.dumps(asdict(record), indent=2) + "\n"
    if record.job_id is None and record.error is None:
        require_readable(array_dir / SWEEP_FILE, text)
    write_atomic(array_dir / SWEEP_FILE, text)


def read_records(sweep_dir: Path) -> list[ArrayRecord]:
    """Return the arrays of a sweep, oldest first, without those that are broken or unfinished.

    Of a broken one the points are those that its job has, without their values.
    """
    records = [record or record_of_job(path.parent) for path, record in _records(sweep_dir).items()]
    return [record for record in records if record is not None]


def broken_records(sweep_dir: Path) -> list[Path]:
    """Return the records of arrays that cannot be read: see `record_of_job`."""
    return [path for path, record in _records(sweep_dir).items() if record is None]


def is_sweep(directory: Path) -> bool:
    """Return True if a directory is a sweep's; False also if it may not be read."""
    numbers = array_numbers(directory)
    return any((directory / ARRAYS / str(number) / SWEEP_FILE).is_file() for number in numbers)


def find_sweep(word: str, base_results_dir: Path) -> Path:
    """Return the directory of a sweep, by its name or its directory, or raise UserError."""
    for directory in (Path(word), base_results_dir / word):
        if is_sweep(directory):
            return directory.absolute()
    known = [path.name for path, _ in sweeps_in(base_results_dir)]
    hint = f"sweeps in {base_results_dir}: {', '.join(map(escape, known[:12])) or 'none'}"
    raise UserError(f"there is no sweep {escape(repr(word))}", hint=hint)


def sweeps_in(base_results_dir: Path) -> list[tuple[Path, int]]:
    """Return the sweeps directly below a directory, each with the number of its points."""
    entries = (base_results_dir / name for name in names_in(base_results_dir))
    return [(path, len(points_of(path))) for path in entries if is_sweep(path)]


def points_of(directory: Path) -> list[Path]:
    """Return the run directories of a sweep's points, in order; none if it is no sweep."""
    names = [str(point["name"]) for record in read_records(directory) for point in record.points]
    return [directory.absolute() / name for name in dict.fromkeys(names)]


def _records(sweep_dir: Path) -> dict[Path, ArrayRecord | None]:
    """Return each array's record by its file, oldest first; None for a broken one."""
    records: dict[Path, ArrayRecord | None] = {}
    for number in array_numbers(sweep_dir):
        path = sweep_dir / ARRAYS / str(number) / SWEEP_FILE
        try:
            records[path] = _read(path)
        except UnfitFile:
            records[path] = None
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            records[path] = None
    return records


def _read(path: Path) -> ArrayRecord:
    content = read_json(path, RECORD_LIMIT)
    known = {item.name for item in fields(ArrayRecord)}
    return _check(ArrayRecord(**{key: value for key, value in content.items() if key in known}))


def record_of_job(array_dir: Path) -> ArrayRecord | None:
    """Rebuild a record from the settings of the array's tasks; ``None`` if they are damaged too."""
    try:
        content = read_json(array_dir / SETTINGS, RECORD_LIMIT)
        launches = [Path(directory) for directory, _ in content["points"]]
        points = [{"name": path.parents[1].name, "launch": int(path.name), "values": {}} for path in launches]
        empty: dict[str, Any] = dict.fromkeys((item.name for item in fields(ArrayRecord)), "")
        empty |= {"slurm_conf": None, "command": [], "overrides": [], "throttle": None, "labels": {}}
        empty |= {"points": points, "job_id": None, "error": None}
        return _check(ArrayRecord(**empty | {name: content[name] for name in ("sweep", "tag", "script")}))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def _check(record: ArrayRecord) -> ArrayRecord:
    """Return a record of an array; raise ValueError if it is invalid."""
    texts = (record.sweep, record.tag, record.created, record.error or "", *record.labels.values())
    is_valid = all(isinstance(text, str) for text in texts)
    is_valid &= record.job_id is None or is_job_id(record.job_id)
    for point in record.points:
        name, launch = point["name"], point.get("launch")
        is_valid &= isinstance(name, str) and name not in ("", ".", "..") and "/" not in name
        is_valid &= name.isprintable() and isinstance(point["values"], dict)
        is_valid &= launch is None or read_int(launch, 1) is not None
    if not is_valid:
        raise ValueError("it is no record of an array")
    return record


def array_numbers(sweep_dir: Path) -> list[int]:
    """Return the numbers of a sweep's arrays, ascending; none where they cannot be read."""
    return sorted(int(name) for name in names_in(sweep_dir / ARRAYS) if _NUMBER.fullmatch(name))
