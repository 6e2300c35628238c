"""The ranks of one launch, forked from a warm process."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

from tests.trainer.conftest import environment, free_port
from tests.trainer.faults import FAULT
from tests.warm import WarmPool, WarmProcess

PATIENCE = 60


class Run:
    """The ranks of one launch."""

    def __init__(
        self,
        trainings: Any,
        pool: WarmPool,
        name: str,
        changes: dict[str, Any],
        world: int,
        fault: str = "",
    ) -> None:
        options, self.log_dir = trainings.configure(name, changes, world)
        port = free_port()
        self._outputs = [trainings.root / f"{name}.rank{rank}" for rank in range(world)]
        for output in self._outputs:
            output.touch()
        self.ranks: list[WarmProcess] = [
            pool.start(options, {**environment(rank, world, port), FAULT: fault}, output)
            for rank, output in enumerate(self._outputs)
        ]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of all launches so far; a line may be half written."""
        path = self.log_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["kind"] == kind]

    def last_step(self) -> int:
        """Return the last step that was reported."""
        return max((line["step"] for line in self.lines("train")), default=0)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is reported."""
        deadline = time.monotonic() + PATIENCE
        while self.last_step() < step:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)

    def wait_for(self, text: str) -> None:
        """Wait until a rank has written a text to stdout or stderr."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.output():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)

    def send(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to chosen ranks, or to all."""
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].send_signal(number)

    def end(self) -> list[int]:
        """Wait for the ranks and return their exit codes."""
        return [rank.wait() for rank in self.ranks]

    def output(self, *ranks: int) -> str:
        """Return the output to stdout and stderr, of chosen ranks or of all."""
        return "\n".join(self._outputs[rank].read_text() for rank in ranks or range(len(self.ranks)))

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints."""
        paths = (self.log_dir / "checkpoints").glob("megatron*")
        return sorted(path.name for path in paths)
