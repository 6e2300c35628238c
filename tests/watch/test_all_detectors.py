"""Each detector: quiet, firing with its beginning, quiet again by its rule, and blind with why."""

from __future__ import annotations

import math
import random

import pytest

from slipway.common.node.events import End, Event, Start, Train, Validation
from slipway.watch.detectors import (
    BLIND,
    DETECTORS,
    FIRING,
    QUIET,
    Reading,
    find_slope,
    read_all,
    say_duration,
)
from slipway.watch.pace import Schedule
from slipway.watch.parameters import Deadline, Disk, Parameters
from slipway.watch.series import SortedWindow
from slipway.watch.windows import ChainState, DiskSpace, Facts, JobState, Window

GIB = 1 << 30


def steps(
    first: int,
    last: int,
    *,
    loss: float | None = 3.0,
    norm: float | None = 1.0,
    speed: float | None = 1000.0,
    start: float | None = None,
    every: float = 1.0,
) -> list[Train]:
    """Return steps with some noise, `every` seconds apart; the first at `start`, else at its number."""
    source = random.Random(first)
    begin = float(first) if start is None else start
    events = []
    for step in range(first, last + 1):
        wobble = source.gauss(1, 0.01)
        values = [
            None if loss is None else loss * wobble,
            1e-3,
            None if norm is None else norm * source.gauss(1, 0.1),
            None if speed is None else speed * wobble,
            None,
        ]
        events.append(Train(begin + (step - first) * every, step, *values))  # type: ignore[arg-type]
    return events


def watch(
    *events: Event | Facts | list[Train],
    parameters: Parameters | None = None,
    schedule: Schedule | None = None,
) -> dict[str, Reading]:
    """Return the readings after the events and facts; the detectors are also read after each facts."""
    parameters = parameters or Parameters()
    window = Window(parameters, schedule or Schedule(save_every=100, validate_every=50))
    for item in events:
        if isinstance(item, Facts):
            window.take_facts(item)
            read_all(window, parameters)
        elif isinstance(item, Start | Train | Validation | End):
            window.take(item)
        else:
            for event in item:
                window.take(event)
    return {reading.detector: reading for reading in read_all(window, parameters)}


START = Start(0.0, 0, 2000, data=1)


def test_nothing_is_quiet_before_it_can_see() -> None:
    readings = watch()
    assert [name for name, reading in readings.items() if reading.state != BLIND] == ["deadline"]
    assert all(reading.why for reading in readings.values())
    assert list(readings) == [detector.name for detector in DETECTORS] == list(Parameters._fields)


def test_a_detector_that_is_off_is_not_read() -> None:
    parameters = Parameters(disk=Disk(reaction="off"))
    assert "disk" not in watch(parameters=parameters)


def test_healthy_training_is_quiet() -> None:
    facts = Facts(
        401.0, 400, DiskSpace(500 * GIB, 1000 * GIB), ChainState(1, 1, None, 1e6), JobState("RUNNING", False)
    )
    readings = watch(START, steps(1, 400), facts)
    assert {name: reading.why for name, reading in readings.items() if reading.state != QUIET} == {}


@pytest.mark.parametrize(
    ("name", "raised"), [("loss_spike", {"loss": 4.0}), ("grad_norm_spike", {"norm": 3.0})]
)
def test_spike_begins_with_its_first_step_and_ends_when_it_is_calm(
    name: str, raised: dict[str, float]
) -> None:
    readings = watch(START, steps(1, 300), steps(301, 306, **raised))
    assert [each.detector for each in readings.values() if each.state == FIRING] == [name]
    assert (readings[name].step, readings[name].since) == (301, 301.0)
    assert len(readings[name].values) == 40
    assert watch(START, steps(1, 300), steps(301, 306, **raised), steps(307, 325))[name].state == FIRING
    assert watch(START, steps(1, 300), steps(301, 306, **raised), steps(307, 330))[name].state == QUIET


def test_two_hard_batches_are_no_spike() -> None:
    readings = watch(START, steps(1, 300), steps(301, 302, loss=9.0, norm=30.0), steps(303, 310))
    assert {readings[name].state for name in ("loss_spike", "grad_norm_spike")} == {QUIET}


