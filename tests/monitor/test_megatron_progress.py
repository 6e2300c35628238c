"""The lines of Megatron-LM, Megatron-Bridge and their forks.

The recorded logs are excerpts of what Megatron-LM's own scripts wrote on the sandbox's CPUs
(`tests/megatron_lm/test_trains.py`). The other lines are made by hand, after `training_log` of the releases
that each names.
"""

from __future__ import annotations

import calendar
import itertools
import json
import math
import os
import re
import time
from pathlib import Path

import pytest
from monitor_samples import COMPLETED, RUNNING, FakeScheduler, Runs, log, slipway

from launcher.monitor.progress import Progress
from slipway.common.node import progress_lines
from slipway.common.node.events import End, Event, Start, Train, Validation
from slipway.common.node.progress_lines import MegatronReader, TrainingSizes

pytestmark = pytest.mark.usefixtures("fast")

RECORDED = Path(__file__).parent / "recorded"
SIZES = TrainingSizes(None, 32, 64)
# Noon of a day, as this machine's clock shows it.
NOON = time.mktime((2026, 11, 24, 12, 0, 0, 0, 0, -1))

CONFIG = """\
trainer:
  max_steps: 400
model:
  global_batch_size: 32
  encoder_seq_length: 64
"""


def stamp(seconds: float, fraction: bool = True) -> str:
    """Return the time of so many seconds after noon, as Megatron-LM prints it."""
    now = NOON + seconds
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return clock + f"{now % 1:.6f}"[1:] if fraction else clock


LOSS = "lm loss: 2.500000E+00 | "
RATE = "learning rate: 3.000000E-04 | global batch size:    32 | "
SCALE = "loss scale: 1.0 | grad norm: 1.250 | "
ELAPSED = "elapsed time per iteration (ms): 500.0 | "
SPEED = "throughput per GPU (TFLOP/s/GPU): 412.3 | "
COUNTS = "number of skipped iterations:   0 | number of nan iterations:   0 |\n"


def line(step: int, seconds: float = 0.0, loss: str = LOSS, rest: str = SCALE + COUNTS) -> str:
    """Return the line of a step of core_v0.16, of five hundred milliseconds."""
    count = f"iteration {step:8d}/     400 | consumed samples: {32 * step:12d} | "
    return f" [{stamp(seconds)}] {count}{ELAPSED}{SPEED}{RATE}{loss}{rest}"


def moment(words: str, seconds: float) -> str:
    return f"[{words}] datetime: {stamp(seconds)} \n"


def validation(step: int, loss: str = "2.400000E+00", where: str = "") -> str:
    losses = f"lm loss value: {loss} | lm loss PPL: 1.102318E+01 | "
    text = f" validation loss at iteration {step}{where} | {losses}"
    dashes = "-" * (len(text) + 1)
    return f"{dashes}\n{text}\n{dashes}\n"


BEGIN = "before the start of training step"
LOADED = "  successfully loaded checkpoint from /run/checkpoints [ t 1/2, p 1/1 ] at iteration {}\n"


def written(path: Path, text: str, changed: float = 3600.0) -> Path:
    """Write a log that was last changed so many seconds after noon."""
    path.write_text(text)
    os.utime(path, (NOON + changed, NOON + changed))
    return path


def events_of(path: Path, text: str, changed: float = 3600.0) -> list[Event]:
    return list(MegatronReader(written(path, text, changed), SIZES).stream())


def steps_of(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, Train)]


# --- the lines of releases

COUNT = " iteration       10/     400 | consumed samples:          320 | "
HAND_MADE = {
    # Without a time; a learning rate of three digits.
    "core_v0.4": f"{COUNT}{ELAPSED}{RATE.replace('000000E', '000E')}{LOSS}{SCALE}{COUNTS}",
    # A time in whole seconds.
    "core_v0.7": f" [{stamp(60, False)}]{COUNT}{ELAPSED}{RATE}{LOSS}{SCALE}num zeros: 12.0 | {COUNTS}",
    # A mixture of experts with more losses; skipped samples.
    "core_v0.19": f" [{stamp(60)}]{COUNT}skipped samples:           64 | {ELAPSED}{SPEED}"
    f"energy per GPU (J/iter/GPU): 9.1 | {RATE}mtp_1 loss: 3.500000E+00 | {LOSS}"
    f"load_balancing_loss: 1.010000E+00 | {SCALE}{COUNTS}",
    # Megatron-Bridge 0.2 to 0.6, whose rank 0 prints a line more.
    "bridge": "Step Time : 0.50s GPU utilization: 412.3MODEL_TFLOP/s/GPU\n"
    f" [{stamp(60, False)}]{COUNT}{ELAPSED}{RATE}{LOSS}{SCALE}max attention logit: 9.000 | {COUNTS}",
    # AMD's fork: the mean of the elapsed times beside each, and no time.
    "rocm": f"{COUNT}elapsed time per iteration (ms): 500.0/510.5 | "
    f"hip mem usage/free/total/usage_ratio: 10.00GB/182.00GB/192.00GB/5.21% | {RATE}{LOSS}{SCALE}{COUNTS}",
    # Megatron-DeepSpeed, with more fields.
    "deepspeed": f"{COUNT}consumed tokens:        20480 | {ELAPSED}{RATE}{LOSS}{SCALE}actual seqlen:    64 | "
    f"{COUNTS[:-1]} samples per second: 64.000 | TFLOPs: 412.30 |\n",
}


