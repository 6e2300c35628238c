"""The training loop of a session, step by step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from slipway.trainer.loop.run import Loop
from slipway.trainer.loop.saving import Saver
from slipway.trainer.loop.session import Session
from slipway.trainer.loop.stopping import Stopping
from slipway.trainer.signals import StopSignals


@contextlib.contextmanager
def loop_of(session: Session) -> Iterator[Loop]:
    """Yield the loop of a session that saves nothing by itself, and that nobody asks to stop."""
    signals = StopSignals(session.rank_context.world.rank)
    loop = Loop(
        session,
        Stopping(session.settings, session.rank_context, signals, time.monotonic()),
        Saver(session, None),
    )
    with contextlib.closing(loop.feed):
        yield loop
