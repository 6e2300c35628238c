"""NeMo's progress lines. The recorded log is an excerpt of what NeMo 2.4.1 wrote on the sandbox's CPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from monitor_samples import COMPLETED, RUNNING, FakeScheduler, Runs, log, slipway

from launcher.monitor.progress import Progress
from launcher.monitor.readers import training_sizes
from slipway.common.node.events import Start, Train, Validation
from slipway.common.node.progress_lines import NemoReader, TrainingSizes

pytestmark = pytest.mark.usefixtures("fast")

RECORDED = Path(__file__).parent / "recorded" / "nemo_progress.log"

CONFIG = """\
trainer:
  max_steps: 400
model:
  micro_batch_size: 1
  global_batch_size: 2
  rampup_batch_size: {rampup}
  encoder_seq_length: 64
  data:
    seq_length: 64
"""


def line(step: int, clock: str = "00:10", loss: str = "9.030", validation: str = "") -> str:
    """Return a line as NeMo writes it; `step` counts from 1."""
    return (
        f"\rEpoch 0: :  40%|████▍     | {step}/5000 [{clock}<00:33, reduced_train_loss={loss}, "
        f"global_step={step - 1:#.4g}, consumed_samples=4.000, train_step_timing in s=0.0500{validation}]"
    )


def test_a_recorded_log_is_read() -> None:
    events = list(NemoReader(RECORDED, TrainingSizes(400, 2, 64)).stream())
    starts = [event for event in events if isinstance(event, Start)]
    assert [(start.step, start.max_steps) for start in starts] == [(0, 400)]
    steps = [event.step for event in events if isinstance(event, Train)]
    assert steps == [*range(1, 7), *range(198, 208), *range(398, 401)]
    # The first validation was before step 198, the others after step 200 and 400.
    assert [event.loss for event in events if isinstance(event, Validation)] == [7.62, 7.4, 7.13, 7.07]
    progress = Progress(events)
    assert (progress.step, progress.max_steps, progress.loss, progress.validation_loss) == (
        400,
        400,
        7.79,
        7.07,
    )
    assert progress.train and progress.train.tokens_per_second == pytest.approx(128 / 0.0423)


def test_status_of_a_nemo_training(
    runs: Runs, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = runs.launch(engine="nemo")
    (directory / "gpt3_tiny_hydra.yaml").write_text(CONFIG.format(rampup="null"))
    content = "".join(line(step, f"{step // 60:02}:{step % 60:02}") for step in range(1, 1501))
    log(directory).write_text("Run gpt3_tiny\n" + content)
    scheduler.set("11", RUNNING)
    assert slipway(runs, "status", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)
    assert (item["step"], item["max_steps"], item["loss"]) == (1500, 5000, 9.03)
    assert item["tokens_per_second"] == pytest.approx(128 / 0.05)
    assert item["eta_seconds"] == 3500.0  # one step a second
    scheduler.set("11", RUNNING, COMPLETED)
    assert slipway(runs, "follow", "gpt3_tiny") == 0
    assert "step 1500/5000  loss 9.0300" in capsys.readouterr().out


def test_the_end_of_a_long_log_gives_the_same_progress(tmp_path: Path) -> None:
    """This holds, too, if a failed job's ranks wrote long tracebacks after the last step."""
    path = tmp_path / "log"
    content = "".join(line(step, f"{step // 60:02}:{step % 60:02}") for step in range(1, 3000))
    path.write_text(content + "\n" + "n3: Traceback (most recent call last):\n" * 10_000)
    progress = Progress(NemoReader(path).read_end())
    assert (progress.step, progress.max_steps, progress.loss, progress.steps_per_second) == (
        2999,
        5000,
        9.03,
        1.0,
    )
    assert len(NemoReader(path).read_end()) < 200
    assert NemoReader(tmp_path / "none").read_end() == [] == list(NemoReader(tmp_path / "none").stream())
    path.write_text("no progress yet\n")
    assert NemoReader(path).read_end() == []


def test_torn_lines_give_no_wrong_values(tmp_path: Path) -> None:
    """Other ranks write into the same log, at any place of a line."""
    path = tmp_path / "log"
    message = "[NeMo W 2026-11-21 21:48:20 random:220] CPU RNG state changed within GPU RNG context\n"
    whole = line(306, loss="7.330")
    for cut in range(1, len(whole)):
        path.write_text(line(305, loss="7.000") + whole[:cut] + message + whole[cut:])
        for event in NemoReader(path).stream():
            assert event.step in (304, 305, 306), whole[:cut]
            assert not isinstance(event, Train) or event.loss in (None, 7.0, 7.33), whole[:cut]


def test_a_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = NemoReader(path)
    assert list(reader.stream()) == []
    whole = line(1, "00:01") + line(2, "00:02") + line(2, "00:02", loss="8.000")
    with path.open("a") as stream:
        stream.write(whole[:-20])
        stream.flush()
        assert [event.step for event in reader.stream() if isinstance(event, Train)] == [1, 2]
        stream.write(whole[-20:])
    assert [(event.step, event.loss) for event in reader.stream() if isinstance(event, Train)] == [(2, 8.0)]
    with path.open("a") as stream:  # requeued: from its checkpoint, with a clock of its own
        stream.write(line(2, "00:00") + line(3, "00:04"))
    os.utime(path, (5000.0, 5000.0))
    start, *trains = list(reader.stream())
    assert isinstance(start, Start) and start.step == 1
    assert [(event.time, event.step) for event in trains] == [(4996.0, 2), (5000.0, 3)]


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(line(7, loss="nan", validation=", val_loss=nan"))
    assert str(Progress(NemoReader(path).stream()).loss) == "nan"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (CONFIG.format(rampup="null"), (400, 2, 64)),
        (CONFIG.format(rampup="[8, 8, 1000]"), (400, None, 64)),  # the batch grows
        (CONFIG.format(rampup="null").replace("encoder_seq_length", "seq_length_dec"), (400, 2, None)),
        (CONFIG.format(rampup="null").replace("batch_size: 2", "batch_size: 2x"), (400, None, 64)),
        ("", (None, None, None)),
    ],
)
def test_sizes_of_a_training(tmp_path: Path, text: str, sizes: tuple[int | None, ...]) -> None:
    path = tmp_path / "x_hydra.yaml"
    path.write_text(text)
    assert training_sizes(path) == sizes
    assert training_sizes(tmp_path / "none") == (None, None, None)
