"""Work that the supervisor does while a job's tasks run.

Each hook runs in its own process, with a budget of time: one that raises, hangs or leaks harms nothing
but itself. It returns what JSON can hold.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, Callable, List, NamedTuple, Optional, Set, Tuple

from slipway.supervisor.job import Job, print_traceback
from slipway.supervisor.tasks import Signals, leave_to_end, reap

_CHUNK, _LONGEST_ANSWER = 1 << 16, 1 << 20
# Bytes that any pipe holds.
_PIPE = 1 << 12


class Verdict(NamedTuple):
    """A hook's decision to end the tasks.

    Attributes
    ----------
    rule
        The word for the reason in marks and views, as the name of a failure rule.
    why
        The reason, a sentence without its full stop.
    continues
        The chain goes on: it retries from the newest checkpoint. Otherwise it ends here.
    saves
        The tasks save a checkpoint first, if they can.
    nodes
        Suspect nodes of the job, which what follows does without.
    """

    rule: str
    why: str
    continues: bool = False
    saves: bool = False
    nodes: Tuple[str, ...] = ()


class Hook(NamedTuple):
    """A function of the job that is called while its tasks run.

    Attributes
    ----------
    name
        Its name in the log.
    call
        Function that returns what JSON can hold; ``None`` is nothing.
    take
        Called in the supervisor with the answer of `call`: short, and it changes only its own state. It may
        return a verdict, which ends the tasks.
    budget
        Seconds after which it is ended.
    every
        Seconds between two calls.
    outlives_tasks
        A call that has begun when the tasks end goes on, and ends by itself.
    """

    name: str
    call: Callable[[Job], Any]
    take: Callable[[Job, Any], Optional[Verdict]]
    budget: float = 30.0
    every: float = 60.0
    outlives_tasks: bool = False


class _Call:
    """One call of a hook, in its own process.

    Attributes
    ----------
    is_quiet
        The call before failed: a hook that fails again and again says so once.
    failed
        It had no answer, or the hook could not take it.
    """

    def __init__(self, hook: Hook, job: Job, signals: Signals, is_quiet: bool = False) -> None:
        self.hook = hook
        self.is_quiet = is_quiet
        self.failed = False
        self._job = job
        self._answer = b""
        self._supervisor = os.getpid()
        self.verdict: Optional[Verdict] = None
        self.deadline = time.monotonic() + hook.budget
        with contextlib.suppress(OSError):  # a full disk
            sys.stdout.flush()
        self.descriptor, there = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.descriptor)
            os.close(there)
            raise
        if not self.pid:
            os.close(self.descriptor)
            self._answer_from_child(there, signals)
        os.close(there)

    def is_over(self) -> bool:
        """Read the answer so far, without waiting; end the call if its time is up, or it says too much."""
        while select.select([self.descriptor], [], [], 0)[0]:
            chunk = os.read(self.descriptor, _CHUNK)
            self._answer += chunk
            if not chunk:
                self._take()
            elif len(self._answer) > _LONGEST_ANSWER:
                self._fail(f"an answer of more than {_LONGEST_ANSWER} bytes")
            else:
                continue
            return True
        if time.monotonic() < self.deadline:
            return False
        self._fail(f"no answer within {self.hook.budget:g} seconds")
        return True

    def _fail(self, why: str) -> None:
        self.stop()
        self._say_failure(why)

    def _say_failure(self, why: str, with_traceback: bool = False) -> None:
        self.failed = True
        if not self.is_quiet:
            self._job.say(f"{self.hook.name}: {why}")
            if with_traceback:
                print_traceback("  ")

    def _take(self) -> None:
        self.stop()
        if not self._answer:
            self._say_failure("its process ended without an answer")
            return
        try:
            answer = json.loads(self._answer.decode("utf-8"))
            verdict = None if answer is None else self.hook.take(self._job, answer)
        except (Exception, SystemExit) as error:
            self._say_failure(repr(error), with_traceback=True)
            return
        if isinstance(verdict, Verdict) and all(isinstance(word, str) and word for word in verdict[:2]):
            self.verdict = verdict
        elif verdict is not None:
            self._say_failure(f"{verdict!r:.200} is no verdict")

    def stop(self) -> None:
        """End the call without an answer."""
        for kill in (os.killpg, os.kill):  # not yet the leader of its group, in its first moment
            with contextlib.suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        os.close(self.descriptor)
        leave_to_end(self.pid)
        reap()

    def _answer_from_child(self, there: int, signals: Signals) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the tasks' alone
            signals.release()
            answer = json.dumps(self.hook.call(self._job)).encode("utf-8")
            for start in range(0, len(answer), _PIPE):
                if start:  # it reads when a child's signal wakes it
                    os.kill(self._supervisor, signal.SIGCHLD)
                os.write(there, answer[start : start + _PIPE])
            code = 0
        except BaseException as error:
            self._say_failure(repr(error), with_traceback=True)
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


class Polling:
    """The hooks while the tasks run: each is called again and again, never twice at once.

    Attributes
    ----------
    verdict
        The first verdict of a hook.
    """

    def __init__(self, job: Job, signals: Signals, hooks: List[Hook]) -> None:
        self._job = job
        self._signals = signals
        self._due = [(time.monotonic() + hook.every, hook) for hook in hooks]
        self._calls: List[_Call] = []
        self._failing: Set[Hook] = set()
        self.verdict: Optional[Verdict] = None

    def poll(self) -> Optional[float]:
        """Do the due work; return the seconds until the next, ``None`` if there will be no more.

        The end of a call's process wakes the supervisor by itself.
        """
        over = [call for call in self._calls if call.is_over()]
        self._calls = [call for call in self._calls if call not in over]
        for call in over:
            (self._failing.add if call.failed else self._failing.discard)(call.hook)
        self.verdict = self.verdict or next((call.verdict for call in over if call.verdict), None)
        now = time.monotonic()
        for index, (due, hook) in enumerate(self._due):
            if due <= now and all(call.hook is not hook for call in self._calls):
                self._due[index] = (now + hook.every, hook)
                try:
                    self._calls.append(_Call(hook, self._job, self._signals, hook in self._failing))
                except OSError as error:
                    self._job.say(f"{hook.name}: {error}")
        moments = [call.deadline for call in self._calls]
        moments += [due for due, hook in self._due if all(call.hook is not hook for call in self._calls)]
        return min(moments) - time.monotonic() if moments else None

    def stop(self) -> None:
        """End the calls that have not answered, unless they outlive the tasks."""
        for call in self._calls:
            if call.hook.outlives_tasks:
                leave_to_end(call.pid)  # it writes its answer to nobody
            else:
                call.stop()
        self._calls = []
