"""Reading a trainer's metrics, and the progress that they show."""

from __future__ import annotations

import io
import json
import math

import pytest
from monitor_samples import Runs, append, end, held_out, start, train, validation, whole_training

from launcher.monitor.progress import Progress
from slipway.common.node import events
from slipway.common.node.events import (
    EventReader,
    HeldOut,
    Start,
    Train,
    Validation,
    parse_event,
    read_head_and_tail,
)


def progress(*events: dict[str, object]) -> Progress:
    parsed = [parse_event(json.dumps(event)) for event in events]
    return Progress(event for event in parsed if event)


def test_metrics_are_read_while_they_are_written(runs: Runs) -> None:
    directory = runs.launch()
    path = directory / "results" / "metrics.jsonl"
    reader = EventReader(path)
    assert list(reader.stream()) == []
    append(directory, [start(), held_out(), train(1)])
    assert [type(event) for event in list(reader.stream())] == [Start, HeldOut, Train]
    assert list(reader.stream()) == []
    line = json.dumps(train(2)) + "\n"
    with path.open("a") as stream:
        stream.write(line[:30])
        stream.flush()
        assert list(reader.stream()) == []
        stream.write(line[30:])
    assert [event.step for event in reader.stream() if isinstance(event, Train)] == [2]


def test_a_line_torn_by_a_kill_costs_only_itself(runs: Runs) -> None:
    path = append(runs.launch(), [start(), train(1)])
    with path.open("a") as stream:
        stream.write(json.dumps(train(2))[:25] + json.dumps(start(1)) + "\n" + json.dumps(train(2)) + "\n")
    assert [type(event) for event in list(EventReader(path).stream())] == [Start, Train, Start, Train]


def test_unknown_events_are_passed_over() -> None:
    for line in (
        "",
        "[]",
        "null",
        "{}",
        '{"kind": "gradient"}',
        '{"kind": "train"}',
        '{"kind": "train", "x',
        "\0",
    ):
        assert parse_event(line) is None
    assert parse_event('{"kind": "data", "split": "train", "tokens": 5}') is None


def test_a_loss_that_is_not_a_number() -> None:
    event = parse_event('{"kind": "train", "time": 1, "step": 2, "loss": NaN, "lr": null}')
    assert isinstance(event, Train) and event.loss is not None and math.isnan(event.loss)
    assert event.learning_rate is None


def long_training(last: int, every: int = 100) -> list[dict[str, object]]:
    events = [start(max_steps=100_000), held_out()]
    for step in range(1, last + 1):
        events += [train(step)] + ([validation(step, 4.0 + step / 1e6)] if step % every == 0 else [])
    return events


@pytest.mark.parametrize("last", [1, 30, 99, 100, 101, 140, 400, 2399, 2400, 2401, 2450])
def test_the_ends_of_a_file_give_the_same_progress_as_all_of_it(runs: Runs, last: int) -> None:
    path = append(runs.launch(), long_training(last))
    quick, whole = Progress(read_head_and_tail(path)), Progress(EventReader(path).stream())
    for name in ("step", "max_steps", "loss", "validation_loss", "tokens_per_second", "eta", "held_out"):
        assert getattr(quick, name) == getattr(whole, name), name
    assert len(read_head_and_tail(path)) < 100


def test_a_validation_far_back_is_found(runs: Runs) -> None:
    path = append(runs.launch(), long_training(3999, every=2000))
    validations = [event for event in read_head_and_tail(path) if isinstance(event, Validation)]
    assert [event.step for event in validations] == [2000]
    with path.open("a") as stream:
        stream.write(json.dumps(train(4000)) + "\n" + json.dumps(validation(4000, 3.0))[:-4])
    assert [event for event in read_head_and_tail(path) if isinstance(event, Validation)] == validations
    assert read_head_and_tail(path.with_name("missing")) == []


def test_a_validation_across_two_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_BLOCK_BYTES", 64)
    line = json.dumps(validation(7, 4.0)).encode() + b"\n"
    for padding in range(2000):
        content = line + b" " * padding + b"\n"
        found = events.find_last_line(io.BytesIO(content), b'"val_loss"', len(content))
        (event,) = events.parse_events(found)
        assert isinstance(event, Validation) and event.step == 7, padding


def test_the_rate_of_a_restarted_trainer_is_not_counted_over_the_pause(runs: Runs) -> None:
    path = append(runs.launch(), long_training(100))
    later = [start(100, time=9000.0, max_steps=100_000)]
    append(path.parents[1], [*later, *(train(step, time=9000.0 + step) for step in range(101, 1000))])
    assert Progress(read_head_and_tail(path, restarted=True)).steps_per_second == 1.0


def test_progress() -> None:
    current = progress(*whole_training(0, 100)[:-1])
    assert (current.step, current.max_steps, current.tokens_per_second) == (100, 300, 4096.0)
    assert current.steps_per_second == 2.0 and current.eta == 100.0
    assert current.held_out and current.held_out.unigram_entropy == 6.1


def test_progress_is_unknown_before_the_first_steps() -> None:
    empty = progress()
    assert (empty.step, empty.eta, empty.loss, empty.tokens_per_second) == (None, None, None, None)
    started = progress(start(40))
    assert (started.step, started.eta) == (40, None)
    assert progress(start(), train(1)).eta is None  # one point has no rate


def test_eta_after_a_resume_counts_from_the_resumed_step() -> None:
    # Requeued in the same file: an hour later, at step 50, twice as fast.
    events = [start(), train(1), train(100), start(50, time=5000.0)]
    assert progress(*events).eta is None
    events += [train(51, time=5001.0), train(55, time=5002.0)]
    assert progress(*events).eta == (300 - 55) / 4


def test_eta_is_never_negative() -> None:
    assert progress(start(max_steps=100), train(90), train(120)).eta == 0.0
    assert progress(start(300), end(300, 1001.0)).eta == 0.0
    backwards = progress(start(), train(1, time=1000.0), train(2, time=900.0))  # a clock set back
    assert backwards.eta is None
    repeated = progress(start(), train(5), train(3))
    assert repeated.eta is None


def test_validation_and_end() -> None:
    current = progress(start(), train(25), validation(25, 7.5), end(25, 1020.0))
    assert current.validation_loss == 7.5 and current.end and current.end.reason == "max_steps"
