"""One cause is one alert: opened, repeated ever less often, and resolved; whoever watches."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from slipway.watch.alerts import (
    ALERTS,
    OPENED,
    OUTBOX,
    REPEATED,
    RESOLVED,
    Origin,
    group_by_alert,
    open_alerts,
    read_messages,
    record,
)
from slipway.watch.detectors import BLIND, FIRING, QUIET, Reading

START = 1_764_000_000.0
HOUR = 3600.0
ORIGIN = Origin(1, 1, "17")


def watch(run_dir: Path, states: list[tuple[float, str]]) -> list[tuple[str, str]]:
    """Record a reading at each time; return the alert and the event of each message."""
    for after, state in states:
        record(run_dir, [Reading("no_step", state, f"at {after:g}")], ORIGIN, {}, now=START + after)
    return [(message.alert, message.event) for message in read_messages(run_dir)]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([(0, QUIET), (60, BLIND)], []),
        ([(0, FIRING)], [("no_step-1", OPENED)]),
        ([(0, FIRING), (60, FIRING), (120, FIRING)], [("no_step-1", OPENED)]),
        ([(0, FIRING), (60, BLIND), (120, FIRING)], [("no_step-1", OPENED)]),
        ([(0, FIRING), (60, QUIET), (90, QUIET)], [("no_step-1", OPENED), ("no_step-1", RESOLVED)]),
        (
            [(0, FIRING), (60, QUIET), (120, FIRING)],
            [("no_step-1", OPENED), ("no_step-1", RESOLVED), ("no_step-2", OPENED)],
        ),
        # An hour after the opening, then two hours after that.
        (
            [(0, FIRING), (HOUR, FIRING), (2 * HOUR, FIRING), (3 * HOUR, FIRING)],
            [("no_step-1", OPENED), ("no_step-1", REPEATED), ("no_step-1", REPEATED)],
        ),
    ],
)
def test_an_alert_is_opened_repeated_and_resolved(
    tmp_path: Path, states: list[tuple[float, str]], expected: list[tuple[str, str]]
) -> None:
    assert watch(tmp_path, states) == expected


def test_the_detectors_of_a_run_have_alerts_of_their_own(tmp_path: Path) -> None:
    record(tmp_path, [Reading("no_step", FIRING, ""), Reading("disk", FIRING, "")], ORIGIN, {}, now=START)
    record(tmp_path, [Reading("no_step", QUIET, ""), Reading("disk", FIRING, "")], ORIGIN, {}, now=START + 60)
    assert [alert.first.detector for alert in open_alerts(tmp_path)] == ["disk"]


def _record(run_dir: Path) -> None:
    for number in range(20):
        for state in (FIRING, QUIET):
            record(run_dir, [Reading("no_step", state, str(number))], ORIGIN, {})


def test_several_watchers_open_an_alert_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    watchers = [fork.Process(target=_record, args=(tmp_path,)) for _ in range(3)]
    for process in watchers:
        process.start()
    for process in watchers:
        process.join(60)
        assert process.exitcode == 0
    messages = read_messages(tmp_path)
    assert len({message.name for message in messages}) == len(messages)
    for alert in group_by_alert(messages):
        assert alert.first.event == OPENED


def test_a_line_that_its_writer_could_not_append_is_appended_by_the_next(tmp_path: Path) -> None:
    record(tmp_path, [Reading("no_step", FIRING, "why")], ORIGIN, {})
    (tmp_path / ALERTS).unlink()  # it died between the two
    assert record(tmp_path, [Reading("no_step", FIRING, "why")], ORIGIN, {}) == []
    later = (tmp_path / OUTBOX / "no_step-1.1.json").stat().st_mtime + 61
    record(tmp_path, [Reading("no_step", FIRING, "another")], ORIGIN, {}, now=later)
    assert [message.why for message in read_messages(tmp_path)] == ["why"]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[" * 3000,
        b"{}",
        b'{"alert": 3}',
        b"1" * 40000,
        json.dumps(
            {
                "alert": "../../x-1",
                "event": "opened",
                "number": 1,
                "time": 1,
                "detector": "../../x",
                "why": "",
            }
        ),
        json.dumps({"alert": "a-1", "event": "shut", "number": 1, "time": 1, "detector": "a", "why": ""}),
        json.dumps({"alert": "a-1", "event": "opened", "number": "1", "time": 1, "detector": "a", "why": ""}),
        json.dumps(
            {"alert": "a-1", "event": "opened", "number": 1, "time": 1e300, "detector": "a", "why": ""}
        ),
    ],
)
def test_lines_of_others_do_no_harm(tmp_path: Path, line: bytes | str) -> None:
    content = line if isinstance(line, bytes) else line.encode()
    (tmp_path / ALERTS).write_bytes(content + b"\n")
    assert read_messages(tmp_path) == []
    record(tmp_path, [Reading("a", FIRING, "a\x1b[31mred")], ORIGIN, {}, now=START)
    [message] = read_messages(tmp_path)
    assert message.why == "a?[31mred"


def test_values_of_others_are_numbers(tmp_path: Path) -> None:
    values = [1, True, "x", None, 10**400, float("nan")]
    content = {
        "alert": "a-1",
        "event": "opened",
        "number": 1,
        "time": 1,
        "detector": "a",
        "why": "",
        "values": values,
    }
    (tmp_path / ALERTS).write_text(json.dumps(content) + "\n")
    [message] = read_messages(tmp_path)
    assert [str(value) for value in message.values] == ["1.0", "nan", "nan", "nan", "inf", "nan"]
