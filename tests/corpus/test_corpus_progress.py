"""Lines of progress in a pipe, and a bar on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipway.corpus.progress import Progress, heartbeat

_PROGRAM = """
from slipway.corpus.progress import Progress
with Progress("fetching", 0, 2, "files") as progress:
    progress.expect("a", 1000)
    progress.advance(1000, items=1)
    progress.say("a line")
    progress.expect("b", 3000)
    progress.advance(1000)
"""


def test_a_line_has_amount_rate_and_time_left() -> None:
    progress = Progress("fetching", 4_000_000, 3, "files")
    progress.advance(1_000_000, items=1)
    assert progress.line(2.0) == "fetching: 1 of 3 files, 1.0 MB of 4.0 MB (25 %), 500.0 kB/s, ETA 00:00:06"


def test_a_total_waits_until_every_size_is_known() -> None:
    progress = Progress("fetching", 0, 2, "files")
    progress.expect("a", 1000)
    progress.advance(500)
    assert progress.line(1.0) == "fetching: 0 of 2 files, 500 B, 500 B/s"
    progress.expect("b", 2000)
    progress.expect("b", 3000)
    assert "500 B of 4.0 kB (12 %)" in progress.line(1.0)


def test_bytes_of_an_earlier_run_are_not_in_the_rate() -> None:
    progress = Progress("fetching", 4000, 1, "files")
    progress.advance(2000, old=True)
    progress.advance(1000)
    assert progress.line(1.0) == "fetching: 0 of 1 files, 3.0 kB of 4.0 kB (75 %), 1.0 kB/s, ETA 00:00:01"


def test_a_terminal_has_a_bar_and_a_pipe_has_lines() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "COLUMNS": "120"}
    command = [sys.executable, "-c", _PROGRAM]
    piped = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [line[9:] for line in piped.stdout.splitlines()] == ["a line"]
    controller, terminal = pty.openpty()
    try:
        subprocess.run(command, env=environment, stdout=terminal, check=True)
        output = os.read(controller, 65536).decode()
    finally:
        os.close(controller)
        os.close(terminal)
    assert "a line\r\n" in output
    assert "━━━━━━━━━━━━┈┈┈┈┈┈┈┈┈┈┈┈ fetching: 1 of 2 files, 2.0 kB of 4.0 kB (50 %)" in output


def test_silent_work_is_told_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipway.corpus.progress._BEAT_SECONDS", 0.02)
    with pytest.raises(ValueError, match="wrong"), heartbeat("training the tokenizer"):
        time.sleep(0.2)
        raise ValueError("wrong")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert lines[0].endswith(" training the tokenizer: 0 s so far")
    time.sleep(0.05)
    assert capsys.readouterr().out == ""
