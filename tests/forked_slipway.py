"""`slipway` as forks of a process that has imported it, for the tests that run it hundreds of times.

Importing takes most of a short command. From there on a fork is the command: `launcher.main.main` with the
arguments, the environment, the directory and the files of its caller, in a process of its own. Starting the
program itself is tested by all that run it with `subprocess`.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak import zygote
from tests import zygotes
from tests.shipped_files import parse_shipped_files_once

SLIPWAY = Path(sys.executable).with_name("slipway")


def run_forked(
    words: Sequence[object], *, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `slipway` with these words, as ``subprocess.run([SLIPWAY, *words], text=True, ...)`` would."""
    arguments = [str(word) for word in words]
    order = {"arguments": [__name__, *arguments], "environment": env, "directory": str(cwd)}
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
                raise subprocess.TimeoutExpired(arguments, timeout) from None
        outputs = []
        for file in (stdout, stderr):
            file.seek(0)
            outputs.append(file.read())
    return subprocess.CompletedProcess([str(SLIPWAY), *arguments], code, *outputs)


def forked_command() -> list[str]:
    """Return a command that is `slipway`, forked, where its files are not closed."""
    client = ["client", str(zygotes.launchers()), "-m", __name__]
    return [sys.executable, "-ISE", zygote.__file__, *client]


def main(arguments: Sequence[str]) -> int:
    """Be `slipway`."""
    sys.argv = [str(SLIPWAY), *arguments]
    try:
        return importlib.import_module("launcher.main").main()
    finally:
        atexit._run_exitfuncs()


def warm_up() -> None:
    """Import all of the launcher, and do what is the same for every command.

    That is the grammar of overrides, what the shipped files hold, the compiled templates, the expressions
    that find secrets, and the supervisor's archive.
    """
    import launcher
    from launcher import attained, releases, secrecy
    from launcher.config import schema
    from launcher.config.compose import compose
    from launcher.rendering import quoting, render, supervision

    for module in pkgutil.walk_packages(launcher.__path__, "launcher."):
        importlib.import_module(module.name)
    parse_shipped_files_once()
    compose([])
    environment = quoting.template_environment(render.TEMPLATE_DIR, None)
    for template in environment.list_templates(extensions=["j2"]):
        environment.get_template(template)
    supervision.supervisor_archive()
    secrecy._suspect()
    schema._any_of_the_cluster()
    attained._shipped()
    releases.images()
