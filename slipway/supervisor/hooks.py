"""Work beside a job's tasks, while they run.

Each hook runs in a process of its own, with a budget of time: one that raises, hangs or leaks harms nobody
but itself. It returns what JSON can hold.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, Callable, List, NamedTuple, Optional

from slipway.supervisor.job import Job
from slipway.supervisor.tasks import Signals, leave_to_end, reap

_CHUNK = 1 << 16


class Hook(NamedTuple):
    """A function of the job that is called beside it.

    Attributes
    ----------
    name
        Its name in the log.
    call
        Function that returns what JSON can hold; ``None`` is nothing.
    take
        Called in the supervisor with what `call` returned: short, and it changes only what is its own.
    budget
        Seconds after which it is ended.
    every
        Seconds between two calls.
    """

    name: str
    call: Callable[[Job], Any]
    take: Callable[[Job, Any], None]
    budget: float = 30.0
    every: float = 60.0


class _Call:
    """One call of a hook, in a process of its own."""

    def __init__(self, hook: Hook, job: Job, signals: Signals) -> None:
        self._hook = hook
        self._job = job
        self._answer = b""
        self.deadline = time.monotonic() + hook.budget
        with contextlib.suppress(OSError):  # a full disk
            sys.stdout.flush()
        self.descriptor, there = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self.descriptor)
            os.close(there)
            raise
        if not self._pid:
            os.close(self.descriptor)
            self._answer_from_child(there, signals)
        os.close(there)

    def is_over(self) -> bool:
        """Read what there is, without waiting; end the call if its time is up."""
        while select.select([self.descriptor], [], [], 0)[0]:
            chunk = os.read(self.descriptor, _CHUNK)
            self._answer += chunk
            if not chunk:
                self._end(killed=False)
                return True
        if time.monotonic() < self.deadline:
            return False
        self._end(killed=True)
        return True

    def _end(self, killed: bool) -> None:
        self.stop()
        if killed:
            self._job.say(f"{self._hook.name}: no answer within {self._hook.budget:g} seconds")
        elif self._answer:
            try:
                self._hook.take(self._job, json.loads(self._answer.decode("utf-8")))
            except Exception as error:
                self._job.say(f"{self._hook.name}: {error!r}")

    def stop(self) -> None:
        """End the call without an answer."""
        for kill in (os.killpg, os.kill):  # not yet the leader of its group, in its first moment
            with contextlib.suppress(OSError):
                kill(self._pid, signal.SIGKILL)
        os.close(self.descriptor)
        leave_to_end(self._pid)
        reap()

    def _answer_from_child(self, there: int, signals: Signals) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the tasks' alone
            signals.release()
            answer = self._hook.call(self._job)
            if answer is not None:
                with os.fdopen(there, "wb") as stream:
                    stream.write(json.dumps(answer).encode("utf-8"))
            code = 0
        except BaseException:
            import traceback  # late: it takes long, and most hooks do not raise

            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


class Polling:
    """The hooks while the tasks run: each is called again and again, never twice at once."""

    def __init__(self, job: Job, signals: Signals, hooks: List[Hook]) -> None:
        self._job = job
        self._signals = signals
        self._due = [(time.monotonic() + hook.every, hook) for hook in hooks]
        self._calls: List[_Call] = []

    def poll(self) -> Optional[float]:
        """Do what is due; return the seconds until something is again, ``None`` where nothing ever will be.

        The end of a call's process wakes the supervisor by itself.
        """
        self._calls = [call for call in self._calls if not call.is_over()]
        now = time.monotonic()
        for index, (due, hook) in enumerate(self._due):
            if due <= now and all(call._hook is not hook for call in self._calls):
                self._due[index] = (now + hook.every, hook)
                try:
                    self._calls.append(_Call(hook, self._job, self._signals))
                except OSError as error:
                    self._job.say(f"{hook.name}: {error}")
        moments = [call.deadline for call in self._calls]
        moments += [due for due, hook in self._due if all(call._hook is not hook for call in self._calls)]
        return min(moments) - time.monotonic() if moments else None

    def stop(self) -> None:
        """End the calls that have not answered."""
        for call in self._calls:
            call.stop()
        self._calls = []
