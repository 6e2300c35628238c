"""Checkpoint directories of real trainings that went back, as recorded, and a program that lays them anew.

A recording is a JSON file in ``recorded/``, written by a real chain of the engine's own trainer
(``pytest tests/nemo tests/megatron_lm -k went_back --write-golden``): for each moment the names, sizes and
times of all entries of the run's ``checkpoints/``, and the text of small files. A payload lays a moment::

    python recorded_directories.py RECORDING MOMENT DIRECTORY
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded")
_TEXT_BYTES = 64


def entries(directory: Path) -> list[list[Any]]:
    """Return all entries of a directory, in the order of their times.

    Returns
    -------
    list
        For each entry its modification time in Unix nanoseconds, its size in bytes (-1: a directory), its
        path below `directory`, and for a small file of ASCII its text.
    """
    rows: list[list[Any]] = []
    for path in directory.rglob("*"):
        status = path.stat()
        row = [status.st_mtime_ns, -1 if path.is_dir() else status.st_size, str(path.relative_to(directory))]
        if path.is_file() and status.st_size <= _TEXT_BYTES and path.read_bytes().isascii():
            row.append(path.read_text())
        rows.append(row)
    return sorted(rows)


def installed_versions(python: Path, *packages: str) -> dict[str, str]:
    """Return the versions of packages of another interpreter."""
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, done.stdout.split(), strict=True))


def write_recording(engine: str, versions: dict[str, str], overrides: str, moments: dict[str, Any]) -> None:
    """Write a recording: the overrides of the training, and its entries by what had happened."""
    head = {"engine": engine, "versions": versions, "overrides": overrides.split()}
    lines = [f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items()]
    listed = [",\n".join(f"   {json.dumps(row)}" for row in rows) for rows in moments.values()]
    listed = [f"  {json.dumps(name)}: [\n{rows}\n  ]" for name, rows in zip(moments, listed, strict=True)]
    RECORDED.mkdir(exist_ok=True)
    text = "{\n" + "".join(lines) + ' "moments": {\n' + ",\n".join(listed) + "\n }\n}\n"
    (RECORDED / f"{engine}.json").write_text(text)


def moments(recording: Path) -> list[list[list[Any]]]:
    """Return the entries of a recording's moments, in their order."""
    return list(json.loads(recording.read_text())["moments"].values())


def lay(rows: list[list[Any]], directory: Path) -> None:
    """Make a directory as it was recorded, with sparse files; what is already so stays untouched."""
    directory.mkdir(parents=True, exist_ok=True)
    recorded_paths = {path for _, _, path, *_ in rows}
    for path in sorted(directory.rglob("*"), reverse=True):
        if str(path.relative_to(directory)) not in recorded_paths:
            path.unlink() if path.is_file() else shutil.rmtree(path)
    for time, size, name, *text in sorted(rows, key=lambda row: row[2]):
        path = directory / name
        if size < 0:
            path.mkdir(exist_ok=True)
        elif not path.exists() or path.stat().st_mtime_ns != time:
            with path.open("w") as file:
                file.write("".join(text))
                file.truncate(size)
            os.utime(path, ns=(time, time))
    for time, size, name, *_ in rows:
        if size < 0:
            os.utime(directory / name, ns=(time, time))


if __name__ == "__main__":
    lay(moments(Path(sys.argv[1]))[int(sys.argv[2])], Path(sys.argv[3]))
