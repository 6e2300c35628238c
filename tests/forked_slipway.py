"""`slipway` for tests that run it hundreds of times: with ``--warm`` forks of a process that has imported it.

Importing takes most of a short command. From there on a fork is the command: `launcher.main.main` with the
arguments, the environment, the directory and the files of its caller, in a process of its own. Starting the
program itself is tested by all that run it with `subprocess`. What it asks the trainer is answered by a fork,
and the groups of the shipped files are composed before.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from benchmarks.soak import warm_launcher, zygote
from tests import zygotes
from tests.fakes.programs import prepend_to_path, write_program
from tests.shipped_files import compose_shipped_files_once

SLIPWAY = Path(sys.executable).with_name("slipway")


def run_forked(
    words: Sequence[object], *, cwd: Path, env: dict[str, str], timeout: float, user: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `slipway` with these words, as ``subprocess.run([SLIPWAY, *words], text=True, ...)`` would."""
    arguments = [str(word) for word in words]
    if not zygotes.is_warm():
        return subprocess.run(
            [SLIPWAY, *arguments],
            cwd=cwd,
            env=env,
            timeout=timeout,
            user=user,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    order = {"arguments": [__name__, *arguments], "environment": env, "directory": str(cwd), "user": user}
    with (
        Path(os.devnull).open() as nothing,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        files = (nothing.fileno(), stdout.fileno(), stderr.fileno())
        # Closing the connection ends the command.
        with zygote.connect(str(zygotes.launchers()), order, files) as connection:
            connection.settimeout(timeout)
            try:
                _, code = zygote.answers(connection)
            except TimeoutError:
                stdout.seek(0)
                raise subprocess.TimeoutExpired(arguments, timeout, stdout.read().encode()) from None
        outputs = []
        for file in (stdout, stderr):
            file.seek(0)
            outputs.append(file.read())
    return subprocess.CompletedProcess([str(SLIPWAY), *arguments], code, *outputs)


def forked_command() -> list[str]:
    """Return a command that is `slipway`, forked, where its files are not closed."""
    if not zygotes.is_warm():
        return [str(SLIPWAY)]
    client = ["client", str(zygotes.launchers()), "-m", __name__]
    return [sys.executable, "-ISE", zygote.__file__, *client]


def write_slipway(folder: Path) -> Path:
    """Write a `slipway` that is forked into a folder for PATH; return the folder."""
    write_program(folder / SLIPWAY.name, f'exec {shlex.join(forked_command())} "$@"')
    return folder


@pytest.fixture(scope="module")
def forked_slipway_on_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put a `slipway` that is forked on the PATH."""
    with pytest.MonkeyPatch.context() as patch:
        prepend_to_path(patch, write_slipway(tmp_path_factory.mktemp("programs")))
        yield


def main(arguments: Sequence[str]) -> int:
    """Be `slipway`."""
    sys.argv = [str(SLIPWAY), *arguments]
    subprocess.run = _run  # type: ignore[assignment]
    try:
        return importlib.import_module("launcher.main").main()
    finally:
        atexit._run_exitfuncs()


_MOST_COMPOSED = (
    ["cluster=sandbox", "stages=[data_preparation]"],
    ["cluster=sandbox", "training=gpt3/tiny"],
    ["training=gpt3/tiny", "cluster=sandbox"],
    ["training=gpt3/tiny", "cluster=local"],
    ["cluster=local", "training=gpt3/tiny"],
)
_QUESTIONS = (
    "slipway.trainer.config.verdict",
    "slipway.trainer.data.identity",
    "slipway.trainer.data.tokenized",
)
_run_program = subprocess.run


def _run(command: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command, as `subprocess.run`; the programs that answer questions are forked."""
    if command[:2] != [sys.executable, "-m"] or command[2] not in _QUESTIONS:
        return _run_program(command, **options)
    with tempfile.TemporaryFile("w+") as question, tempfile.TemporaryFile("w+") as answer:
        question.write(options["input"])
        question.seek(0)
        if (pid := os.fork()) == 0:
            _answer(command[2], question.fileno(), answer.fileno(), options["cwd"])
        _, status = os.waitpid(pid, 0)
        answer.seek(0)
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), answer.read(), "")


def _answer(module: str, question: int, answer: int, directory: Path) -> NoReturn:
    code = 1
    try:
        os.chdir(directory)
        # No object of the launcher's: another of its threads may hold its lock.
        sys.stdin, sys.stdout = os.fdopen(question, closefd=False), os.fdopen(answer, "w", closefd=False)
        importlib.import_module(module).main()
        sys.stdout.flush()
        code = 0
    finally:
        os._exit(code)


def warm_up() -> None:
    """Warm the launcher up; compose the shipped files, and import what answers its questions."""
    composer = compose_shipped_files_once()
    for choices in _MOST_COMPOSED:
        composer.compose(choices)
    warm_launcher.warm_up()
    for question in _QUESTIONS:
        importlib.import_module(question)
