"""Record real trainings for the detectors: `gpt3/tiny` in several sizes on a CPU, and divergences of it.

    python -m benchmarks.watch.record [--only NAME ...]

Each row of `RUNS` is a training of our trainer with a learning rate of its own, in this process; the text
is that of modules of Python's standard library, as in `make demo`. Losses and gradient norms go to
`recorded.json.gz` next to this file. All rows take about ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import json
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded.json.gz")
STEPS = 320
_MODULES = (
    "argparse ast calendar codecs difflib doctest ftplib gettext heapq inspect ipaddress locale optparse os"
    " pdb pickletools platform plistlib pprint random shutil smtplib socket subprocess tarfile textwrap"
    " threading"
)


@dataclass(frozen=True)
class Run:
    """A training: its size, its seed, and what happens to its learning rate or its data after step `at`.

    `kind` is ``healthy``; ``ramp``, where the rate grows by the factor `by` in each step; ``jump``, where it
    is `by` times as high from then on; ``pulse``, where it is that for `length` steps; or ``garbage``, where
    the tokens of `length` steps are drawn at random.
    """

    name: str
    kind: str
    seed: int
    layers: int = 2
    hidden: int = 64
    batch: int = 16
    rate: float = 6e-3
    at: int = 180
    by: float = 1.0
    length: int = 0

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rate = self.rate * min((step + 1) / 20, 1.0)
        past = step - self.at
        if past < 0 or self.kind in ("healthy", "garbage"):
            return rate
        if self.kind == "ramp":
            return rate * self.by ** (past + 1)
        return rate * self.by if self.kind == "jump" or past < self.length else rate


RUNS = (
    *(
        Run(f"healthy-{seed}", "healthy", seed, 1 + seed % 3, batch=(8, 16, 32)[seed % 3])
        for seed in range(6)
    ),
    *(
        Run(f"ramp-{seed}", "ramp", seed, layers, hidden, batch, rate, at, by)
        for seed, (layers, hidden, batch, rate, at, by) in enumerate(
            (
                (2, 64, 16, 6e-3, 180, 1.10),
                (2, 64, 16, 6e-3, 150, 1.06),
                (2, 96, 16, 4e-3, 160, 1.15),
                (3, 64, 16, 6e-3, 170, 1.08),
                (4, 64, 8, 6e-3, 200, 1.10),
                (1, 128, 16, 8e-3, 180, 1.20),
                (2, 64, 32, 6e-3, 150, 1.12),
                (2, 48, 16, 1e-2, 160, 1.08),
                (3, 96, 8, 4e-3, 190, 1.15),
                (2, 64, 8, 6e-3, 170, 1.30),
                (2, 64, 16, 6e-3, 120, 1.04),
                (3, 64, 8, 6e-3, 150, 1.06),
                (1, 96, 16, 8e-3, 130, 1.05),
                (2, 48, 32, 6e-3, 140, 1.08),
                (4, 48, 8, 4e-3, 160, 1.08),
                (2, 96, 8, 8e-3, 140, 1.06),
                (3, 48, 16, 1e-2, 130, 1.05),
                (1, 64, 32, 6e-3, 150, 1.10),
            ),
            start=10,
        )
    ),
    *(
        Run(f"jump-{seed}", "jump", seed, layers, hidden, batch, rate, at, by)
        for seed, (layers, hidden, batch, rate, at, by) in enumerate(
            (
                (2, 64, 16, 6e-3, 180, 30),
                (3, 64, 16, 6e-3, 200, 60),
                (2, 96, 8, 4e-3, 160, 100),
                (1, 64, 16, 8e-3, 190, 50),
                (4, 64, 16, 3e-3, 170, 100),
                (2, 128, 8, 6e-3, 180, 40),
            ),
            start=30,
        )
    ),
    Run("pulse-50", "pulse", 50, at=200, by=30, length=4),
    Run("pulse-51", "pulse", 51, layers=3, at=180, by=60, length=6),
    Run("garbage-60", "garbage", 60, at=200, length=6),
    Run("garbage-61", "garbage", 61, layers=1, at=190, length=12),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="record these again, and keep the others")
    only = parser.parse_args().only
    before = json.loads(gzip.decompress(RECORDED.read_bytes())) if only and RECORDED.exists() else []
    curves = {curve["name"]: curve for curve in before}
    with tempfile.TemporaryDirectory() as directory:
        data = prepare_data(Path(directory))
        with open_world() as context:
            for run in RUNS:
                if not only or run.name in only:
                    curves[run.name] = record(run, data, context)
                    save([curves[each.name] for each in RUNS if each.name in curves])


def save(curves: list[dict[str, Any]]) -> None:
    """Write the curves, the same bytes for the same values."""
    RECORDED.write_bytes(gzip.compress(json.dumps(curves).encode(), mtime=0))


def prepare_data(directory: Path) -> Path:
    """Tokenize modules of Python's standard library."""
    text = directory / "text"
    text.mkdir()
    for name in _MODULES.split():
        (text / f"{name}.py").write_bytes(Path(sysconfig.get_path("stdlib"), f"{name}.py").read_bytes())
    slipway = str(Path(sys.executable).with_name("slipway"))
    data = directory / "data"
    places = [f"data_dir={data}", f"base_results_dir={directory / 'results'}"]
    subprocess.run([slipway, "data", "tokenize", str(text), "--pattern", "*.py", *places], check=True)
    return data


