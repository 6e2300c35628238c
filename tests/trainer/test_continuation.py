"""Trainings that are killed and launched again: bit by bit the same as one that nothing interrupted."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import REPOSITORY, environment, free_port
from tests.trainer.faults import FAULT
from tests.trainer.t5 import T5, both
from tests.warm import WarmPool

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(900)]

WORLD = 2
STEPS = 24
PARAMS = "exp_manager.checkpoint_callback_params"
COMMON = {
    "trainer.max_steps": STEPS,
    "trainer.val_check_interval": 5,
    "trainer.limit_val_batches": 2,
    f"{PARAMS}.save_top_k": 2,
    f"{PARAMS}.async_save": True,
}
# Two micro batches a step on a rank, and a second epoch from the middle of the run on.
HALF = {"model.global_batch_size": 4, "model.data.splits_string": "30,70,0"}
GPT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1, "model.num_layers": 1}
SPANS = {**T5, **both(hidden_dropout=0.1, attention_dropout=0.1, num_layers=1)}
# Each rank has a share of the optimizer's states, and saves it.
SHARDED = {
    "model.optim.name": "mcore_distributed_optim",
    "trainer.precision": "bf16",
    "model.megatron_amp_O2": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {**GPT, **HALF, "model.tensor_model_parallel_size": 2},
    "data": GPT,
    "sharded": {**GPT, **SHARDED},
    "pipeline": {**GPT, **HALF, "model.num_layers": 2, "model.pipeline_model_parallel_size": 2},
    "t5_tensor": {**SPANS, **HALF, "model.tensor_model_parallel_size": 2},
    "t5_data": SPANS,
}
# Its processes are started as a user's are: it continues one that was forked, is killed, and is continued by
# one. All others are forked from one that has imported everything.
COLD = {("tensor", "second")}
SEED = int(os.environ.get("SLIPWAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
PATIENCE = 120


class Run:
    """A run of two processes, launched repeatedly; checkpoints are shared, each launch has its own logs."""

    def __init__(self, trainings: Any, name: str, changes: dict[str, Any], start: Callable[..., Any]) -> None:
        self._trainings, self._name, self._changes, self._start = trainings, name, changes, start
        self._fault = "shard:all:0" if SHARDED.items() <= changes.items() else ""
        self.log_dirs: list[Path] = []
        self._processes: list[Any] = []
        self.checkpoints: Path | None = None

    def launch(self, start: Callable[..., Any] | None = None) -> None:
        """Start the processes, in another way than the others if so asked."""
        name = f"{self._name}-{len(self.log_dirs)}"
        if self.checkpoints is None:
            self.checkpoints = self._trainings.configure(name, {}, WORLD)[1].with_name(f"{self._name}-saved")
        changes = {**COMMON, **self._changes, f"{PARAMS}.dirpath": str(self.checkpoints)}
        options, log_dir = self._trainings.configure(name, changes, WORLD)
        self.log_dirs.append(log_dir)
        port = free_port()
        self._processes = [
            (start or self._start)(
                options,
                {**environment(rank, WORLD, port), FAULT: self._fault},
                log_dir.with_name(f"{name}.rank{rank}"),
            )
            for rank in range(WORLD)
        ]

    def kill(self) -> None:
        """End all ranks at once with SIGKILL; they must have been at work until then."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        first, *others = [process.wait() for process in self._processes]
        assert first == -signal.SIGKILL, self.output()
        # On a busy machine another may have missed the first and ended by itself.
        assert all(code in (-signal.SIGKILL, 1) for code in others), self.output()

    def end(self) -> None:
        """Wait until all ranks have ended well."""
        assert [process.wait() for process in self._processes] == [0] * WORLD, self.output()

    def output(self) -> str:
        """Return the last launch's output to stdout and stderr."""
        last = self.log_dirs[-1]
        return "\n".join(last.with_name(f"{last.name}.rank{rank}").read_text() for rank in range(WORLD))

    def events(self, kind: str, log_dir: Path) -> list[dict[str, Any]]:
        """Return the events of a launch; a kill may have cut the last line."""
        path = log_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["kind"] == kind]

    def numbers(self) -> dict[tuple[str, int], set[tuple[Any, ...]]]:
        """Return, for each step of any launch, all values that were computed there: one if all agree."""
        values_of_step: dict[tuple[str, int], set[tuple[Any, ...]]] = {}
        fields = {"train": ("loss", "grad_norm", "lr", "consumed_samples"), "validation": ("val_loss",)}
        for log_dir in self.log_dirs:
            for kind, names in fields.items():
                for event in self.events(kind, log_dir):
                    values = tuple(event[name] for name in names)
                    values_of_step.setdefault((kind, event["step"]), set()).add(values)
        return values_of_step

    def wait_for_checkpoint(self) -> None:
        """Wait for the first checkpoint: a busy disk may still write it when later steps are done."""
        assert self.checkpoints is not None
        directory = self.checkpoints
        until(lambda: any(directory.glob("[!.]*/complete.json")), self.output)

    def wait_for_step(self, step: int) -> None:
        """Wait until the last launch has completed a step."""
        path, size = self.log_dirs[-1] / "metrics.jsonl", 0

        def has_completed() -> bool:
            nonlocal size
            before, size = size, path.stat().st_size if path.exists() else 0
            # Read again only when there is more: this looks very often.
            return size > before and any(e["step"] >= step for e in self.events("train", path.parent))

        until(has_completed, self.output)

    def wait_for_save(self, number: int) -> Path:
        """Return the directory in which the last launch writes its `number`-th checkpoint from now on."""
        assert self.checkpoints
        earlier, directory = set(self.unfinished()), self.checkpoints
        ours: list[Path] = []

        def has_begun() -> bool:
            ours.extend(path for path in self.unfinished() if path not in earlier and path not in ours)
            return len(ours) >= number

        until(has_begun, lambda: f"{directory}: {self.output()}")
        return ours[number - 1]

    def unfinished(self) -> list[Path]:
        """Return the directories of checkpoints that are not finished."""
        assert self.checkpoints
        return list(self.checkpoints.glob(".unfinished-*"))


