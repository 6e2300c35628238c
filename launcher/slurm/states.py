"""The states of a job, Slurm's words for them and for why a job waits, and the actions on jobs."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from launcher import errors
from slipway.common.node.slurm_states import FINAL, STATES, plain_word


class State(enum.Enum):
    """The states of a job, in Slurm's words, and three of Slipway's own."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    DEADLINE = "DEADLINE"
    SUSPENDED = "SUSPENDED"
    NOT_SUBMITTED = "NOT_SUBMITTED"
    # The payload saved and left before its end (exit code 75), to be launched again: FAILED, to Slurm.
    INTERRUPTED = "INTERRUPTED"
    # Unknown must never be shown as healthy.
    UNKNOWN = "UNKNOWN"

    @property
    def is_final(self) -> bool:
        return self in _FINAL

    @property
    def is_good(self) -> bool:
        return self is State.COMPLETED

    @property
    def is_live(self) -> bool:
        """Return True if the scheduler has the job: it waits, runs or is ending. UNKNOWN is not live."""
        return not self.is_final and self is not State.UNKNOWN

    @property
    def exit_code(self) -> int:
        if self is State.UNKNOWN:
            return errors.NOT_KNOWN
        if self.is_live:
            return errors.UNDER_WAY
        if self is State.INTERRUPTED:
            return errors.INTERRUPTED
        return errors.DONE if self.is_good else errors.WENT_WRONG


_FINAL = {State(word) for word in FINAL} | {State.NOT_SUBMITTED, State.INTERRUPTED}


class Action(enum.Enum):
    """An action of a scheduler on jobs; the value is its participle."""

    CANCEL = "cancelled"
    SAVE = "told to save"
    HOLD = "held"
    RELEASE = "released"


def choose_exit_code(states: Iterable[State]) -> int:
    """Return the exit code of the worst of several jobs; 0 without jobs."""
    return errors.worst_code(state.exit_code for state in states)


_HELD = "held, `slipway release RUN` lets it go"

# Explanations of Slurm's words for a waiting job, with a remedy.
_REASONS: Mapping[str, str] = {
    "AssocGrpGRES": "its account's share of GPUs is in use",
    "AssociationJobLimit": "its account has as many jobs as it may",
    "BadConstraints": "no node can ever satisfy its request, `slipway cancel RUN`",
    "BeginTime": "its time to begin has not come; after a requeue that takes two minutes",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "its dependency can no longer be satisfied, `slipway cancel RUN`",
    "InvalidAccount": "its account is not valid, cluster.account",
    "InvalidQOS": "its quality of service is not valid, cluster.qos",
    "JobArrayTaskLimit": "the tasks before it come first",
    "JobHeldAdmin": "held by an administrator, who alone can release it",
    "JobHeldUser": _HELD,
    "PartitionDown": "its partition takes no jobs now",
    "PartitionInactive": "its partition starts no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives, or for fewer than it requires",
    "PartitionTimeLimit": "it asks for more time than its partition gives",
    "Priority": "other jobs come first",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as you may at a time",
    "ReqNodeNotAvail": "nodes that it asks for are down, drained or reserved",
    "Resources": "it is next, and waits for nodes",
    "job requeued in held state": _HELD,
    "launch failed requeued held": _HELD,
}

# The same for states that amount to PENDING.
_PENDING_STATES: Mapping[str, str] = {
    "CONFIGURING": "its nodes are being made ready",
    "REQUEUE_HOLD": f"requeued and {_HELD}",
    "RESV_DEL_HOLD": f"its reservation is gone; {_HELD}",
    "SPECIAL_EXIT": f"its site requeued it for how it ended; {_HELD}",
}

# States of a held job, with any reason.
HELD_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


def state_of(word: str) -> State:
    """Return the state of Slurm's word; ``CANCELLED by 1000`` and ``CANCELLED+`` are one."""
    return State(STATES.get(plain_word(word), "UNKNOWN"))


def why_waiting(word: str, reason: str | None) -> str | None:
    """Return why a job waits, from Slurm's words for state and reason: the word, then its meaning."""
    state = plain_word(word)
    if state in _PENDING_STATES:
        return f"{state}: {_PENDING_STATES[state]}"
    if reason is None:
        return None if state == "PENDING" else state
    meaning = _REASONS.get(reason) or _REASONS.get(reason.partition(",")[0])
    return f"{reason}: {meaning}" if meaning else reason
