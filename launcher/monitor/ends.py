"""The first and the newest events of a long file, read without what lies between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from launcher.monitor.events import Event, Train, Validation, parse_events
from supervisor.files import open_regular

# Enough for a trainer's start and its first step, and for the newest thirty steps.
_HEAD_BYTES = 1 << 11
_TAIL_BYTES = 1 << 13
# A validation is found in this many bytes before the end, a few thousand steps; further back nobody looks.
_SEARCH_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 15  # of the first look; each further one reads four times as much
_VALIDATION = b'"val_loss"'
_LONGEST_LINE = 1 << 12


def read_ends(
    path: Path, *, restarted: bool = False, head: int = _HEAD_BYTES, tail: int = _TAIL_BYTES
) -> list[Event]:
    """Read what `launcher.monitor.progress.Progress` needs to know now: five hundred runs cost half a second.

    These are the start, the first step, the newest steps and the last validation.

    Parameters
    ----------
    restarted
        Whether the trainer began more than once in this file. Its first step then is none to count the rate
        from.
    """
    try:
        with open_regular(path, buffering=0) as raw:
            return _ends(raw, restarted, head, tail)
    except FileNotFoundError:
        return []


def _ends(stream: BinaryIO, restarted: bool, head: int, tail: int) -> list[Event]:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if size <= head + tail:
        return parse_events(stream.read().rpartition(b"\n")[0])
    begin = _first(parse_events(stream.read(head).rpartition(b"\n")[0]), restarted)
    stream.seek(size - tail)
    content = stream.read()
    skipped = content.find(b"\n") + 1  # the end of a line that began before
    newest = parse_events(content[skipped:].rpartition(b"\n")[0])
    if not any(isinstance(event, Validation) for event in newest):
        begin += last_line_with(stream, _VALIDATION, size - tail + skipped)
    return begin + newest


def _first(events: list[Event], restarted: bool) -> list[Event]:
    """The events before the first step, and that one."""
    steps = [index for index, event in enumerate(events) if isinstance(event, Train)]
    return events[: steps[0] + (not restarted)] if steps else events


def last_line_with(stream: BinaryIO, words: bytes, before: int) -> list[Event]:
    """The event of the last line that holds `words` before a byte; none where there is no such near."""
    end, size, least = before, _BLOCK_BYTES, max(before - _SEARCH_BYTES, 0)
    while end > least:
        start = max(end - size, least)
        stream.seek(start)
        at = stream.read(end - start).rfind(words)
        if at >= 0:
            return _line_around(stream, start + at)
        if start == least:
            break
        end, size = start + len(words) - 1, size * 4  # the words may lie across the blocks
    return []


def _line_around(stream: BinaryIO, at: int) -> list[Event]:
    start = max(at - _LONGEST_LINE, 0)
    stream.seek(start)
    content = stream.read(2 * _LONGEST_LINE)
    begin = content.rfind(b"\n", 0, at - start) + 1
    return parse_events(content[begin:].partition(b"\n")[0])