def until(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.002)


def start_cold(options: list[str], variables: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start a process of its own, which lists its imports and the settings of OpenMP."""
    variables = {**variables, "PYTHONPROFILEIMPORTTIME": "1", "OMP_DISPLAY_ENV": "VERBOSE"}
    command = [sys.executable, "-m", "slipway.trainer.pretrain", *options]
    with output.open("wb") as file:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **variables}, stdout=file, stderr=file
        )


@pytest.fixture(scope="module")
def uninterrupted_numbers(trainings: Any, pool: WarmPool) -> Callable[[str], Any]:
    """Return the numbers of a layout's uninterrupted run; each is run once."""
    numbers_of_layout: dict[str, Any] = {}

    def numbers(layout: str) -> Any:
        if layout not in numbers_of_layout:
            run = Run(trainings, f"uninterrupted_{layout}", LAYOUTS[layout], pool.start)
            run.launch()
            run.end()
            numbers_of_layout[layout] = run.numbers()
            steps = {"train": set(range(1, STEPS + 1)), "validation": {*range(5, STEPS, 5), STEPS}}
            assert {
                kind: {step for event_kind, step in numbers_of_layout[layout] if event_kind == kind}
                for kind in steps
            } == steps
        return numbers_of_layout[layout]

    return numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_killed_at_random_steps_continues_bitwise(
    trainings: Any, pool: WarmPool, uninterrupted_numbers: Callable[[str], Any], layout: str
) -> None:
    print(f"SLIPWAY_TEST_SEED={SEED}")
    chance = random.Random(f"{SEED} {layout}")
    changes = {**LAYOUTS[layout], f"{PARAMS}.every_n_train_steps": 3}
    run = Run(trainings, f"killed_{layout}", changes, pool.start)

    def launch(ordinal: str) -> None:
        run.launch(start_cold if (layout, ordinal) in COLD else None)

    for ordinal, step in zip(("first", "second"), sorted(chance.sample(range(6, STEPS - 8), 2)), strict=True):
        launch(ordinal)
        run.wait_for_step(step)
        run.wait_for_checkpoint()
        time.sleep(chance.uniform(0, 0.03))
        run.kill()
        if (layout, ordinal) in COLD:
            modules = re.findall(r"^import time: .* (\S+)$", run.output(), re.MULTILINE)
            assert "torch.optim.adam" in modules and "tensorboard.summary.writer" in modules
            assert not {"torch._dynamo", "torch._dynamo.utils", "boto3"} & set(modules)
            assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", run.output()) == ["0"] * WORLD
    launch("last")
    run.end()
    starts = [run.events("start", log_dir)[0]["step"] for log_dir in run.log_dirs]
    assert starts[0] == 0
    assert 0 < starts[1] <= starts[2]
    assert all(step % 3 == 0 for step in starts)
    assert run.numbers() == uninterrupted_numbers(layout)


@pytest.mark.parametrize(
    ("layout", "kills", "in_background"), [("tensor", 20, True), ("sharded", 20, True), ("data", 6, False)]
)
def test_kills_in_the_middle_of_a_checkpoint_cost_no_bit(
    trainings: Any,
    pool: WarmPool,
    uninterrupted_numbers: Callable[[str], Any],
    layout: str,
    kills: int,
    in_background: bool,
) -> None:
    print(f"SLIPWAY_TEST_SEED={SEED}")
    chance = random.Random(f"{SEED} {layout}")
    saving = {f"{PARAMS}.every_n_train_steps": 1, f"{PARAMS}.async_save": in_background}
    changes = {**LAYOUTS[layout], **saving}
    run = Run(trainings, f"torn_{layout}", changes, pool.start)
    torn: set[Path] = set()
    leftovers: list[Path] = []
    # Seconds, and about as long as a save takes: what it is on this machine shows.
    longest = 0.05
    for kill in range(kills):
        run.launch()
        # The second begins when the first is complete: so the run gets on, however slow the machine is.
        writing = run.wait_for_save(2 if kill % 3 == 2 else 1)
        time.sleep(chance.uniform(0, longest))
        run.kill()
        assert all(f"skipping {path}: it is not a complete checkpoint" in run.output() for path in leftovers)
        leftovers = run.unfinished()
        torn.update({writing} & set(leftovers))
        longest *= 1.2 if writing in leftovers else 0.6
    run.launch()
    run.end()
    assert len(torn) >= kills // 2
    assert run.numbers() == uninterrupted_numbers(layout)
    assert run.unfinished() == []
    starts = [run.events("start", log_dir)[0]["step"] for log_dir in run.log_dirs]
    assert starts == sorted(starts)
    assert starts[-1] > 0
