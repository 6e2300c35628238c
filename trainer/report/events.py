"""TensorBoard events under NeMo's names; the x axis is the global step."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class EventsFile:
    """Writes scalars to ``events.out.tfevents.*`` in a directory."""

    def __init__(self, log_dir: Path) -> None:
        self._writer = EventFileWriter(str(log_dir))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Add scalars at a step."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
