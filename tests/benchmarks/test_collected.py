"""Workers of pytest that are forked from one collected session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import collected

# A log and messages, at numbers that nothing else has: the others are numbered from 0.
PROGRAM = """
import os
from tests import collected
collected._held.update({900: os.devnull, 901: "/somewhere/workers.log"})
collected.main(["-u", "-c", "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in (900, 901)))"])
"""


def test_worker_takes_numbers_of_the_sessions_files(tmp_path: Path) -> None:
    """A fork closes them: closing the log of the session closed the file of a test that had its number."""
    messages = tmp_path / "messages"
    with messages.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=Path(collected.__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert done.stdout.split() == [os.devnull, str(messages)], messages.read_text()


def test_files_of_the_collected_session_are_known() -> None:
    if not hasattr(collected, "_session"):
        pytest.skip("only workers that are forked have a collected session")
    # That of pytest's faulthandler; the log of its plugin is there too, unless an import closed it.
    assert collected._held
