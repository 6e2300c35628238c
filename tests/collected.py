"""The process that has collected the tests, and forks the workers of pytest-xdist.

Collecting takes a worker many seconds, and all of them collect the same. A fork is what `xdist.remote` makes
of a worker; only its session is the one that has been collected.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# The arguments of pytest.
ARGUMENTS = "SLIPWAY_TEST_ARGUMENTS"

_session: pytest.Session
# The files that the session has open, such as the log of its plugin.
_held: dict[int, str] = {}


def warm_up() -> None:
    """Collect the tests."""
    global _session
    before = _open_files()
    stdout, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # the reporter writes there, in workers too
    config = _prepare(json.loads(os.environ.pop(ARGUMENTS)))
    importlib.import_module("xdist.remote").setup_config(config, None)
    config.workerinput, config.workeroutput = {"workerid": "gw"}, {}
    config.pluginmanager.register(_Collected())
    session = pytest.Session.from_config(config)
    config._do_configure()
    config.hook.pytest_sessionstart(session=session)
    config.hook.pytest_collection(session=session)
    if session.testsfailed:
        raise RuntimeError("some tests cannot be collected")
    _capturing(config).stop_global_capturing()
    os.dup2(stdout, 1)
    os.close(stdout)
    os.close(nothing)
    _held.update((number, path) for number, path in _open_files().items() if number not in before)
    _session = session


def _open_files() -> dict[int, str]:
    paths = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            paths[int(entry.name)] = str(entry.readlink())
    return paths


def _hold_files() -> None:
    """Take the numbers of the session's files again, which a fork closes.

    The session closes them some time: without this, whatever had their numbers by then.
    """
    for number, path in _held.items():
        source = os.open(os.devnull, os.O_WRONLY) if path == os.devnull else os.dup(2)
        if source != number:
            os.dup2(source, number, inheritable=False)
            os.close(source)


def main(arguments: list[str]) -> int:
    """Be the ``python -u -c`` of a gateway of execnet."""
    _hold_files()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    exec(arguments[arguments.index("-c") + 1], {"__name__": "__main__"})
    return 0


def work(channel: Any) -> None:
    """Be a worker: `xdist.remote`, whose configuration is the one of the collected session."""
    remote = importlib.import_module("xdist.remote")
    importlib.import_module("_pytest.config")._prepareconfig = lambda *_: _session.config
    code = compile(inspect.getsource(remote), str(remote.__file__), "exec")
    exec(code, {"__name__": "__channelexec__", "channel": channel})


class _Collected:
    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: Any) -> int:
        """Run tests as `_pytest.main.wrap_session` does, from where they are collected."""
        session, (worker,) = _session, _workers(config)
        config._tmp_path_factory._given_basetemp = Path(config.option.basetemp)
        # Its files are this worker's own, and those of the process that forks are closed.
        _capturing(config).start_global_capturing()
        _capturing(config).suspend_global_capture()
        importlib.import_module("_pytest.faulthandler").pytest_configure(config)
        session.exitstatus = pytest.ExitCode.OK
        try:
            worker.pytest_sessionstart(session)
            worker.pytest_collection_finish(session)
            config.hook.pytest_runtestloop(session=session)
            if session.testsfailed:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        except (KeyboardInterrupt, pytest.exit.Exception):
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        except BaseException:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            config.notify_exception(pytest.ExceptionInfo.from_current(), config.option)
        finally:
            config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
            config._ensure_unconfigure()
        return int(session.exitstatus)


def _prepare(arguments: list[str]) -> Any:
    return importlib.import_module("_pytest.config")._prepareconfig(arguments)


def _capturing(config: Any) -> Any:
    return config.pluginmanager.getplugin("capturemanager")


def _workers(config: Any) -> list[Any]:
    return [
        plugin for plugin in config.pluginmanager.get_plugins() if type(plugin).__name__ == "WorkerInteractor"
    ]