@contextlib.contextmanager
def open_world() -> Iterator[Callable[[Any], Any]]:
    """Yield a function from settings to the context of the only rank."""
    from slipway.trainer import cpu_shim
    from slipway.trainer.logs import silence_warnings

    silence_warnings()
    cpu_shim.install()
    from slipway.trainer.config.layout import make_layout
    from slipway.trainer.distributed import make_rank_context, process_group
    from slipway.trainer.world import World

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        world = World.from_environment({"MASTER_PORT": str(server.getsockname()[1])})
    with process_group(world, "cpu") as device:
        contexts: list[Any] = []

        def context_of(settings: Any) -> Any:
            if not contexts:  # the groups of processes are made once
                contexts.append(make_rank_context(world, make_layout(settings, 1), device))
            return contexts[0]

        yield context_of


def settings_of(run: Run, data: Path) -> Any:
    """Return the trainer's settings of `gpt3/tiny` in the size of a run."""
    from launcher.drafting import Request, draft
    from slipway.trainer.config.load import flatten
    from slipway.trainer.config.settings import read_settings

    overrides = {
        "training": "gpt3/tiny",
        "cluster": "local",
        "data_dir": data,
        "base_results_dir": data.parent / "results",
        "training.run.name": run.name,
        "training.trainer.num_nodes": 1,
        "training.trainer.devices": 1,
        "training.trainer.max_steps": STEPS,
        "training.trainer.limit_val_batches": 0,
        "training.model.tensor_model_parallel_size": 1,
        "training.model.seed": run.seed,
        "training.model.num_layers": run.layers,
        "training.model.hidden_size": run.hidden,
        "training.model.micro_batch_size": run.batch,
        "training.model.global_batch_size": run.batch,
        "training.model.encoder_seq_length": 64,
        "training.model.max_position_embeddings": 64,
    }
    request = Request([f"{key}={value}" for key, value in overrides.items()], [])
    return read_settings(flatten(dict(draft(request).plan.job.config or {})))


def record(run: Run, data: Path, context_of: Any) -> dict[str, Any]:
    """Train; return the losses and gradient norms of the steps."""
    import torch

    from slipway.trainer.errors import DivergedError
    from slipway.trainer.loop.run import Loop
    from slipway.trainer.loop.saving import Saver
    from slipway.trainer.loop.session import open_session
    from slipway.trainer.loop.stopping import Stopping
    from slipway.trainer.signals import StopSignals

    torch.set_num_threads(1)  # the models are small
    torch.manual_seed(run.seed)
    settings = settings_of(run, data)
    settings.output.log_dir.mkdir(parents=True)
    context = context_of(settings)
    session = open_session(settings, context)
    session.schedule = run.rate_at
    if run.kind == "garbage":
        session.batch_builder = Garbage(session.batch_builder, range(run.at, run.at + run.length))  # type: ignore[assignment]
    norms: list[float] = []
    losses: list[float] = []
    step = session.optimizer.step

    def note_norm(lr: float) -> float:
        norms.append(step(lr))
        return norms[-1]

    session.optimizer.step = note_norm  # type: ignore[method-assign]
    stopping = Stopping(settings, context, StopSignals(0), time.monotonic())
    loop = Loop(session, stopping, Saver(session, None))
    began = time.monotonic()
    with contextlib.closing(loop.feed), contextlib.suppress(DivergedError):
        for _ in range(STEPS):
            try:
                loop.step()
            finally:
                losses.append(loop.loss)
    ends = f"loss {min(losses):.3f}, then {losses[-1]:.3f}"
    print(f"{run.name}: {len(losses)} steps in {time.monotonic() - began:.0f} s, {ends}", flush=True)
    return {
        **dataclasses.asdict(run),
        "loss": [float(f"{value:.5g}") for value in losses],
        "grad_norm": [float(f"{value:.4g}") for value in norms],
    }


class Garbage:
    """A batch builder whose tokens are random in some steps."""

    def __init__(self, builder: Any, steps: range) -> None:
        self._builder, self._steps, self._step = builder, steps, 0

    def batches(self, *arguments: Any) -> Iterator[Any]:
        """Yield the micro batches of the next step."""
        is_garbage = self._step in self._steps
        self._step += 1
        for batch in self._builder.batches(*arguments):
            if is_garbage:
                batch.tokens.random_(2000)
                batch.labels.random_(2000)
            yield batch


if __name__ == "__main__":
    main()
