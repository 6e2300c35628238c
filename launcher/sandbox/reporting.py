"""How `up` and `down` tell what they are doing, without knowing to whom."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Hears of every step."""

    def step(self, what: str) -> None:
        """Something begins that may take a moment."""

    def done(self, what: str) -> None:
        """Something is ready."""


class Silent:
    """Hears nothing: for tests and for callers with a display of their own."""

    def step(self, what: str) -> None:
        pass

    def done(self, what: str) -> None:
        pass
