"""The agreement of all ranks to stop before the last step, by a signal or at the end of their time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from slipway.trainer.config.settings import Settings
from slipway.trainer.distributed import RankContext
from slipway.trainer.signals import STOP_SIGNALS, StopSignals

MAX_TIME = "max_time"
# In the order of their urgency: where the ranks' reasons differ, the last one is reported.
REASONS = (MAX_TIME, *(number.name for number in STOP_SIGNALS))


class Stopping:
    """The requests to stop that this launch may get: a signal to any rank, or the end of its time.

    Parameters
    ----------
    settings
        Its `max_seconds` count for each launch anew, from `started` on.
    started
        ``time.monotonic()`` when this process began.
    """

    def __init__(
        self, settings: Settings, rank_context: RankContext, signals: StopSignals, started: float
    ) -> None:
        self._device = rank_context.device
        self._alone = rank_context.layout.world == 1
        self._signals = signals
        seconds = settings.max_seconds
        self._deadline = None if seconds is None else started + seconds
        self._agreed = 0

    def begin(self) -> None:
        """From now on a signal is not answered by leaving at once; every rank is there when this returns."""
        self._reduce_max(0)
        self._signals.mark_training()

    def agree_now(self) -> str | None:
        """Return why to stop, one of :data:`REASONS`, or None; every rank calls this and gets the same.

        The first answer is final, and later calls cost nothing.
        """
        self._agreed = self._agreed or self._reduce_max(self._find_reason())
        return self.known

    @property
    def known(self) -> str | None:
        """Return why to stop as far as it was agreed upon, or None; no rank waits for another."""
        return REASONS[self._agreed - 1] if self._agreed else None

    def flags(self) -> list[bool]:
        """Return for each of :data:`REASONS` whether this rank was asked to stop for it."""
        asked = self._find_reason()
        return [asked == number for number, _ in enumerate(REASONS, start=1)]

    def agree(self, flags: Sequence[bool]) -> None:
        """Take over the reasons to stop that any rank has; `flags` are the same on all ranks."""
        highest = max((number for number, flag in enumerate(flags, start=1) if flag), default=0)
        self._agreed = self._agreed or highest

    def _find_reason(self) -> int:
        if number := self._signals.requested():
            return 1 + REASONS.index(number.name)
        is_over = self._deadline is not None and time.monotonic() > self._deadline
        return 1 + REASONS.index(MAX_TIME) if is_over else 0

    def _reduce_max(self, value: int) -> int:
        if self._alone:
            return value
        box = torch.tensor([value], dtype=torch.int32, device=self._device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return int(box.item())
