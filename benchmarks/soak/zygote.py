"""A process that has imported the slow modules, and forks ranks and launchers that start at once.

``python -m benchmarks.soak.zygote serve SOCKET JOURNAL MODULE ...`` serves until its stdin ends; where a
module has a ``warm_up``, it is called once. In a job, ``python zygote.py client SOCKET -u -m
slipway.trainer.pretrain ...`` is the rank: what it asks for is forked with its environment, its files and its
namespaces, gets its signals, and dies with it.

A fork runs the same entry with the same arguments as ``python -m`` would; no part of the product is replaced.
A file in the directory that ``SOAK_CONTROL`` names holds a training before its next step (`hold_steps`).
"""

from __future__ import annotations

import array
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

CONTROL, OFFSET = "SOAK_CONTROL", "SOAK_CLOCK_OFF"
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT)
_PR_SET_PDEATHSIG, _CLONE_NEWNS, _CLONE_NEWUTS = 1, 0x20000, 0x4000000
_WRITES = os.O_WRONLY | os.O_RDWR
# The calls with an effect: before each of these a launcher may be killed.
_CALLS = {
    "os.mkdir",
    "os.rename",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.remove",
    "subprocess.Popen",
    "os.posix_spawn",
}


# --- the client: imports nothing that is slow ---


