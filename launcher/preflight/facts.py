"""What is known of files and of the cluster when a plan is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """Gathered beforehand and read-only; ``None`` is unknown, and skips the checks that need it.

    Attributes
    ----------
    added_keys
        Keys of `trainer`, `exp_manager` and `model` that no shipped file shows, such as
        ``model.micro_batchsize``.
    shipped_keys
        Those that the shipped files show, to find the nearest.
    same_job_name
        Other run directories whose newest launch has the name of this plan's job.
    open_secrets
        Files of secrets that others may read, by the variable that is read from them.
    """

    added_keys: tuple[str, ...] | None = None
    shipped_keys: frozenset[str] | None = None
    same_job_name: tuple[str, ...] | None = None
    open_secrets: Mapping[str, str] | None = None
