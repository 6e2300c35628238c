"""What Slurm's commands say when they were not answered: a table, and what is made of it."""

from __future__ import annotations

# Slurm's words, in lower case, for a controller that is busy, restarting or gone: asking again may help, and
# of a submission they do not say whether it was taken.
_NOT_ANSWERED = (
    "backup controller in standby",
    "connect failure",
    "connection refused",
    "connection reset",
    "connection timed out",
    "in standby mode",
    "no route to host",
    "not responding",
    "persist_init",  # slurmdbd
    "problem talking to the database",
    "rate limit",
    "resource temporarily unavailable",
    "shutting down",
    "communication",
    "temporarily unable",
    "timed out",
    "transport endpoint",
    "unable to connect",
    "unable to contact",
    "unexpected message received",  # all that scontrol says of it
    "zero bytes",
)

# slurm.conf is nowhere: Slurm's commands are there, and no Slurm is.
NO_SLURM = "this machine belongs to no Slurm"
_NO_CONFIGURATION = ("resolve_ctls_from_dns_srv", "fetch_config: DNS SRV lookup failed")


def is_not_answered(told: str) -> bool:
    """Whether Slurm's words say that nobody answered; all others are an answer."""
    lower = told.lower()
    return any(words in lower for words in _NOT_ANSWERED)


def is_without_configuration(told: str) -> bool:
    """Whether Slurm's words say that this machine belongs to no Slurm."""
    return any(words in told for words in _NO_CONFIGURATION)