def connect(path: str, order: dict[str, Any], files: tuple[int, int, int] = (0, 1, 2)) -> socket.socket:
    """Send an order, with the files that become its stdin, stdout and stderr; return the connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    data = json.dumps(order).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([len(data).to_bytes(4, "big")], rights)
    connection.sendall(data)
    return connection


def answers(connection: socket.socket) -> Any:
    """Yield the process id, then the exit code, as far as they come."""
    with connection.makefile("r") as lines:
        for line in lines:
            yield int(line)


def _client(path: str, arguments: list[str]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    ignored = {number for number in _FORWARDED if signal.getsignal(number) is signal.SIG_IGN}
    order = {
        "arguments": arguments[arguments.index("-m") + 1 :],
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109 (pathlib is slow to import)
        "namespaces": os.getpid(),
        "ignored": [int(number) for number in ignored],
    }
    replies = answers(connect(path, order))
    pid = next(replies, None)
    if pid is None:
        sys.exit("the zygote has ended")

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in set(_FORWARDED) - ignored:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    code = next(replies, -signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
        time.sleep(10)
    os._exit(code)


# --- the server ---


class Zygote:
    """A server that forks processes to order, and writes a journal of their jobs, starts and ends."""

    def __init__(self, path: str, journal: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(128)
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, socket.socket] = {}
        self._orders: dict[int, dict[str, Any]] = {}

    def serve(self) -> None:
        """Fork until stdin ends; then end the forked processes."""
        select = self._selector
        select.register(self._listener, selectors.EVENT_READ, self._accept)
        select.register(0, selectors.EVENT_READ, self._leave)
        while True:
            for key, _ in select.select():
                try:
                    key.data()
                except Exception:  # of one of many, who go on
                    traceback.print_exc()

    def _leave(self) -> None:
        for pid in self._clients:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(10)
        try:
            head, rights, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(12))
            size, data = int.from_bytes(head, "big"), b""
            while len(data) < size:
                chunk = connection.recv(size - len(data))
                if not chunk:
                    raise OSError("cut off")
                data += chunk
            files = array.array("i", rights[0][2][:12])
        except (OSError, IndexError):
            connection.close()  # killed while it asked
            return
        order = json.loads(data)
        pid = os.fork()
        if pid == 0:
            _become(order, list(files))
        for file in files:
            os.close(file)
        self._clients[pid], self._orders[pid] = connection, order
        self._note(pid, "begin")
        watch = os.pidfd_open(pid)
        self._selector.register(watch, selectors.EVENT_READ, lambda: self._ended(pid, watch))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._abandoned(pid))
        with suppress(OSError):
            connection.sendall(f"{pid}\n".encode())

    def _abandoned(self, pid: int) -> None:
        """End the process forked for a client that is gone, unless it has ended just now."""
        if pid in self._clients:
            self._selector.unregister(self._clients[pid])
            os.kill(pid, signal.SIGKILL)

    def _ended(self, pid: int, watch: int) -> None:
        _, status, usage = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._note(pid, "end", code=code, cpu=round(usage.ru_utime + usage.ru_stime, 2))
        self._selector.unregister(watch)
        os.close(watch)
        connection = self._clients.pop(pid)
        del self._orders[pid]
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        with suppress(OSError):
            connection.sendall(f"{code}\n".encode())
        connection.close()

    def _note(self, pid: int, event: str, **more: Any) -> None:
        variables = self._orders[pid]["environment"]
        names = {
            "control": CONTROL,
            "job": "SLURM_JOB_ID",
            "attempt": "SLURM_RESTART_COUNT",
            "rank": "SLURM_PROCID",
        }
        fields = {name: variables.get(variable) for name, variable in names.items()}
        line = {
            "event": event,
            "pid": pid,
            "what": self._orders[pid]["arguments"][:2],
            "time": time.monotonic(),
            **fields,
            **more,
        }
        os.write(self._journal, json.dumps(line).encode() + b"\n")


def _become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the ordered command in this process; never return."""
    import ctypes
    import importlib

    code = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 256)
        _enter(libc, order)
        if user := order.get("user"):
            os.setuid(user)
        os.chdir(order["directory"])
        os.environ.clear()
        os.environ.update(order["environment"])
        if offset := os.environ.get(OFFSET):
            libc.soak_clock_set(int(offset))
        for number in order.get("ignored", []):
            signal.signal(number, signal.SIG_IGN)
        module, *arguments = order["arguments"]
        sys.argv = [module, *arguments]
        sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
        if control := os.environ.get(CONTROL):
            hold_steps(control)
        if fatal := order.get("fatal_call"):
            _kill_before(fatal)
        code = importlib.import_module(module).main(arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def _enter(libc: Any, order: dict[str, Any]) -> None:
    """Join the namespaces of a client, or take a host name of one's own."""
    if client := order.get("namespaces"):
        for name, kind in (("mnt", _CLONE_NEWNS), ("uts", _CLONE_NEWUTS)):
            theirs = f"/proc/{client}/ns/{name}"
            if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{name}"):  # noqa: PTH115
                continue  # others need privileges
            handle = os.open(theirs, os.O_RDONLY)
            if libc.setns(handle, kind):
                raise OSError("setns")
            os.close(handle)
    if host := order.get("host"):
        if libc.unshare(_CLONE_NEWUTS):
            raise OSError("unshare")
        socket.sethostname(host)


def hold_steps(control: str) -> None:
    """Hold the training of this process before a step, as files of a directory say.

    ``hold`` has the step after which it is held, as long as the file is there or until the training is asked
    to stop; with ``deaf`` beside it, then too. ``at`` tells that it is held. ``pace`` has the seconds that a
    step lasts longer, and ``load`` those before the training begins. ``crash`` and ``diverge`` have the step
    after which it fails, or its weights are NaN.
    """
    from slipway.trainer import signals
    from slipway.trainer.loop import run

    original_step, original_install = run.Loop.step, signals.StopSignals.install
    handlers: list[signals.StopSignals] = []

    def install(self: signals.StopSignals) -> None:
        handlers.append(self)
        original_install(self)

    def read(name: str) -> float | None:
        try:
            with open(os.path.join(control, name)) as file:  # noqa: PTH118, PTH123 (nothing slow here)
                return float(file.read())
        except (OSError, ValueError):
            return None

    def is_after(name: str, step: int) -> bool:
        after = read(name)
        return after is not None and step >= after

    def hold_before_step(loop: run.Loop) -> list[bool]:
        session = loop.session
        time.sleep(read("pace") or 0)
        is_known = not session.rank_context.is_main
        while (after := read("hold")) is not None and session.progress.step >= after:
            if not is_known:
                with open(os.path.join(control, "at"), "w") as file:  # noqa: PTH118, PTH123
                    file.write(os.environ["SLURM_JOB_ID"])
                is_known = True
            if any(handler.requested() for handler in handlers) and read("deaf") is None:
                break
            time.sleep(0.05)
        if is_after("crash", session.progress.step):
            raise RuntimeError("the soak lets it crash")
        if is_after("diverge", session.progress.step):
            for chunk in session.model.chunks:
                for parameter in chunk.parameters():
                    parameter.data.fill_(float("nan"))
        return original_step(loop)

    signals.StopSignals.install = install  # type: ignore[method-assign]
    run.Loop.step = hold_before_step  # type: ignore[method-assign, assignment]
    time.sleep(read("load") or 0)


def _kill_before(number: int) -> None:
    """Kill this process before it changes the world for the Nth time."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & _WRITES or str(path).startswith("/dev/"):
                return
        elif event not in _CALLS:
            return
        if "/code/" in str(arguments[:2]):
            return  # the files of a launch's code are all alike
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _serve(path: str, journal: str, modules: list[str]) -> None:
    import gc
    import importlib

    gc.disable()
    if any(module.startswith("slipway.trainer") for module in modules):
        from slipway.trainer import cpu_shim, logs

        logs.silence_warnings()
        cpu_shim.install()
    for module in modules:
        getattr(importlib.import_module(module), "warm_up", lambda: None)()
    gc.freeze()
    gc.enable()
    zygote = Zygote(path, journal)
    print("ready", flush=True)
    zygote.serve()


if __name__ == "__main__":
    if sys.argv[1] == "client":
        _client(sys.argv[2], sys.argv[3:])
    _serve(sys.argv[2], sys.argv[3], sys.argv[4:])
