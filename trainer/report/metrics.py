"""``metrics.jsonl``: one JSON object a line, flushed line by line, for programs that follow a training."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FILE_NAME = "metrics.jsonl"
# By itself, so that nobody has to look for it among a million steps.
DAMAGED_FILE_NAME = "damaged_checkpoints.jsonl"


class MetricsFile:
    """Appends lines; a resumed training continues the file of the one before."""

    def __init__(self, log_dir: Path, name: str = FILE_NAME) -> None:
        self._file = (log_dir / name).open("a", encoding="utf-8")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line with its kind and the time (Unix seconds)."""
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
