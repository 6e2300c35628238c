"""`slipway` as forks of a process that has imported it, for the tests that run it hundreds of times.

Importing takes most of a short command. From there on a fork is the command: `launcher.main.main` with the
arguments, the environment, the directory and the outputs of its caller, in a process of its own. Starting the
program itself is tested by all that run it with `subprocess`.

Run as a script, it listens on a Unix socket. A request is one JSON object, with the files for stdout and
stderr; it is answered with the process's id, and with the exit code when it has ended.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SLIPWAY = Path(sys.executable).with_name("slipway")
_MOST_BYTES = 1 << 20


def run_forked(
    words: Sequence[object], *, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `slipway` with these words, as ``subprocess.run([SLIPWAY, *words], text=True, ...)`` would."""
    command = [str(SLIPWAY), *(str(word) for word in words)]
    request = json.dumps({"command": command, "cwd": str(cwd), "environment": env}).encode()
    assert len(request) < _MOST_BYTES
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        connection.connect(_server())
        socket.send_fds(connection, [request], [stdout.fileno(), stderr.fileno()])
        connection.settimeout(timeout)
        pid = int(connection.recv(100))
        try:
            answer = connection.recv(100)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(command, timeout) from None
        outputs = []
        for file in (stdout, stderr):
            file.seek(0)
            outputs.append(file.read())
    return subprocess.CompletedProcess(command, int(answer), *outputs)


@cache
def _server() -> str:
    """Start the process that forks, once; it ends with this one, however that ends."""
    folder = tempfile.mkdtemp(prefix="slipway-", dir="/tmp")
    address = f"{folder}/socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked_slipway", address],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C is for the tests: the server ends with its stdin, and removes its folder.
        start_new_session=True,
    )
    assert server.stdin and server.stdout
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    assert server.stdout.readline() == b"listens\n"
    return address


def _serve(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(100)
        import launcher
        from launcher.config.compose import compose

        for module in pkgutil.walk_packages(launcher.__path__, "launcher."):
            importlib.import_module(module.name)
        compose([])  # the parser of overrides learns its grammar
        # The forks' collector leaves alone what it would only find alive, and would copy by looking.
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print("listens", flush=True)
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
                os._exit(0)
            connection.close()
    shutil.rmtree(Path(address).parent)


def _answer(connection: socket.socket) -> None:
    """Fork the command, and tell its exit code."""
    with connection:
        text, outputs, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run(json.loads(text), outputs)
        # Whoever asked may be gone.
        with suppress(OSError):
            connection.send(str(pid).encode())
            connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _run(request: dict[str, Any], outputs: list[int]) -> None:
    code: Any = 1
    try:
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
            os.close(output)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["command"]
        code = importlib.import_module("launcher.main").main()
    except SystemExit as end:  # argparse
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    _serve(sys.argv[1])
