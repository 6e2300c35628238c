"""Runs of a million steps: the streaming readers and columns agree with plain implementations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monitor_samples import Runs, append, end, held_out, log, start, validation

from launcher.monitor import evidence
from launcher.monitor.curves import Curves, choose_evenly, smooth
from launcher.monitor.evidence import PATTERNS, find_errors
from launcher.monitor.progress import Progress
from slipway.common.node import events, progress_lines
from slipway.common.node.events import End, Event, EventReader, HeldOut, Start, Train, Validation, parse_event
from slipway.common.node.progress_lines import NemoReader, TrainingSizes

SMALL = settings(max_examples=200, deadline=None)
STEPS = st.integers(0, 12)
LOSSES = st.none() | st.sampled_from([math.nan, math.inf, 2.5]) | st.floats(0, 10)
TIMES = st.integers(1, 10_000).map(float)


def step_event(step: int, loss: float | None = 2.5) -> dict[str, Any]:
    """Return the trainer's event of a step, with its keys in their order."""
    event = {"kind": "train", "time": 1000.0 + step, "step": step, "loss": loss, "lr": 6e-4, "grad_norm": 1.5}
    sizes = {"consumed_samples": 16 * step, "global_batch": 16, "tokens": 2048, "step_time": 0.5}
    rest = {"tokens_per_second": 4096.5, "tflops_per_gpu": 1e-4, "mfu": None, "data_wait": 0.0}
    return {**event, **sizes, **rest, "memory_bytes": 123}


EVENTS = st.one_of(
    st.builds(Start, TIMES, STEPS, *[st.none()] * 7, st.none() | st.integers(0, 9)),
    st.builds(Train, TIMES, STEPS, LOSSES, st.none(), st.none(), st.none() | TIMES, st.none() | STEPS),
    st.builds(Validation, TIMES, STEPS, st.floats(0, 10)),
    st.builds(End, TIMES, STEPS, st.just("max_steps")),
    st.builds(HeldOut, st.none(), st.floats(0, 10), st.booleans()),
)


class PlainCurves:
    """The curves as dictionaries, from all events."""

    def __init__(self, stream: Iterable[Event]) -> None:
        self.train: dict[int, tuple[float | None, int, float]] = {}
        self.validation: dict[int, float] = {}
        self.resumed: list[int] = []
        self.start: Start | None = None
        self.first_step = 0
        self.seconds = self._until = 0.0
        self._has_trained = True
        for event in stream:
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Start):
            self.first_step = event.step if self.start is None else self.first_step
            self.start, self._until, self._has_trained = event, event.time, False
        elif isinstance(event, Train):
            self._rewind(event)
            tokens = event.tokens or (self.start.tokens_per_step if self.start else None) or 0
            self.train[event.step] = (event.loss, tokens, event.tokens_per_second or 0.0)
        elif isinstance(event, Validation):
            self.validation[event.step] = event.loss
        if isinstance(event, Train | Validation | End):
            self.seconds += max(event.time - self._until, 0.0) if self._until else 0.0
            self._until = max(event.time, self._until)

    def _rewind(self, event: Train) -> None:
        if self._has_trained:
            return
        self._has_trained = True
        origin = self.start.step if self.start else 0
        self.train = {step: point for step, point in self.train.items() if step < event.step}
        self.validation = {step: loss for step, loss in self.validation.items() if step <= origin}
        self.resumed = [step for step in self.resumed if step < origin] + ([origin] if origin else [])

    @property
    def spans(self) -> list[tuple[int, float]]:
        steps = sorted(self.train)
        before = [self.first_step, *steps]
        return [
            ((step - last) * self.train[step][1], self.train[step][2])
            for last, step in zip(before, steps, strict=False)
        ]


def are_equal(first: float | None, second: float | None) -> bool:
    both_nan = first is not None and second is not None and math.isnan(first) and math.isnan(second)
    return both_nan or first == second


