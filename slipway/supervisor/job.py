"""The job that the supervisor keeps: what Slurm, the script and the launcher's settings say of it."""

import contextlib
import sys
from typing import Any, Dict, Iterator, NamedTuple, Optional, TextIO

from slipway.common.node import marks
from slipway.common.node.settings import Settings


class Job(NamedTuple):
    """One attempt of a job: a requeue begins another.

    Attributes
    ----------
    id
        ``17``; of an array's task ``17_2``; without Slurm the supervisor's process id.
    attempt
        `id` and the number of requeues, ``17.0``: the beginning of the names of its marks.
    claimant
        Id in a claim: for an array's task the array's.
    link
        Number of the link in its chain, from 1 on.
    by_hand
        The script was submitted by hand: it claims nothing and belongs to no chain.
    directory
        The launch directory.
    began
        Unix time at which the supervisor started.
    environment
        The environment in which the job was submitted, before the script exported anything.
    restarts
        Number of times that its tasks were started again.
    restarted
        Unix time of the last of them; 0 without.
    """

    id: str
    attempt: str
    claimant: str
    link: int
    by_hand: bool
    directory: str
    settings: Settings
    began: int
    environment: Dict[str, str]
    restarts: int = 0
    restarted: int = 0

    @property
    def tasks_began(self) -> int:
        """Unix time since when its tasks run, or could: what is older is of tasks before these."""
        return self.restarted or self.began

    @property
    def marks(self) -> str:
        return self.directory + "/marks"

    def say(self, message: str, stream: Optional[TextIO] = None) -> None:
        """Write a line to the job's log; on a full disk the job goes on without it."""
        with contextlib.suppress(OSError, ValueError):
            print(f"Job {self.claimant}: {message}", file=stream or sys.stdout, flush=True)

    @contextlib.contextmanager
    def best_effort(self, failure: str) -> Iterator[None]:
        """Log an error of the body and go on; only `Leave` ends the job."""
        try:
            yield
        except Leave:
            raise
        except Exception as error:
            self.say(f"{failure}: {error!r}", sys.stderr)
            if not isinstance(error, (OSError, ImportError)):  # missing files, not bugs
                print_traceback("  ")

    def leave(self, name: str, fields: Dict[str, Any], sync: bool = True) -> None:
        """Leave a mark of this attempt, or say that it could not be left."""
        if not marks.leave(self.directory, self.attempt, name, self.settings.tag, fields, sync=sync):
            self.say(f"could not leave the mark {self.marks}/{self.attempt}.{name}.json")


class Leave(Exception):
    """The job has nothing to do: its message says why, and `code` is its exit code."""

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(why)
        self.code = code


class Unusable(Exception):
    """The job cannot begin: its message says why."""


def print_traceback(indent: str = "") -> None:
    """Print the traceback of the error that is being handled, as far as that is possible.

    An indented one is not taken for the tasks' own word for their end.
    """
    import textwrap  # late: it takes long, and most jobs need none
    import traceback

    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(textwrap.indent(traceback.format_exc(), indent))