@pytest.mark.parametrize("text", HAND_MADE.values(), ids=HAND_MADE)
def test_lines_of_other_releases_are_read(tmp_path: Path, text: str) -> None:
    start, train = events_of(tmp_path / "log", text, changed=60.0)
    assert isinstance(start, Start) and (start.step, start.max_steps) == (0, 400)
    assert train == (NOON + 60, 10, 2.5, 3e-4, 1.25, 4096.0, 2048)


def test_a_recorded_training_of_a_t5() -> None:
    """It trained four steps, with validations after the second and the fourth, and was done."""
    events = list(MegatronReader(RECORDED / "megatron_lm_0.16.1_t5.log", SIZES).stream())
    start, *_ = events
    assert isinstance(start, Start) and (start.step, start.max_steps) == (0, 4)
    losses = [event.loss for event in events if isinstance(event, Train)]
    assert losses == [6.500365, 6.366916, 6.093922, 6.06685]
    held_out = [(event.step, event.loss) for event in events if isinstance(event, Validation)]
    assert held_out == [(2, 6.10721), (4, 5.99555), (4, 6.003364)]
    (end,) = (event for event in events if isinstance(event, End))
    assert (end.step, end.reason) == (4, "max_steps")
    seconds = [event.time - start.time for event in events if isinstance(event, Train)]
    assert seconds == pytest.approx([4.838, 8.698, 40.179, 45.783], abs=0.001)
    assert MegatronReader(RECORDED / "megatron_lm_0.16.1_t5.log", SIZES).read_end() == events


def test_recorded_links_of_a_chain() -> None:
    """Two jobs of core_v0.12.3, one log after the other: a signal ended the first one after step 5."""
    events = list(MegatronReader(RECORDED / "megatron_lm_0.12.3_gpt.log", SIZES).stream())
    assert [event.step for event in events if isinstance(event, Start)] == [0, 5]
    assert steps_of(events) == list(range(1, 13))
    (end,) = (event for event in events if isinstance(event, End))
    assert (end.step, end.reason) == (5, "SIGTERM")
    times = [event.time for event in events]
    assert times == sorted(times)
    # The times of steps 6 to 12 are 3 whole seconds apart; the steps took 2.2.
    progress = Progress(events)
    assert progress.steps_per_second == pytest.approx(6 / 2.2, rel=0.3)
    assert progress.tokens_per_second == pytest.approx(2048 / 0.3717)


# --- times


def test_times_in_whole_seconds_are_completed_by_those_of_the_steps(tmp_path: Path) -> None:
    text = re.sub(r"\.[05]00000\]", "]", "".join(line(step, step / 2) for step in range(1, 11)))
    times = [event.time - NOON for event in events_of(tmp_path / "log", text) if isinstance(event, Train)]
    assert times == pytest.approx([step / 2 for step in range(1, 11)], abs=1.0)
    assert [after - before for before, after in itertools.pairwise(times[1:])] == [0.5] * 8


def test_times_without_any_are_counted_back_from_the_last_change(tmp_path: Path) -> None:
    text = "".join(HAND_MADE["core_v0.4"].replace(" 10/", f" {step}/") for step in (10, 20, 30))
    events = events_of(tmp_path / "log", text, changed=100.0)
    assert [event.time - NOON for event in events] == [85.0, 90.0, 95.0, 100.0]
    reader = MegatronReader(written(tmp_path / "log", text, 100.0), SIZES)
    list(reader.stream())
    with (tmp_path / "log").open("a") as stream:
        stream.write(HAND_MADE["core_v0.4"].replace(" 10/", " 40/"))
    os.utime(tmp_path / "log", (NOON + 107, NOON + 107))
    assert [(event.step, event.time - NOON) for event in reader.stream()] == [(40, 107.0)]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Denver", "UTC"])
