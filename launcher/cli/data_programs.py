"""Programs that read data: they need numpy, and run as processes of their own.

The launcher imports neither `trainer` nor `corpus`: it asks them, and prints what they answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from launcher.errors import UserError
from launcher.exit_codes import DONE, MISTAKE, WENT_WRONG

_HOME = Path(__file__).resolve().parents[2]
_PREFIX = "error: "


def ask(module: str, arguments: Sequence[str], question: object = None) -> Any:
    """Return the answer of a program: the JSON that it prints.

    Parameters
    ----------
    module
        Its name, as of ``python -m``.
    arguments
        Its command line.
    question
        What it reads from stdin, as JSON; None for nothing.

    Raises
    ------
    UserError
        With the program's message, if it names a mistake.
    RuntimeError
        With its stderr, if it fails otherwise.
    """
    with answers(module, arguments, question) as lines:
        text = "".join(lines)
    return json.loads(text)


@contextmanager
def answers(module: str, arguments: Sequence[str], question: object = None) -> Iterator[Iterator[str]]:
    """Start a program and yield its lines as they come; raises as :func:`ask` at its end.

    A program that is not read to its end, because of an exception, is ended.
    """
    # A file, as a pipe that nobody reads meanwhile may be full.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(_HOME), module, *arguments],
            stdin=subprocess.DEVNULL if question is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdout is not None
        try:
            if process.stdin is not None:
                _write(process.stdin, json.dumps(question))
            yield iter(process.stdout)
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdout.close()
            code = process.wait()
        errors.seek(0)
        message = errors.read().decode(errors="replace").strip()
    if code == MISTAKE and message.startswith(_PREFIX):
        raise UserError(message.removeprefix(_PREFIX))
    if code not in (DONE, WENT_WRONG) or (code and message):
        raise RuntimeError(f"python -m {module} ended with exit code {code}:\n{message}")


# As `python -m`, with the directory of the packages in front instead of the working directory: relative paths
# in the arguments are the user's.
_START = (
    "import runpy, sys; home, *sys.argv = sys.argv[1:]; sys.path.insert(0, home); "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def _write(stream: IO[str], text: str) -> None:
    try:
        with stream:
            stream.write(text)
    except BrokenPipeError:
        return  # it ended before it read all, and says why
