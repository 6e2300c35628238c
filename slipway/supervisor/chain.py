"""The decisions of a chain of jobs: a pure state machine; `Link` carries them out.

A link that has begun is in one of three states, and two events move it::

                    look_back                     after_end
    [waits] ──────────────────────► RUNS ──────────────────────► PASSED   the next link goes on
       │    the link before said          done, stop, or         (or nothing, if it was the last)
       │    `continue` or `exclude`       max_failures reached
       │                                       │
       └───────────────────────────────────────┴───────────────► OVER     no link does anything any more
            the link before was done, stopped or cancelled

The successor is submitted when a link begins, so that a node that dies does not end the chain, and only where
it is missing.

Within RUNS the tasks may be started again (`why_not_again`), as often as `ChainSettings.restarts` says.

A failure is a start of the tasks that ended without a newer checkpoint than it began with. Links that were
preempted or requeued, or left because of sick nodes, do not count. A newer checkpoint forgives all failures
before it.
"""

from enum import Enum
from typing import NamedTuple, Optional, Tuple

from slipway.common.node.settings import ChainSettings


class Phase(Enum):
    """The states of a link."""

    RUNS = "runs"
    PASSED = "passed"
    OVER = "over"


class Ending(NamedTuple):
    """The end of a link: as it judged itself, or as the next link judges it.

    Attributes
    ----------
    verdict
        ``done``, ``continue``, ``exclude`` (and continue) or ``stop``.
    rule
        Name of the rule that matched.
    why
        The reason, a sentence without its full stop.
    nodes
        Nodes at fault, which are avoided from now on.
    """

    verdict: str = "continue"
    rule: str = "unknown"
    why: str = "nothing is known of its end"
    nodes: Tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        return self.rule not in ("preempted", "ended_by_user", "sick_node")

    @property
    def is_final(self) -> bool:
        return self.verdict in ("done", "stop")


class Before(NamedTuple):
    """The known facts about the links before one that begins.

    Attributes
    ----------
    job
        Job of the link directly before; empty if it is not known.
    ending
        How that ended.
    is_judged_now
        This link judged it in its place: the effects of `ending` are still to be carried out.
    state
        Slurm's word for it now that it is over.
    failures
        Number of failures before the newest link that left a mark; 0 if none did.
    links
        Number of links from that one on, it included, up to the one directly before.
    has_progressed
        There is a newer checkpoint than when that one began.
    """

    job: str
    ending: Ending
    is_judged_now: bool = False
    state: str = ""
    failures: int = 0
    links: int = 1
    has_progressed: bool = False


class Transition(NamedTuple):
    """A transition of a link.

    Attributes
    ----------
    phase, failures
        The state that it leads to, and the number of failures in a row so far.
    ending
        The end that it follows, whose nodes are to be avoided first; if the link is OVER, so is its chain.
    submits
        The next link is to be submitted after that.
    """

    phase: Phase
    failures: int
    ending: Optional[Ending] = None
    submits: bool = False


def look_back(
    settings: ChainSettings, link: int, before: Optional[Before], has_successor: bool
) -> Transition:
    """Decide the action of a link that begins; `before` is ``None`` for the first link."""
    if before is None:
        return Transition(Phase.RUNS, 0, None, _submits(settings, link, has_successor))
    ending = before.ending
    is_failure = ending.is_failure and before.state != "PREEMPTED"
    failures = 0 if before.has_progressed else before.failures + before.links - (0 if is_failure else 1)
    if before.state == "CANCELLED" and ending.verdict != "done":
        ending = ending._replace(verdict="stop", why="it was cancelled", nodes=())
    elif before.is_judged_now:
        ending = limit_failures(settings, ending, failures, before.has_progressed)
    else:  # that link has seen to its nodes itself
        ending = ending._replace(nodes=())
    if ending.is_final:
        return Transition(Phase.OVER, failures, ending)
    return Transition(Phase.RUNS, failures, ending, _submits(settings, link, has_successor))


def decide_after_end(
    settings: ChainSettings,
    link: int,
    ending: Ending,
    failures: int,
    has_progressed: bool,
    has_successor: bool,
) -> Transition:
    """Decide what follows when the tasks of a link have ended.

    Parameters
    ----------
    failures
        Number of failures in a row before this link.
    has_progressed
        There is a newer checkpoint than when it began.
    """
    failures = 0 if has_progressed else failures + ending.is_failure
    ending = limit_failures(settings, ending, failures, has_progressed)
    if ending.is_final:
        return Transition(Phase.OVER, failures, ending)
    return Transition(Phase.PASSED, failures, ending, _submits(settings, link, has_successor))


def limit_failures(settings: ChainSettings, ending: Ending, failures: int, has_progressed: bool) -> Ending:
    """Stop a chain that gets nowhere: `failures` counts this ending."""
    if ending.is_final or not ending.is_failure or has_progressed:
        return ending
    if (settings.links == 1 and not settings.restarts) or failures < settings.max_failures:
        return ending
    count = "it" if failures == 1 else f"{failures} {'starts' if settings.restarts else 'links'} in a row"
    why = f"{count} ended without a new checkpoint: {ending.why}"
    return ending._replace(verdict="stop", why=why, nodes=())


class Allocation(NamedTuple):
    """The known facts about the allocation in which tasks have ended.

    Attributes
    ----------
    is_running
        Slurm does not end the job, as far as it says.
    seconds
        Time that is left of it; ``None`` for no limit.
    has_healthy
        There are enough nodes without those at fault.
    """

    is_running: bool = True
    seconds: Optional[float] = None
    has_healthy: bool = True


# Rules of ends at which the tasks have left as they were to, or the job itself ends.
_OF_JOB = ("left", "saved", "time_limit", "preempted", "ended_by_user", "cancelled", "lost")
# A start that has less time than that before the job saves and leaves gets nowhere.
_LEAST_SECONDS = 60


def why_not_again(
    settings: ChainSettings, restarts: int, ending: Ending, allocation: Allocation, margin: int
) -> str:
    """Return why the tasks of a job are not started again inside of it; empty if they are.

    Parameters
    ----------
    restarts
        Number of times that they were.
    ending
        Their end, if it is final by `decide_after_end` as well.
    margin
        Seconds before the limit at which the job saves.
    """
    if ending.is_final or ending.rule in _OF_JOB:
        return ending.why
    if restarts >= settings.restarts:
        return f"resilience.restarts={settings.restarts} are used up"
    if not allocation.is_running:
        return "Slurm ends the job, or does not answer"
    if allocation.seconds is not None and allocation.seconds < margin + _LEAST_SECONDS:
        return f"{max(0, int(allocation.seconds))} seconds are left of its time limit"
    if ending.nodes and not allocation.has_healthy:
        return f"no other node is there in place of {','.join(ending.nodes)}"
    return ""


def _submits(settings: ChainSettings, link: int, has_successor: bool) -> bool:
    return settings.from_job and link < settings.links and not has_successor
