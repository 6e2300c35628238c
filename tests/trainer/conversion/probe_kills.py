"""A conversion killed at one moment after the other; run by test_conversion_faults.py from a warm process.

``probe_kills CHECKPOINT DIRECTORY``: the moments are the calls of Python that the interpreter audits, such as
those that open, create, rename and remove files, and each tensor that was written. Then each time the same
conversion is run to its end. With SIGTERM, which a scheduler sends first, nothing at all is to be left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from slipway.trainer.conversion import __main__ as program
from slipway.trainer.conversion import safetensors_files
from tests.trainer.conversion.checkpoints import digest

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.lockf", "shutil.rmtree")


def main(arguments: list[str]) -> int:
    checkpoint, directory = Path(arguments[0]), Path(arguments[1])
    directory.mkdir()
    output = directory / "out"
    assert in_child(lambda: export(checkpoint, directory / "expected")) == 0
    expected = digest(directory / "expected")
    counts: dict[str, list[str] | int] = {"absent": 0, "whole": 0, "leftovers": 0}
    wrong: list[str] = []
    terminated: list[str] = []
    for moment in range(10_000):
        code = in_child(lambda moment=moment: export_and_die(checkpoint, output, moment, signal.SIGKILL))  # type: ignore[misc]
        is_whole = output.exists() and digest(output) == expected and (output / "config.json").is_file()
        leftovers = [path for path in directory.iterdir() if path.name.startswith(".unfinished-")]
        kind = "whole" if is_whole else "absent"
        counts[kind] = int(str(counts[kind])) + 1
        counts["leftovers"] = int(str(counts["leftovers"])) + bool(leftovers)
        if output.exists() and not is_whole:
            wrong.append(f"{moment}: half an output")
        second_code = in_child(lambda: export(checkpoint, output))
        names = sorted(path.name for path in directory.iterdir())
        if second_code != 0 or digest(output) != expected or names != ["expected", "out"]:
            wrong.append(f"{moment}: {second_code}, {names}")
        remove(output)
        if code == 0:
            break
        if moment % 5 == 0:
            code = in_child(lambda moment=moment: export_and_die(checkpoint, output, moment, signal.SIGTERM))  # type: ignore[misc]
            names = sorted(path.name for path in directory.iterdir())
            if names not in (["expected"], ["expected", "out"]) or (
                output.exists() and digest(output) != expected
            ):
                terminated.append(f"{moment}: {code}, {names}")
            remove(output)
    print(json.dumps({**counts, "wrong": wrong, "terminated": terminated}))
    return 0


def export(checkpoint: Path, output: Path) -> int:
    return program.main(["export", str(checkpoint), "--to", str(output)])


def export_and_die(checkpoint: Path, output: Path, moment: int, number: int) -> int:
    """Convert, and send this process a signal at a moment."""
    remaining = moment
    is_armed = True

    def count() -> None:
        nonlocal remaining, is_armed
        remaining -= 1
        if remaining < 0 and is_armed:
            is_armed = False
            os.kill(os.getpid(), number)

    def audit(event: str, values: tuple[object, ...]) -> None:
        if event in _EVENTS and str(output.parent) in str(values[:2]):
            count()

    write = safetensors_files._write_tensor

    def write_and_count(*values: object) -> None:
        write(*values)  # type: ignore[arg-type]
        count()

    safetensors_files._write_tensor = write_and_count  # type: ignore[assignment]
    sys.addaudithook(audit)
    return export(checkpoint, output)


def in_child(task: Callable[[], int]) -> int:
    """Run a task in a forked process; return its exit code, minus the signal's number after a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Path(os.devnull).open("w") as devnull:
                os.dup2(devnull.fileno(), 1)
                os.dup2(devnull.fileno(), 2)
            code = task()
        except SystemExit as error:
            code = int(str(error.code))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def remove(directory: Path) -> None:
    for path in directory.iterdir() if directory.exists() else []:
        path.unlink()
    if directory.exists():
        directory.rmdir()