@SMALL
@given(st.lists(EVENTS, max_size=40))
def test_columns_agree_with_dictionaries(stream: list[Event]) -> None:
    plain, curves = PlainCurves(stream), Curves()
    curves.add(stream)
    assert list(curves.steps) == sorted(plain.train)
    for index, step in enumerate(curves.steps):
        loss, tokens, speed = plain.train[step]
        assert [column[index] for column in curves.train.columns[2:]] == [tokens, speed]
        assert are_equal(curves.loss(index), loss) and are_equal(
            curves.losses[index], math.nan if loss is None else loss
        )
    assert curves.validations == sorted(plain.validation.items())
    assert (curves.resumed, curves.seconds) == (plain.resumed, plain.seconds)
    assert curves.tokens == (sum(tokens for tokens, _ in plain.spans) or None)
    timed = [(tokens, speed) for tokens, speed in plain.spans if speed]
    seconds = sum(tokens / speed for tokens, speed in timed)
    assert curves.tokens_per_second == (sum(tokens for tokens, _ in timed) / seconds if seconds else None)


def test_an_event_with_an_impossible_number_is_ignored() -> None:
    for change in ({"step": 1 << 63}, {"time": "x"}, {"step": 1e300}):
        assert parse_event(json.dumps({**step_event(3), **change})) is None
    assert parse_event(json.dumps({**step_event(3), "step": (1 << 63) - 1})) is not None
    event = parse_event(json.dumps({**step_event(3), "tokens": -(1 << 70)}))
    assert isinstance(event, Train) and event.tokens is None


def test_an_endless_line_is_not_kept_in_memory(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_LINE", 1 << 10)
    path = append(runs.launch(), [start(), step_event(1)])
    reader = EventReader(path)
    with path.open("ab", buffering=0) as stream:
        stream.write(b" " * 5000)
        assert [type(event) for event in list(reader.stream())] == [Start, Train]
        stream.write(b" " * 5000 + json.dumps(step_event(2)).encode() + b"\n")
        assert list(reader.stream()) == []
        stream.write(json.dumps(step_event(3)).encode() + b"\n" + b"x" * 10)
        assert [event.step for event in reader.stream() if isinstance(event, Train)] == [3]


def many_attempts() -> list[dict[str, Any]]:
    history = [start(), held_out()]
    for origin, last in ((0, 300), (250, 600), (600, 601)):
        history += [start(origin)] if origin else []
        for step in range(origin + 1, last + 1):
            history += [step_event(step, 3.0 - step / 1000)] + (
                [validation(step, 3.0)] if step % 50 == 0 else []
            )
    return [*history, end(601, 2000.0)]


@pytest.mark.parametrize("steps", [20, 64, 4096])
def test_the_newest_events_give_the_same_progress_as_all(runs: Runs, steps: int) -> None:
    path = append(runs.launch(), many_attempts())
    with path.open("a") as stream:
        stream.write(
            json.dumps(step_event(602))[:40] + json.dumps(start(601)) + "\n" + '{"kind": "train", "x"\n'
        )
        stream.write(json.dumps(step_event(602)) + "\n")
    all_events, newest_events = list(EventReader(path).stream()), EventReader(path).newest(steps)
    quick, plain = Progress(newest_events), Progress(all_events)
    for name in ("step", "max_steps", "loss", "validation_loss", "tokens_per_second", "eta", "end"):
        assert getattr(quick, name) == getattr(plain, name), name
    others = [
        [event for event in sequence if not isinstance(event, Train)]
        for sequence in (newest_events, all_events)
    ]
    assert others[0] == others[1]
    trains = [
        [event for event in sequence if isinstance(event, Train)] for sequence in (newest_events, all_events)
    ]
    assert len(trains[0]) <= steps + 4 and trains[0][-20:] == trains[1][-20:]
    firsts = [index for index, event in enumerate(newest_events) if isinstance(event, Start)]
    assert [next(e.step for e in newest_events[index:] if isinstance(e, Train)) for index in firsts] == [
        1,
        251,
        601,
        602,
    ]
    assert events.select_newest(all_events, steps) == newest_events


@SMALL
@given(st.lists(st.floats(-9, 9), max_size=120), st.integers(2, 50))
def test_smoothing_at_some_points_agrees_with_smoothing_all(values: list[float], most: int) -> None:
    chosen = choose_evenly(len(values), most)
    smoothed = smooth(values)
    assert smooth(values, at=chosen) == [smoothed[index] for index in chosen]


PIECES = st.one_of(
    st.sampled_from([*PATTERNS, "; rendezvous at ", "error", "Exception ignored in"]),
    st.sampled_from(["\n", "\r", "x\n", "  File y\n", "ValueError: z\n", "Exited with exit code 75\n"]),
    st.sampled_from(["the training loss of step 3 is nan", "the gradient norm is -inf\n", " is nan"]),
    st.text("ab \n", max_size=30),
)


@SMALL
@given(st.lists(PIECES, max_size=30).map("".join), st.sampled_from([1, 7, 64]), st.booleans())
def test_errors_found_in_blocks_are_those_of_the_whole_log(
    tmp_path_factory: pytest.TempPathFactory, text: str, block: int, is_requeued: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "log.out"
    path.write_text(text)
    since = "; rendezvous at " if is_requeued else None
    whole = find_errors(path, since)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "_BLOCK_CHARACTERS", block)
        assert find_errors(path, since) == whole
    begin = max(text.rfind("; rendezvous at "), 0) if is_requeued else 0
    harmless = ("srun: error: ", "Traceback (most recent call last)")
    if any(pattern in text[begin:] for pattern in PATTERNS if pattern not in harmless):
        assert whole.errors
    assert (whole.divergence is not None) == bool(evidence._DIVERGED.search(text.replace("\r", "\n"), begin))


def test_an_error_within_a_stack_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "Exception ignored in: x\nTraceback (most recent call last)\n a\nKeyError: 1\n"
        "Traceback (most recent call last)\r\n  File y, NCCL error Å\r\nValueError: z\nsrun: error: n1: b\n"
        "srun: error: n2: Exited with exit code 75\n"
    )
    assert find_errors(tmp_path / "log").errors == [
        "ValueError: z",
        "File y, NCCL error Å",
        "srun: error: n1: b",
    ]