@pytest.mark.parametrize("is_container_in_utc", [True, False])
def test_a_container_may_have_another_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str, is_container_in_utc: bool
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    parts = (2026, 7, 24, 12, 0, 0, 0, 0, -1)
    noon = calendar.timegm(parts) if is_container_in_utc else time.mktime(parts)
    path = tmp_path / "log"
    path.write_text(line(7).replace(stamp(0.0), "2026-07-24 12:00:00.000000"))
    os.utime(path, (noon + 5, noon + 5))
    try:
        progress_lines._minute.cache_clear()
        assert [event.time for event in MegatronReader(path).stream()][-1] == noon
    finally:
        monkeypatch.undo()
        time.tzset()
        progress_lines._minute.cache_clear()


@pytest.mark.parametrize("date", ["9999-99-99 99:99:99", "0000-00-00 00:00:00"])
def test_a_date_that_no_calendar_has_is_no_error(tmp_path: Path, date: str) -> None:
    text = line(1).replace(stamp(0.0), date)
    assert steps_of(events_of(tmp_path / "log", text)) == [1]


# --- starts and ends


def test_a_requeued_job_continues_in_the_same_log(tmp_path: Path) -> None:
    text = moment(BEGIN, 0) + "".join(line(step, step) for step in range(1, 8))
    text += LOADED.format(5) + moment(BEGIN, 100) + "".join(line(step, 95 + step) for step in range(6, 9))
    text += "  successfully saved checkpoint from iteration       9 to /run/checkpoints [ t 1/2, p 1/1 ]\n"
    text += moment("exiting program after receiving SIGTERM.", 110)
    events = events_of(tmp_path / "log", text)
    starts = [(event.time - NOON, event.step) for event in events if isinstance(event, Start)]
    assert starts == [(0.0, 0), (100.0, 5)]
    assert events[-1] == End(NOON + 110, 9, "SIGTERM")
    progress = Progress(events)
    assert (progress.step, progress.steps_per_second) == (9, 1.0)
    assert Progress(MegatronReader(tmp_path / "log", SIZES).read_end()).step == 9


@pytest.mark.parametrize(
    ("words", "step", "reason"),
    [
        ("after training is done", 400, "max_steps"),
        ("exiting program after 12.5 minutes", 390, "max_time"),
        ("exiting program at iteration 390", 390, "stop_after"),
    ],
)
def test_why_a_training_ended(tmp_path: Path, words: str, step: int, reason: str) -> None:
    """One that logs every tenth step may end after another one."""
    events = events_of(tmp_path / "log", moment(BEGIN, 0) + line(390, 195) + moment(words, 200))
    assert events[-1] == End(NOON + 200, step, reason)
    assert Progress(events).step == step


def test_nothing_is_left_to_do(tmp_path: Path) -> None:
    text = LOADED.format(400) + moment(BEGIN, 1) + moment("after training is done", 2) + validation(400)
    start, end, held_out = events_of(tmp_path / "log", text)
    assert isinstance(start, Start) and start.step == 400
    assert end == End(NOON + 2, 400, "already_complete")
    assert isinstance(held_out, Validation)


def test_finetuning_begins_at_step_0(tmp_path: Path) -> None:
    loading = " loading distributed checkpoint from /base/checkpoints at iteration 9000\n"
    start, _ = events_of(tmp_path / "log", loading + LOADED.format(0) + moment(BEGIN, 0) + line(1))
    assert isinstance(start, Start) and start.step == 0


# --- losses

SKIPPED = COUNTS.replace("0", "1", 1)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        (line(1, loss="", rest=SCALE.replace("1.250", "nan") + COUNTS), math.nan),
        (line(1, loss="", rest=SCALE + COUNTS.replace("0", "1")), math.nan),
        (line(1, loss="", rest=SCALE + SKIPPED), None),
        (line(1, loss="lm loss: 0.000000E+00 | ", rest=SCALE + SKIPPED), None),
        (line(1, loss="lm loss: nan | "), math.nan),
        (line(1, loss="lm loss: inf | "), math.inf),
        (line(1, loss="sop loss: 7.000000E-01 | lm loss: 2.500000E+00 | "), 2.5),
        (line(1, loss="loss: 7.000000E-01 | "), 0.7),
        (line(1, loss="load_balancing_loss: 1.0 | ", rest=SCALE.replace("1.250", "nan") + COUNTS), math.nan),
        (line(1, loss=""), None),
    ],
)
def test_the_loss_of_a_step(tmp_path: Path, text: str, loss: float | None) -> None:
    _, train = events_of(tmp_path / "log", text)
    assert isinstance(train, Train) and str(train.loss) == str(loss)


def test_held_out_losses_are_those_of_the_validation_set(tmp_path: Path) -> None:
    text = line(200, 100) + validation(200) + line(400, 200) + validation(400, "nan", " on validation set")
    text += validation(400, "2.300000E+00", " on test set")
    held_out = [event for event in events_of(tmp_path / "log", text) if isinstance(event, Validation)]
    assert [(event.step, str(event.loss)) for event in held_out] == [(200, "2.4"), (400, "nan")]


