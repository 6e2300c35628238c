"""Slurm's words for why a job waits, and its states as the launcher's own."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.schedulers.base import State
from supervisor.slurm_states import STATES, plain_word

_HELD = "held, `slipway release RUN` lets it go"

# Why a job waits, where Slurm's word alone leaves a user asking what to do.
_PLAIN: Mapping[str, str] = {
    "AssocGrpGRES": "its account's share of GPUs is in use",
    "AssociationJobLimit": "its account has as many jobs as it may",
    "BadConstraints": "no node can ever do what it asks for, `slipway cancel RUN`",
    "BeginTime": "its time to begin has not come; after a requeue that takes two minutes",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "what it waits for cannot happen any more, `slipway cancel RUN`",
    "InvalidAccount": "its account is not valid, cluster.account",
    "InvalidQOS": "its quality of service is not valid, cluster.qos",
    "JobArrayTaskLimit": "the tasks before it come first",
    "JobHeldAdmin": "held by an administrator, who alone can release it",
    "JobHeldUser": _HELD,
    "PartitionDown": "its partition takes no jobs now",
    "PartitionInactive": "its partition starts no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than its partition has or gives",
    "PartitionTimeLimit": "it asks for more time than its partition gives",
    "Priority": "other jobs come first",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as you may at a time",
    "ReqNodeNotAvail": "nodes that it asks for are down, drained or reserved",
    "Resources": "it is next, and waits for nodes",
    "job requeued in held state": _HELD,
    "launch failed requeued held": _HELD,
}

# The same of states that are not what the table above makes of them.
_PLAIN_STATES: Mapping[str, str] = {
    "CONFIGURING": "its nodes are being made ready",
    "REQUEUE_HOLD": f"requeued and {_HELD}",
    "RESV_DEL_HOLD": f"its reservation is gone; {_HELD}",
    "SPECIAL_EXIT": f"its site requeued it for how it ended; {_HELD}",
}

HELD_BY_USER = ("JobHeldUser",)
HELD_BY_ADMIN = ("JobHeldAdmin",)


def state_of(word: str) -> State:
    """Return the state that Slurm's word stands for; ``CANCELLED by 1000`` and ``CANCELLED+`` are one."""
    return State(STATES.get(plain_word(word), "UNKNOWN"))


def why_waiting(word: str, reason: str | None) -> str | None:
    """Say why a job waits: Slurm's word first, and what it means where that helps.

    Parameters
    ----------
    word
        Slurm's word for the state.
    reason
        Slurm's word for the reason; ``None`` if it has none.
    """
    state = plain_word(word)
    if state in _PLAIN_STATES:
        return f"{state}: {_PLAIN_STATES[state]}"
    if reason is None:
        return None if state == "PENDING" else state
    plain = _PLAIN.get(reason) or _PLAIN.get(reason.partition(",")[0])
    return f"{reason}: {plain}" if plain else reason
