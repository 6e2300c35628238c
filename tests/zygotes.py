"""The processes that fork trainings, launches and workers: one each, for all workers of pytest-xdist.

They are used with ``pytest --warm`` alone. Without it each test starts what it needs as a program of its own,
and pytest is as it comes: slower by minutes, and what one debugs is the test.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any

import psutil
import pytest

from benchmarks.soak import zygote
from benchmarks.soak.boot import TRAINING, run_zygote, short_parent
from tests import collected
from tests.shipped_files import compose_shipped_files_once

# Their directory, where they are shared.
_SHARED = "SLIPWAY_TEST_ZYGOTES"
_LAUNCHING = ("tests.forked_slipway",)
_COLLECTED = collected.__name__
# Set with --warm, for all processes of the tests.
_WARM = "SLIPWAY_TEST_WARM"

_MEMORY = Path("/dev/shm")
_ROOM = 6 << 30  # bytes: three times what all tests write
# The memory that a container of this process may have; absent outside of one.
_LIMIT = Path("/sys/fs/cgroup/memory.max")

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


def is_warm() -> bool:
    """Return whether programs are forked from processes that have imported them."""
    return _WARM in os.environ


def _has_room(place: Path) -> bool:
    """Return True if there is memory for what the tests write, and a file system there executes programs."""
    try:
        state = os.statvfs(place)
    except OSError:
        return False
    rooms = [state.f_bavail * state.f_frsize, psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # it may be "max"
        rooms.append(int(_LIMIT.read_text()))
    return min(rooms) > _ROOM and not state.f_flag & os.ST_NOEXEC


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--warm", action="store_true", help="fork programs and workers from processes that have imported all"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.option.warm:
        return
    os.environ[_WARM] = "1"
    # The tests make 180,000 files: in memory each takes half of the time. `TMPDIR=/tmp` keeps them on disk.
    if "TMPDIR" not in os.environ and _has_room(_MEMORY):
        os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)
    compose_shipped_files_once()
    # Imported and collected objects stay: looking for garbage among them takes a quarter of the time.
    gc.disable()
    has_workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if has_workers and config.option.markexpr != "not slow":
        ranks(), launchers()
        os.environ[_SHARED] = str(_directory())


def pytest_collection_finish() -> None:
    """Have the garbage collector leave the collected tests alone, and look less often: each saves a tenth."""
    if is_warm():
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Have the workers forked by a process that has collected the tests."""
    if not is_warm():
        return
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
