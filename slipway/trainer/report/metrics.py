"""Files for programs that follow a training: ``metrics.jsonl``, a JSON object a line, and TensorBoard's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"
# A separate file: a report would be lost among a million steps.
DAMAGED_FILE_NAME = "damaged_checkpoints.jsonl"


class MetricsFile:
    """Lines that are flushed as they are written; a resumed training continues the file of the one before."""

    def __init__(self, log_dir: Path, name: str = FILE_NAME) -> None:
        self._file = (log_dir / name).open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line with its kind and the time (Unix seconds)."""
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_first(log_dir: Path) -> dict[str, Any]:
    """Return the first line of a run's file, its first start; nothing if there is none or it is damaged."""
    try:
        with (log_dir / FILE_NAME).open(encoding="utf-8") as file:
            line = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return line if isinstance(line, dict) else {}


class EventsFile:
    """TensorBoard's ``events.out.tfevents.*`` under NeMo's names; the x axis is the global step."""

    def __init__(self, log_dir: Path) -> None:
        # Imported late: a training without TensorBoard does without the package.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(log_dir))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Add scalars at a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