def nemo_lines(steps: int) -> str:
    return "".join(
        f"\rEpoch 0: :  40%|████      | {step}/500 [{step // 60:02}:{step % 60:02}<00:33, "
        f"reduced_train_loss={3 - step / 1000:.3f}, global_step={step - 1}.000, "
        f"train_step_timing in s=0.5, val_loss={3 - step // 50}.0]" + "[rank1] words\n" * (step % 7 == 0)
        for step in range(1, steps + 1)
    )


@pytest.mark.parametrize("block", [1 << 9, 1 << 12])
def test_nemos_log_read_in_blocks_gives_the_same_events(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    path = log(runs.launch(engine="nemo"))
    path.write_text("words\n" * 3000 + nemo_lines(300) + "\rEpoch 0: :  40%|██  | 301/500 [05:01<")
    whole = list(NemoReader(path, TrainingSizes(None, 32, 64)).stream())
    assert [event.step for event in whole if isinstance(event, Train)] == list(range(1, 301))
    monkeypatch.setattr(progress_lines, "_BLOCK_BYTES", block)
    reader = NemoReader(path, TrainingSizes(None, 32, 64))
    assert list(reader.stream()) == whole and list(reader.stream()) == []
    assert events.select_newest(whole, 20) == events.select_newest(
        NemoReader(path, TrainingSizes(None, 32, 64)).stream(), 20
    )


def test_a_log_without_progress_is_read_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "_BLOCK_BYTES", 1 << 10)
    path = log(runs.launch(engine="nemo"))
    path.write_text("words\n" * 3000)
    reader = NemoReader(path)
    assert list(reader.stream()) == [] and reader._offset == path.stat().st_size
    with path.open("a") as stream:
        stream.write(nemo_lines(2))
    assert [event.step for event in reader.stream() if isinstance(event, Train)] == [1, 2]


def test_missing_files_have_no_events(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert EventReader(missing).newest(10) == []
    assert [*EventReader(missing).stream(), *NemoReader(missing).stream()] == []
    assert find_errors(missing) == evidence.LogErrors()
