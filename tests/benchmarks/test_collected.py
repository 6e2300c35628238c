"""Workers of pytest that are forked from one collected session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def test_files_of_the_session_are_its_own(pytestconfig: pytest.Config) -> None:
    """A fork closes them: closing the log of the session closed the file of a test that had its number."""
    handler = pytestconfig.pluginmanager.get_plugin("logging-plugin").log_file_handler  # type: ignore[union-attr]
    number = handler.stream.fileno()
    assert Path(f"/proc/self/fd/{number}").readlink() == Path(os.devnull)
