"""The processes that fork trainings and launches: one each, for all workers of pytest-xdist."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock

import pytest

from benchmarks.soak.boot import TRAINING, served

# Their directory, where they are shared.
_SHARED = "SLIPWAY_TEST_ZYGOTES"
_LAUNCHING = ("tests.forked_slipway",)

_stack = ExitStack()
_lock = RLock()


@cache
def _directory() -> Path:
    if shared := os.environ.get(_SHARED):
        return Path(shared)
    atexit.register(_stack.close)
    return Path(_stack.enter_context(TemporaryDirectory(prefix="slipway-", dir="/tmp")))


def _starts(name: str, modules: tuple[str, ...]) -> Callable[[], Path]:
    @cache
    def started() -> Path:
        path = _directory() / name
        if _SHARED not in os.environ:
            _stack.enter_context(served(path, path.with_suffix(".jsonl"), modules))
        return path

    def start() -> Path:
        with _lock:  # many threads may be the first to launch
            return started()

    return start


# The socket of each; the journal lies beside it.
ranks = _starts("ranks", TRAINING)
launchers = _starts("launchers", _LAUNCHING)


def pytest_configure(config: pytest.Config) -> None:
    has_workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if has_workers and config.option.markexpr != "not slow":
        ranks(), launchers()
        os.environ[_SHARED] = str(_directory())
