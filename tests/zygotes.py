"""The processes that fork trainings, launches and workers: one each, for all workers of pytest-xdist."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any

import pytest

from benchmarks.soak import zygote
from benchmarks.soak.boot import TRAINING, run_zygote, short_parent
from tests import collected

# Their directory, where they are shared.
_SHARED = "SLIPWAY_TEST_ZYGOTES"
_LAUNCHING = ("tests.forked_slipway",)
_COLLECTED = collected.__name__

_stack = ExitStack()
_lock = RLock()


@cache
def _directory() -> Path:
    if shared := os.environ.get(_SHARED):
        return Path(shared)
    atexit.register(_stack.close)
    return Path(_stack.enter_context(TemporaryDirectory(prefix="slipway-", dir=short_parent())))


def _starter(name: str, modules: tuple[str, ...]) -> Callable[[], Path]:
    @cache
    def serve() -> Path:
        path = _directory() / name
        if _SHARED not in os.environ:
            _stack.enter_context(run_zygote(path, path.with_suffix(".jsonl"), modules))
        return path

    def start() -> Path:
        with _lock:  # many threads may be the first to launch
            return serve()

    return start


# The socket of each; the journal lies beside it.
ranks = _starter("ranks", TRAINING)
launchers = _starter("launchers", _LAUNCHING)


def pytest_configure(config: pytest.Config) -> None:
    has_workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if has_workers and config.option.markexpr != "not slow":
        ranks(), launchers()
        os.environ[_SHARED] = str(_directory())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Have the workers forked by a process that has collected the tests."""
    path = _directory() / "workers"
    arguments = json.dumps([str(argument) for argument in config.invocation_params.args])
    try:
        _stack.enter_context(
            run_zygote(path, path.with_suffix(".jsonl"), (_COLLECTED,), {collected.ARGUMENTS: arguments})
        )
    except RuntimeError as error:
        reason = str(error).strip().rpartition("\n")[2]
        config.get_terminal_writer().line(f"Each worker collects the tests itself: {reason}")
        return
    config.pluginmanager.register(_ForkedWorkers())
    for spec in specs:
        spec.python = f"{sys.executable} -ISE {zygote.__file__} client {path} -m {_COLLECTED}"


class _ForkedWorkers:
    def pytest_xdist_getremotemodule(self) -> str:
        return f"import {_COLLECTED}; {_COLLECTED}.work(channel)"
