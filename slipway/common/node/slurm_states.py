"""Slurm's words for the state of a job, and for why it ends one."""

from typing import Mapping, Optional

# From JOB STATE CODES of the manual pages of squeue and sacct, Slurm 22.05 to 25.05, and the states that
# slurm.h names besides; with the state that each amounts to.
STATES: Mapping[str, str] = {
    "BOOT_FAIL": "NODE_FAIL",
    "CANCELLED": "CANCELLED",
    "COMPLETED": "COMPLETED",
    "COMPLETING": "COMPLETING",
    "CONFIGURING": "PENDING",
    "DEADLINE": "DEADLINE",
    "EXPEDITING": "PENDING",
    "FAILED": "FAILED",
    "LAUNCH_FAILED": "FAILED",
    "NODE_FAIL": "NODE_FAIL",
    "OUT_OF_MEMORY": "OUT_OF_MEMORY",
    "PENDING": "PENDING",
    "POWER_UP_NODE": "PENDING",
    "PREEMPTED": "PREEMPTED",
    "RECONFIG_FAIL": "NODE_FAIL",
    "REQUEUED": "PENDING",
    "REQUEUE_FED": "PENDING",
    "REQUEUE_HOLD": "PENDING",
    "RESIZING": "RUNNING",
    "RESV_DEL_HOLD": "PENDING",
    "REVOKED": "CANCELLED",
    "RUNNING": "RUNNING",
    "SIGNALING": "RUNNING",
    # Requeued and held: Slurm still has the job.
    "SPECIAL_EXIT": "PENDING",
    "STAGE_OUT": "COMPLETING",
    "STOPPED": "SUSPENDED",
    "SUSPENDED": "SUSPENDED",
    "TIMEOUT": "TIMEOUT",
    "UPDATE_DB": "PENDING",
}

# A job of such a state ends as nothing else any more.
FINAL = frozenset(
    ("CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)

# A job of such a state has not ended.
LIVE = frozenset(("PENDING", "RUNNING", "SUSPENDED"))

# Reasons why Slurm ends a job whose script still runs, and the job's state afterwards.
END_REASONS: Mapping[str, str] = {
    "BootFail": "NODE_FAIL",
    "DeadLine": "DEADLINE",
    "NodeDown": "NODE_FAIL",
    "OutOfMemory": "OUT_OF_MEMORY",
    "TimeLimit": "TIMEOUT",
}

# States of a job that Slurm takes from its nodes, to begin it again.
_REQUEUED = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def plain_word(word: str) -> str:
    """Return a state's word alone, without who (``CANCELLED by 1000``) or the flags that may follow it."""
    return word.replace(",", " ").split()[0].rstrip("+") if word.strip(", ") else ""


def is_ending(word: str) -> Optional[bool]:
    """Return True if Slurm is ending the calling job; ``None`` for unknown words, such as a site's."""
    word = plain_word(word)
    state = STATES.get(word)
    if state in ("RUNNING", "SUSPENDED"):
        return False
    if word in _REQUEUED or state == "COMPLETING" or (state in FINAL and state != "COMPLETED"):
        return True
    return None


def state_at_end(state: str, reason: str, preempted: str, requeue: bool = False) -> Optional[str]:
    """Return the final state of a job whose script still runs; ``None`` if Slurm is not ending it.

    While the script lives the state is COMPLETING, and only the reason says why; for a job that leaves in
    time at a preemption only the time of the preemption does.

    Parameters
    ----------
    state, reason, preempted
        ``JobState``, ``Reason`` and ``PreemptTime`` of ``scontrol show job``; empty is not known.
    requeue
        The job may be requeued (``Requeue=1``): Slurm distinguishes that from a cancellation only afterwards.
    """
    word = plain_word(state)
    if word not in ("RUNNING", "COMPLETING"):
        return word or None
    if preempted[:1].isdigit():
        return "PREEMPTED"
    if word == "RUNNING":
        return None
    if reason == "None":
        return None if requeue else "CANCELLED"
    return END_REASONS.get(reason)