def test_spike_ends_on_a_level_that_has_become_usual_and_when_the_training_goes_back() -> None:
    events = (START, steps(1, 300), steps(301, 1200, loss=4.0))
    assert watch(*events)["loss_spike"].state == FIRING
    assert watch(*events, steps(1201, 1400, loss=4.0))["loss_spike"].state == QUIET
    readings = watch(*events, Start(1300.0, 200, 2000, data=1), steps(201, 220, start=1301.0))
    assert readings["loss_spike"].state == QUIET


def test_loss_of_an_engine_without_gradient_norms() -> None:
    readings = watch(START, steps(1, 300, norm=None), steps(301, 310, loss=5.0, norm=None))
    assert readings["loss_spike"].state == FIRING
    assert (readings["grad_norm_spike"].state, readings["grad_norm_spike"].why) == (
        BLIND,
        "no step has had a norm of the gradient yet",
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_that_is_not_finite(loss: float) -> None:
    readings = watch(START, steps(1, 30), steps(31, 33, loss=loss))
    assert (readings["non_finite"].state, readings["non_finite"].step) == (FIRING, 31)
    assert str(loss) in readings["non_finite"].why
    assert watch(START, steps(1, 30), steps(31, 33, loss=loss), steps(34, 60))["non_finite"].state == QUIET


def test_loss_scale_may_skip_some_steps() -> None:
    """Before the first finite norm fp16's loss scale is searched."""
    assert watch(START, steps(1, 30, norm=math.inf))["non_finite"].state == QUIET
    assert watch(START, steps(1, 30), steps(31, 39, norm=math.inf))["non_finite"].state == QUIET
    reading = watch(START, steps(1, 30), steps(31, 40, norm=math.inf))["non_finite"]
    assert (reading.state, reading.step) == (FIRING, 31)


# Two pauses of 180 seconds are usual.
PAUSES = (steps(121, 140, start=300.0), steps(141, 160, start=499.0))
LATE = [
    # (events, seconds after the last, firing)
    ((START,), 1799, False),
    ((START,), 1801, True),
    ((START, steps(1, 2)), 1799, False),  # the second step may compile too
    ((START, steps(1, 120)), 59, False),
    ((START, steps(1, 120)), 61, True),
    ((START, steps(1, 120, every=20)), 199, False),
    ((START, steps(1, 120, every=20)), 201, True),
    ((START, steps(1, 150)), 599, False),  # a validation is due
    ((START, steps(1, 150)), 601, True),
    ((START, steps(1, 120), *PAUSES), 350, False),
    ((START, steps(1, 120), *PAUSES), 370, True),
    ((START, steps(1, 120), steps(121, 140, start=900.0)), 61, True),  # one pause is no habit
    ((START, steps(1, 120), End(121.0, 120, "max_steps")), 9999, False),
    ((steps(100, 160),), 61, True),  # only the newest events were read
]


@pytest.mark.parametrize(("events", "silence", "is_late"), LATE)
def test_next_step_is_overdue(events: tuple[Event | list[Train], ...], silence: float, is_late: bool) -> None:
    *_, last = [item for each in events for item in (each if isinstance(each, list) else [each])]
    reading = watch(*events, Facts(last.time + silence))["no_step"]
    assert reading.state == (FIRING if is_late else QUIET), reading
    if is_late:
        assert reading.since == last.time


def test_a_job_has_its_own_time_until_its_first_step() -> None:
    """The last step of the job before was hours ago; this one has just begun."""
    before = (START, steps(1, 120))
    job = JobState("RUNNING", False, began=9000.0)
    assert watch(*before, Facts(9100.0, job=job))["no_step"].state == QUIET
    late = watch(*before, Facts(9000.0 + 1801, job=job))["no_step"]
    assert (late.state, late.since) == (FIRING, 9000.0)


def test_three_slow_steps_are_no_pace() -> None:
    facts = Facts(300.0, chain=ChainState(1, 1, ends_at=9000.0))
    parameters = Parameters(deadline=Deadline(at=9000.0))
    readings = watch(START, steps(1, 3, every=100.0), facts, parameters=parameters)
    assert (readings["chain"].state, readings["deadline"].state) == (BLIND, BLIND)


def test_a_clock_that_is_set_back_makes_no_step_late() -> None:
    behind = steps(121, 160, start=121.0 - 3600)
    facts = (Facts(120.5), behind, Facts(behind[-1].time + 1))
    assert watch(START, steps(1, 120), *facts)["no_step"].state == QUIET


@pytest.mark.parametrize("is_stopped", [False, True])
def test_steps_of_the_link_before_say_nothing_of_one_that_loads(is_stopped: bool) -> None:
    """The next link waited in the queue for an hour: its own beginning counts."""
    ends: list[Event | Facts] = [End(301.0, 300, "stop")] if is_stopped else []
    loads = JobState("RUNNING", False, began=3900.0)
    assert watch(START, steps(1, 300), *ends, Facts(4000.0, job=loads))["no_step"].state == QUIET
    reading = watch(START, steps(1, 300), *ends, Facts(5701.0, job=loads))["no_step"]
    assert (reading.state, reading.since) == (FIRING, 3900.0)
    assert reading.why.startswith("no first step for 30 m")


def test_sentence_about_a_stale_training() -> None:
    reading = watch(START, steps(1, 120, every=28.0), Facts(1 + 119 * 28.0 + 300))["no_step"]
    assert reading.why == "no new step for 5 m 0 s (usual: 28 s)"


@pytest.mark.parametrize("speed", [1000.0, None])
def test_throughput_that_falls_for_good(speed: float | None) -> None:
    """Without tokens per second the time between two steps counts."""
    slow = speed and 0.5 * speed
    normal = steps(1, 400, speed=speed)
    fallen = steps(401, 460, speed=slow, start=402.0, every=2.0)
    back = steps(461, 520, speed=speed, start=522.0)
    reading = watch(START, normal, fallen)["throughput"]
    assert (reading.state, reading.since) == (FIRING, 402.0)
    assert watch(START, normal, fallen[:20], back[:200])["throughput"].state == QUIET
    assert watch(START, normal, fallen, back)["throughput"].state == QUIET


def test_checkpoints_that_do_not_follow() -> None:
    assert watch(START, steps(1, 300), Facts(301.0, 100))["checkpoint"].state == QUIET
    reading = watch(START, steps(1, 301), Facts(302.0, 100))["checkpoint"]
    assert (reading.state, reading.since, reading.why) == (
        FIRING,
        302.0,
        "the newest checkpoint is 201 steps behind, one is due every 100",
    )
    seen = [Facts(302.0, step) for step in (50, 100, 150)]
    assert watch(START, steps(1, 301), seen[0], schedule=Schedule())["checkpoint"].state == BLIND
    assert watch(START, steps(1, 301), *seen, schedule=Schedule())["checkpoint"].state == FIRING
    assert watch(START, steps(1, 220), *seen, schedule=Schedule())["checkpoint"].state == QUIET


CHAINS = [
    (ChainState(1, 3, True, 500.0), QUIET, "link 1 of 3 goes on"),
    (ChainState(1, 3, False, 500.0), FIRING, "link 1 of 3 has no successor in the queue"),
    (ChainState(1, 3, None, 500.0), BLIND, "nobody can say"),
    (
        ChainState(3, 3, None, 500.0),
        FIRING,
        "link 3 of 3 is the last, and the training needs 25 m 0 s more than it has",
    ),
    (ChainState(3, 3, None, 2500.0), QUIET, "ends in this job"),
    (ChainState(3, 3, None, None), BLIND, "not known"),
]


@pytest.mark.parametrize(("chain", "state", "why"), CHAINS)
def test_chain_without_a_successor_or_used_up(chain: ChainState, state: str, why: str) -> None:
    facts = [Facts(time, chain=chain) for time in (101.0, 300.0)]
    reading = watch(START, steps(1, 300), *facts)["chain"]
    assert (reading.state, why in reading.why) == (state, True), reading
    interrupted = watch(START, steps(1, 300), End(301.0, 300, "max_time"), *facts)["chain"]
    assert interrupted.state == state
    assert watch(START, steps(1, 300), *facts, End(301.0, 2000, "max_steps"))["chain"].state == QUIET


def test_job_that_vanished() -> None:
    lost = [Facts(time, job=JobState(None, False)) for time in (100.0, 290.0)]
    assert watch(*lost[:1])["job"].state == QUIET
    assert (watch(*lost)["job"].state, watch(*lost)["job"].since) == (FIRING, 100.0)
    assert watch(*lost, Facts(300.0, job=JobState("RUNNING", False)))["job"].state == QUIET
    assert watch(*lost, Facts(300.0, job=JobState(None, True)))["job"].state == QUIET
    killed = [Facts(time, job=JobState("NODE_FAIL", False)) for time in (100.0, 290.0)]
    assert watch(*killed)["job"].why == "Slurm says NODE_FAIL, and its supervisor left no mark of the end"


def test_disk_that_fills() -> None:
    def fill(rate: float, free: float = 500.0) -> list[Facts]:
        """Return facts of two hours; each second sample a checkpoint of 20 GiB is there that goes again."""
        return [
            Facts(300.0 * i, disk=DiskSpace(int((free - rate * i / 12 - 20 * (i % 2)) * GIB), 1000 * GIB))
            for i in range(24)
        ]

    assert watch(*fill(0))["disk"].state == QUIET
    assert watch(*fill(10))["disk"].state == QUIET
    reading = watch(*fill(50))["disk"]
    assert (reading.state, reading.why.endswith("by the present rate")) == (FIRING, True)
    assert reading.since is not None and reading.since < 6900
    full = watch(Facts(0.0, disk=DiskSpace(10 * GIB, 1000 * GIB)))["disk"]
    assert (full.state, full.why) == (FIRING, "10 GiB free, 1.0% of the file system")


def test_end_after_the_deadline() -> None:
    def at(deadline: float, last: int = 300) -> Reading:
        facts = Facts(float(last))
        return watch(START, steps(1, last), facts, parameters=Parameters(deadline=Deadline(at=deadline)))[
            "deadline"
        ]

    assert at(2001.0).state == QUIET
    reading = at(1000.0)
    assert (reading.state, reading.why) == (FIRING, "the training ends 16 m 40 s after the deadline")
    assert at(1000.0, last=2).state == BLIND


def test_sorted_window_has_the_median_and_the_deviation_of_its_values() -> None:
    source = random.Random(1)
    for size in (1, 2, 3, 8, 65):
        window = SortedWindow(size)
        values: list[float] = []
        for _ in range(3 * size):
            values = [*values, source.choice((source.gauss(0, 1), float(source.randrange(3))))][-size:]
            window.add(values[-1])
            median = sorted(values)[len(values) // 2]
            assert window.median == median
            assert math.isclose(
                window.deviation,
                sorted(abs(value - median) for value in values)[len(values) // 2],
                abs_tol=1e-12,
            )


def test_slope_ignores_outliers() -> None:
    assert find_slope([(float(x), 100.0 - 2 * x + (50 if x == 3 else 0)) for x in range(10)]) == -2


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(28, "28 s"), (100, "1 m 40 s"), (3660, "1 h 1 m"), (90000, "1 d 1 h"), (0.25, "0.25 s")],
)
def test_words_for_a_time(seconds: float, words: str) -> None:
    assert say_duration(seconds) == words


def test_any_sequence_of_values_has_readings() -> None:
    """Torn, hostile or senseless events and facts raise nothing, and the memory stays bounded."""
    source = random.Random(3)
    odd = [0.0, -1.0, 1e308, 1e-308, math.inf, -math.inf, math.nan, None, 3.0, 3.1]
    parameters = Parameters(deadline=Deadline(at=5.0))
    for _ in range(100):
        window = Window(parameters, Schedule(source.choice((None, 0, 7)), source.choice((None, 0, 5))))
        for number in range(150):
            time, step = source.choice((number, 0.0, 1e11)), source.choice((number, number, 0, 1 << 62))
            loss, norm, speed = (source.choice(odd) for _ in range(3))
            events: list[Event] = [Train(time, step, loss, None, norm, speed, None)] * 20
            events += [Start(time, step, source.choice((None, 0, step))), Validation(time, step, math.nan)]
            events += [End(time, step, "?")]
            window.take(source.choice(events))
            if number % 5 == 0:
                free, total = source.choice((0, 1, 1 << 60)), source.choice((0, 1 << 60))
                state = JobState(source.choice((None, "RUNNING", "?")), source.random() < 0.5)
                chain = ChainState(source.randrange(3), 2, source.choice((None, True, False)), time)
                window.take_facts(Facts(time, step, DiskSpace(free, total), chain, state))
                assert len(read_all(window, parameters)) == len(DETECTORS)
