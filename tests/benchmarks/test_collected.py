"""Workers of pytest that are forked from one collected session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import collected

# Of files that nothing else has: the others are numbered from 0.
LOG, MESSAGES = 900, 901


def test_numbers_of_the_sessions_files_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork closes them: closing the log of the session closed the file of a test that had its number."""
    monkeypatch.setattr(collected, "_held", {LOG: os.devnull, MESSAGES: "/somewhere/workers.log"})
    collected._hold_files()
    try:
        assert os.path.samestat(os.fstat(LOG), Path(os.devnull).stat())
        assert os.path.samestat(os.fstat(MESSAGES), os.fstat(2))
    finally:
        os.close(LOG)
        os.close(MESSAGES)
