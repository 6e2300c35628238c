"""The tasks' processes, and the signals that the job is sent while they run."""

import contextlib
import os
import signal
import subprocess
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from slipway.common.node.settings import ALLOCATION, SLURM

# Slurm and people send these; SIGHUP is that of a terminal which is closed.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Children without a waiting caller.
_unreaped: List[int] = []


class Signalled(Exception):
    """The job was signalled before its tasks had started."""


class Signals:
    """The signals that the job is sent: held back until somebody waits for them.

    Commands that the supervisor starts inherit that: a signal to all processes of a job ends no ``scontrol``
    half done. Tasks do not (`Signals.release`).

    Attributes
    ----------
    first
        Name of the first signal, without ``SIG``; empty if there was none.
    turn
        Called with each signal that came, or ``None``; it returns the one to take.
    """

    def __init__(self) -> None:
        self.first = ""
        self.turn: Callable[[Optional[int]], Optional[int]] = lambda number: number
        # The parent process may ignore it, and then the exit codes of children are lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A signal that whoever started the job ignores, as `nohup` does, stays ignored.
        self._held = {number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, self._held)

    def release(self) -> None:
        """Let signals through again, in a process that was just forked."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def wait(self, seconds: Optional[float] = None) -> Optional[int]:
        """Wait for a signal, or for a child's end where `SIGCHLD` is blocked; return the number to take."""
        signals = self._held | {signal.SIGCHLD}
        if seconds is None:
            return self.turn(signal.sigwaitinfo(signals).si_signo)
        signal_info = signal.sigtimedwait(signals, max(seconds, 0))
        return self.turn(None if signal_info is None else signal_info.si_signo)

    def pending(self) -> Optional[int]:
        """Return the number of a signal that has come already."""
        signal_info = signal.sigtimedwait(self._held, 0) if self._held else None
        return None if signal_info is None else self.turn(signal_info.si_signo)

    def check(self) -> None:
        """Raise `Signalled` if the job was signalled."""
        number = self.pending()
        if number is not None:
            self.note(number)
            raise Signalled

    def sleep(self, seconds: float) -> None:
        """Wait; raise `Signalled` at once if the job is signalled."""
        number = self.wait(seconds)
        if number is not None and number != signal.SIGCHLD:
            self.note(number)
            raise Signalled

    def note(self, number: int, as_name: str = "") -> None:
        """Remember a signal if it is the first one."""
        self.first = self.first or as_name or signal.Signals(number).name[3:]


# By a signal to the job: its name for the marks, and the signal that its tasks are sent, if any.
Forwarding = Dict[int, Tuple[str, Optional[int]]]


def map_signals(scheduler: str, save_signal: Optional[str]) -> Forwarding:
    """Return how signals to a job become signals to its tasks."""
    if scheduler == SLURM:
        return {
            # When a job ends, Slurm itself signals its tasks; a signalled srun would kill them before they
            # have saved.
            signal.SIGTERM: ("TERM", None),
            signal.SIGINT: ("INT", signal.SIGTERM),
            signal.SIGHUP: ("HUP", signal.SIGTERM),
            signal.SIGUSR1: ("USR1", signal.SIGUSR1),
        }
    saves_by_term = scheduler == ALLOCATION and save_signal == "TERM"
    return {
        signal.SIGTERM: ("TERM", signal.SIGTERM),
        signal.SIGINT: ("TERM", signal.SIGTERM),
        signal.SIGHUP: ("TERM", signal.SIGTERM),
        signal.SIGUSR1: ("USR1", signal.SIGTERM if saves_by_term else signal.SIGUSR1),
    }


# Commands before the tasks end at any signal.
_ALL_END: Forwarding = dict.fromkeys(_SIGNALS, ("", signal.SIGTERM))


def run_before(command: Sequence[str], signals: Signals) -> int:
    """Run a command before the tasks, which a signal to the job ends; return its exit code.

    Raises
    ------
    Signalled
        If there was one.
    """
    code = run([(command, None)], signals, _ALL_END)
    if signals.first:
        raise Signalled
    return code


def run(
    commands: Sequence[Tuple[Sequence[str], Optional[Dict[str, str]]]],
    signals: Signals,
    forward: Forwarding,
    poll: Optional[Callable[[], Optional[float]]] = None,
    end: Optional[Callable[[], Optional[int]]] = None,
) -> int:
    """Run processes until all have ended; the first that fails ends the others.

    Parameters
    ----------
    commands
        The argument vector of each, and its environment; ``None`` is the supervisor's own.
    poll
        Called while they run; it returns for how many seconds it need not be called again, ``None`` for
        ever. The end of any child calls it as well.
    end
        Called after `poll`; it returns a signal that the processes are sent, `SIGKILL` with all that they
        started, or ``None``.

    Returns
    -------
    The exit code of the first that failed, as a shell reports it; else 0.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    processes: List[subprocess.Popen[bytes]] = []
    code = 0
    ending = False
    try:
        try:
            for arguments, environment in commands:
                processes.append(_start(arguments, environment, signals))
        except OSError:
            _send(processes, signal.SIGTERM)  # those that started wait for the others in vain
            for process in processes:
                process.wait()
            raise
        while True:
            reap()
            for process in list(processes):
                status = process.poll()
                if status is None:
                    continue
                processes.remove(process)
                if ending:
                    _end_group(process.pid)
                if status and not code:
                    code = 128 - status if status < 0 else status
                    _send(processes, signal.SIGTERM)
            if not processes:
                return code
            seconds = poll() if poll is not None else None
            number = end() if end is not None else None
            if number == signal.SIGKILL:
                for process in processes:
                    _end_group(process.pid, number)
            elif number is not None:
                ending = ending or number == signal.SIGTERM
                _send(processes, number)
            number = signals.wait(seconds)
            if number in forward:
                name, passed_on = forward[number]
                signals.note(number, name)
                if passed_on is not None:
                    ending = ending or passed_on == signal.SIGTERM
                    _send(processes, passed_on)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def leave_to_end(child: int) -> None:
    """Leave a child to `reap`: one that a file server holds cannot even be killed."""
    _unreaped.append(child)


def reap() -> None:
    """Reap the children left by `leave_to_end` that have ended."""
    for child in list(_unreaped):
        try:
            ended = os.waitpid(child, os.WNOHANG)[0]
        except ChildProcessError:
            ended = child
        if ended:
            _unreaped.remove(child)


def _start(
    arguments: Sequence[str], environment: Optional[Dict[str, str]], signals: Signals
) -> "subprocess.Popen[bytes]":
    """Start a process at the head of its own group.

    It inherits the script's open files, such as the lock of a run.

    Raises
    ------
    OSError
        If there is no such program, or it cannot be started.
    """

    def begin() -> None:
        os.setpgid(0, 0)
        signals.release()

    # No thread runs here that a function between fork and exec could meet.
    return subprocess.Popen(
        list(arguments), stdin=subprocess.DEVNULL, env=environment, close_fds=False, preexec_fn=begin
    )


def _send(processes: "Sequence[subprocess.Popen[bytes]]", number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            process.send_signal(number)


def _end_group(group: int, number: int = signal.SIGTERM) -> None:
    """End a task and its children, or the children that an ended task has left."""
    with contextlib.suppress(OSError):
        os.killpg(group, number)