# --- reading


def test_torn_lines_give_no_wrong_values(tmp_path: Path) -> None:
    """Other ranks write into the same log, at any place of a line."""
    whole = line(306, 3, loss="lm loss: 7.330000E+00 | ") + validation(306, "7.400000E+00")
    for message in ("[W1124 ProcessGroupNCCL.cpp:1250] Warning\n", "INFO:megatron.core.timers: 5.0"):
        for cut in range(len(whole)):
            events = events_of(tmp_path / "log", line(305, 2) + whole[:cut] + message + whole[cut:])
            for event in events[1:]:
                assert event.step in (305, 306) and NOON + 1 <= event.time <= NOON + 3, whole[:cut]
                loss = 2.5 if event.step == 305 else 7.4 if isinstance(event, Validation) else 7.33
                values = (loss, 3e-4, 1.25, 4096.0, 2048)
                is_right = [read in (None, value) for read, value in zip(event[2:], values, strict=False)]
                assert all(is_right), whole[:cut]


def long_log(steps: int) -> str:
    lines = [line(step, step / 2) + validation(step) * (step % 100 == 0) for step in range(1, steps + 1)]
    return "--seq-length ........ 64\n" * 500 + moment(BEGIN, 0) + "".join(lines)


@pytest.mark.parametrize("block", [1 << 9, 1 << 12])
def test_a_log_read_in_blocks_gives_the_same_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    path = written(tmp_path / "log", long_log(300) + line(301, 151)[:-9])
    whole = list(MegatronReader(path, SIZES).stream())
    assert steps_of(whole) == list(range(1, 301))
    monkeypatch.setattr(progress_lines, "_BLOCK_BYTES", block)
    reader = MegatronReader(path, SIZES)
    assert list(reader.stream()) == whole and list(reader.stream()) == []


def test_the_end_of_a_long_log_gives_the_same_progress(tmp_path: Path) -> None:
    """This holds, too, if a failed job's ranks wrote long tracebacks after the last step."""
    path = written(tmp_path / "log", long_log(350) + "[rank3]: Traceback (most recent call last):\n" * 10_000)
    events, progress = MegatronReader(path, SIZES).read_end(), Progress(MegatronReader(path, SIZES).stream())
    quick = Progress(events)
    assert len(events) < 100
    for name in ("step", "max_steps", "loss", "validation_loss", "tokens_per_second", "eta"):
        assert getattr(quick, name) == getattr(progress, name), name
    written(path, "iteration 3/4 of another program\nno progress yet\n")
    assert MegatronReader(path).read_end() == [] == list(MegatronReader(path).stream())
    missing = MegatronReader(tmp_path / "none")
    assert missing.read_end() == [] == list(missing.stream())


@pytest.mark.timeout(60)
def test_endless_lines_take_no_endless_time(tmp_path: Path) -> None:
    for words in (
        " iteration 1/1 | a",
        "loaded checkpoint from ",
        "[exiting program ",
        "validation loss at ",
    ):
        path = written(tmp_path / "log", words * ((1 << 20) // len(words)) + "\n" + line(1))
        assert steps_of(list(MegatronReader(path).stream())) == [1], words


def test_a_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = MegatronReader(path, SIZES)
    assert list(reader.stream()) == []
    with path.open("a") as stream:
        stream.write(line(1, 1) + line(2, 2)[:-20])
        stream.flush()
        assert steps_of(list(reader.stream())) == [1]
        stream.write(line(2, 2)[-20:] + line(3, 3))
    assert steps_of(list(reader.stream())) == [2, 3]


def test_the_verbs_see_the_steps(
    runs: Runs, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = runs.launch(engine="megatron_lm")
    (directory / "gpt3_tiny_hydra.yaml").write_text(CONFIG)
    written(log(directory), long_log(350))
    scheduler.set("11", RUNNING)
    assert slipway(runs, "status", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)
    assert (item["step"], item["max_steps"], item["loss"], item["val_loss"]) == (350, 400, 2.5, 2.4)
    assert (item["tokens_per_second"], item["eta_seconds"]) == (4096.0, pytest.approx(25.0))
    assert slipway(runs, "history", "--json", "gpt3_tiny") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["first_step"], row["step"]) == (0, 350)
    scheduler.set("11", RUNNING, COMPLETED)
    assert slipway(runs, "follow", "gpt3_tiny") == 0
    output = capsys.readouterr().out
    assert "the trainer started" in output and "step 350/400  loss 2.5000  lr 3.0" in output
