"""TensorBoard's files, written by TensorBoard's own writer, as the source of a run's steps."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from monitor_samples import RUNNING, FakeScheduler, Runs, slipway
from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from launcher.monitor.progress import Progress
from slipway.common.node import tensorboard
from slipway.common.node.events import Start, Train, Validation
from slipway.common.node.progress_lines import READERS, TrainingSizes
from slipway.common.node.tensorboard import TAGS, TensorboardReader

pytestmark = pytest.mark.usefixtures("fast")

SIZES = TrainingSizes(400, 2, 64)


class Writer:
    """A writer of scalars in the order of Lightning's loggers, or of Megatron-LM's."""

    def __init__(self, directory: Path, begin: float = 1000.0) -> None:
        self._writer, self._begin = EventFileWriter(str(directory)), begin

    def put(self, step: int, **scalars: float) -> None:
        for tag, value in scalars.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            self._writer.add_event(Record(wall_time=self._begin + step, step=step, summary=summary))

    def nemo(self, first: int, last: int) -> None:
        """Write steps, counted from 0."""
        for step in range(first, last + 1):
            timing = {"train_step_timing in s": 0.5}
            self.put(step, reduced_train_loss=2.5, lr=3e-4, grad_norm=1.25, global_step=step, **timing)
            if (step + 1) % 50 == 0:
                self.put(step, val_loss=2.25)
        self._writer.flush()


def test_steps_of_nemo_are_counted_from_1(tmp_path: Path) -> None:
    Writer(tmp_path).nemo(0, 99)
    start, train, *events = TensorboardReader(tmp_path, TAGS["nemo"], SIZES).stream()
    assert isinstance(start, Start) and (start.time, start.step, start.max_steps) == (1000.0, 0, 400)
    assert isinstance(train, Train) and train[:3] == (1000.0, 1, 2.5)
    assert train[3:] == pytest.approx((3e-4, 1.25, 256.0, 128))
    assert [event.step for event in events if isinstance(event, Train)] == list(range(2, 101))
    held_out = [event[1:] for event in events if isinstance(event, Validation)]
    assert held_out == [(50, 2.25), (100, 2.25)]


def test_each_engine_that_writes_lines_writes_scalars() -> None:
    assert TAGS.keys() == READERS.keys()


def test_iterations_of_megatron_lm(tmp_path: Path) -> None:
    writer, tags = Writer(tmp_path), TAGS["megatron_lm"]
    for step in (5, 6):
        scalars = {"learning-rate": 3e-4, "batch-size": 32.0, "lm loss": math.nan, "grad-norm": math.nan}
        writer.put(step, **scalars)
        writer.put(32 * step, **{f"{tag} vs samples": value for tag, value in scalars.items()})
    writer.put(6, **{"lm loss validation": 2.25, "lm loss validation ppl": 9.5})
    writer.nemo(0, -1)
    start, *trains, held_out = TensorboardReader(tmp_path, tags).stream()
    assert isinstance(start, Start) and start.step == 4
    assert [event.step for event in trains] == [5, 6]
    assert all(isinstance(event, Train) and str(event.loss) == "nan" for event in trains)
    assert held_out == Validation(1006.0, 6, 2.25)


@pytest.mark.parametrize("block", [1 << 8, 1 << 10])
def test_a_file_is_read_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    writer, reader = Writer(tmp_path), TensorboardReader(tmp_path, TAGS["nemo"], SIZES)
    assert list(reader.stream()) == []
    for _ in range(100):
        writer.put(0, **{"an option that takes some bytes": 1.0})
    writer.nemo(0, -1)
    monkeypatch.setattr(tensorboard, "_BLOCK_BYTES", block)
    assert list(reader.stream()) == []
    writer.nemo(0, 59)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorboard, "_BLOCK_BYTES", 1 << 20)
        whole = list(TensorboardReader(tmp_path, TAGS["nemo"], SIZES).stream())
    assert list(reader.stream()) == whole and list(reader.stream()) == []
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    writer.nemo(60, 61)
    path.write_bytes(path.read_bytes()[: len(content) + 30])
    assert list(reader.stream()) == []


def test_the_end_of_a_long_file_gives_the_same_progress(tmp_path: Path) -> None:
    Writer(tmp_path).nemo(0, 1999)
    Writer(tmp_path / "none")
    progress = Progress(TensorboardReader(tmp_path, TAGS["nemo"], SIZES).stream())
    events = TensorboardReader(tmp_path, TAGS["nemo"], SIZES).read_end()
    quick = Progress(events)
    assert len(events) < 400
    for name in ("step", "max_steps", "loss", "validation_loss", "tokens_per_second", "eta"):
        assert getattr(quick, name) == getattr(progress, name), name
    for directory in (tmp_path / "none", tmp_path / "missing"):
        assert TensorboardReader(directory, TAGS["nemo"]).read_end() == []


def test_a_time_that_is_none_is_left_out(tmp_path: Path) -> None:
    Writer(tmp_path).nemo(0, 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(struct.pack("<d", 1000.0), struct.pack("<d", math.nan)))
    events = TensorboardReader(tmp_path, TAGS["nemo"]).stream()
    assert [event.step for event in events if isinstance(event, Train)] == [2]


def test_a_run_whose_log_has_no_lines(
    runs: Runs, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = runs.launch(engine="nemo")
    (directory / "gpt3_tiny_hydra.yaml").write_text("trainer:\n  max_steps: 400\n")
    Writer(directory / "results").nemo(0, 299)
    scheduler.set("11", RUNNING)
    assert slipway(runs, "status", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)
    assert (item["step"], item["max_steps"], item["val_loss"]) == (300, 400, 2.25)
    assert item["eta_seconds"] == pytest.approx(100.0)
    assert slipway(runs, "history", "--json", "gpt3_tiny") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["first_step"], row["step"]) == (0, 300)
