"""The time from a training's start to its first step, by the position in the data at which it resumes.

    python benchmarks/perf/resume.py [--runs N] [--documents N]

A data set of many short documents is made with numpy, in Megatron's format, in a temporary directory. The
trainer's own save writes checkpoints of a very small GPT whose progress is 1 %, 50 % and 99 % of the windows.
Then whole trainer processes resume from them, in turn, so that a noisy machine slows all of them alike. Each
does one step; the wall time is from the start of the process to that step's line in metrics.jsonl. The CPU
seconds are the kernel's account of the whole process, which a busy machine disturbs less. The floor is a
training that starts at step 0 with the same data. Quote the ratios of the medians.

A second table takes the sample index by itself: computed, and kept in `model.data.index_mapping_dir`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from slipway.trainer.logs import silence_warnings  # noqa: E402

silence_warnings()

import numpy as np  # noqa: E402
import yaml  # noqa: E402

SEQ_LENGTH = 32
BATCH = 8
VOCABULARY = 1000
# Tokens of a document: short ones make the index large beside the data.
SHORTEST, LONGEST = 8, 24
SHARES = (0.01, 0.5, 0.99)
FRESH = "from step 0 (floor)"


def write_data(prefix: Path, documents: int) -> int:
    """Write random documents of one sequence each; return the number of windows."""
    random = np.random.default_rng(0)
    lengths = random.integers(SHORTEST, LONGEST + 1, documents, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = int(ends[-1])
    random.integers(0, VOCABULARY, tokens, dtype=np.uint16).tofile(f"{prefix}.bin")
    with Path(f"{prefix}.idx").open("wb") as file:
        # Version 1, code 8 for uint16, the numbers of sequences and of document boundaries.
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        lengths.tofile(file)
        ((ends - lengths) * np.dtype(np.uint16).itemsize).tofile(file)
        np.arange(documents + 1, dtype=np.int64).tofile(file)
    return (tokens - 1) // SEQ_LENGTH


def write_tokenizer(directory: Path) -> None:
    """Write a vocabulary; nothing is encoded with it."""
    names = [*(f"t{number}" for number in range(VOCABULARY - 1)), "<|endoftext|>"]
    (directory / "vocab.json").write_text(json.dumps({name: at for at, name in enumerate(names)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")


def configuration(directory: Path, name: str, windows: int, saves: bool) -> Path:
    """Write the configuration of a run and return its path."""
    config = {
        "trainer": {
            "devices": 1,
            "num_nodes": 1,
            "accelerator": "cpu",
            "precision": 32,
            "max_steps": windows,
            "limit_val_batches": 0,
            "log_every_n_steps": 1,
        },
        "exp_manager": {
            "explicit_log_dir": str(directory / name),
            "create_checkpoint_callback": saves,
            "create_tensorboard_logger": False,
            "resume_if_exists": True,
            "resume_ignore_no_checkpoint": True,
            "checkpoint_callback_params": {"dirpath": str(directory / name / "checkpoints")},
        },
        "model": {
            "micro_batch_size": BATCH,
            "global_batch_size": BATCH,
            "encoder_seq_length": SEQ_LENGTH,
            "num_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "seed": 1234,
            "optim": {"name": "adamw", "lr": 1e-4, "sched": {"name": "CosineAnnealing"}},
            "tokenizer": {
                "library": "megatron",
                "type": "GPT2BPETokenizer",
                "vocab_file": str(directory / "vocab.json"),
                "merge_file": str(directory / "merges.txt"),
            },
            "data": {
                "data_impl": "mmap",
                "data_prefix": [str(directory / "data")],
                "splits_string": "100,0,0",
                "seq_length": SEQ_LENGTH,
            },
        },
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def save_at(config: Path, positions: dict[str, int]) -> None:
    """Write checkpoints with the trainer's own save, one into each directory, after so many steps."""
    from slipway.trainer import cpu_shim
    from slipway.trainer.config.layout import make_layout
    from slipway.trainer.config.load import flatten, load_config
    from slipway.trainer.config.settings import read_settings
    from slipway.trainer.world import World

    settings = read_settings(flatten(load_config(config.parent, config.name)))
    settings.output.log_dir.mkdir(parents=True)
    cpu_shim.install()
    from slipway.trainer.checkpoint.state import Progress
    from slipway.trainer.distributed import make_rank_context, process_group
    from slipway.trainer.loop.saving import Saver
    from slipway.trainer.loop.session import open_session

    world = World.from_environment(os.environ)
    with process_group(world, settings.accelerator) as device:
        session = open_session(settings, make_rank_context(world, make_layout(settings, 1), device))
        # The optimizer has its states from the first step on; this one has no gradients.
        session.model.zero_grad_buffer()
        session.optimizer.step(0.0)
        for directory, step in positions.items():
            saving = dataclasses.replace(settings.saving, directory=Path(directory))
            session.settings = dataclasses.replace(settings, saving=saving)
            session.progress = Progress(step, step * BATCH)
            Saver(session, None).end(0.0, None)


def environment() -> dict[str, str]:
    """Return the environment of a training by itself, with a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


@dataclasses.dataclass(frozen=True)
class Launch:
    """Seconds from a training's start to the end of its first step, and CPU seconds of its process."""

    wall: float
    cpu: float


def launch(config: Path, step: int) -> Launch:
    """Start a training that resumes after `step` and does one step more."""
    log_dir = config.with_suffix("")
    metrics = log_dir / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    command = [sys.executable, "-m", "slipway.trainer.pretrain", "--config-path", str(config.parent)]
    command += ["--config-name", config.stem, "--stop-after", str(step + 1)]
    with Path(f"{log_dir}.out").open("w+") as output:
        start = time.time()
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{command} ended with {process.returncode}\n{output.read()}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "train")
    if (first["step"], first["consumed_samples"]) != (step + 1, (step + 1) * BATCH):
        raise SystemExit(f"{config}: expected step {step + 1}, but there is {first}")
    return Launch(float(first["time"]) - start, usage.ru_utime + usage.ru_stime)


def measure_runs(directory: Path, windows: int, runs: int) -> None:
    """Write the checkpoints, launch and print the first table."""
    steps = {FRESH: 0, **{f"from {share:.0%}": int(share * windows / BATCH) for share in SHARES}}
    configs = {name: configuration(directory, f"run{at}", windows, False) for at, name in enumerate(steps)}
    positions = {
        str(configs[name].with_suffix("") / "checkpoints"): step for name, step in steps.items() if step
    }
    writer = configuration(directory, "writer", windows, True)
    command = [sys.executable, __file__, "--save-at", str(writer), json.dumps(positions)]
    subprocess.run(command, env=environment(), check=True)
    for name, step in steps.items():
        launch(configs[name], step)  # warms the caches and the bytecode
    launches: dict[str, list[Launch]] = {name: [] for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            launches[name].append(launch(configs[name], step))
    print(f"{'':20}{'samples':>11}{'wall [s]':>10}{'min-max':>13}{'to 1 %':>8}{'CPU [s]':>9}{'to 1 %':>8}")
    base = launches["from 1%"]
    for name, rows in launches.items():
        wall, cpu = (statistics.median(getattr(row, kind) for row in rows) for kind in ("wall", "cpu"))
        spread = f"{min(row.wall for row in rows):.2f}-{max(row.wall for row in rows):.2f}"
        ratios = [
            value / statistics.median(getattr(row, kind) for row in base)
            for kind, value in (("wall", wall), ("cpu", cpu))
        ]
        print(
            f"{name:20}{steps[name] * BATCH:>11,}{wall:>10.2f}{spread:>13}{ratios[0]:>8.2f}"
            f"{cpu:>9.2f}{ratios[1]:>8.2f}"
        )


def measure_index(prefix: Path, runs: int) -> None:
    """Print the second table: the sample index alone, in this process."""
    from slipway.trainer.data import index_cache
    from slipway.trainer.data.index import SampleIndex, build_index
    from slipway.trainer.data.index_cache import IndexCache

    # Treat the data as written long ago: fresh files are hashed each time.
    index_cache._RESTED_SECONDS = -1.0
    weights = (100.0, 0.0, 0.0)

    def compute() -> SampleIndex:
        return build_index(prefix, weights)

    def compute_and_store() -> SampleIndex:
        with tempfile.TemporaryDirectory() as empty:
            return IndexCache(Path(empty)).get(prefix, weights, compute)

    with tempfile.TemporaryDirectory() as cache_dir:

        def load_stored() -> SampleIndex:
            return IndexCache(Path(cache_dir)).get(prefix, weights, compute)

        ways: dict[str, Callable[[], Any]] = {
            "computed": compute,
            "computed and kept": compute_and_store,
            "read from the cache": load_stored,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(runs + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                times[name].append(1000 * (time.perf_counter() - start))
    print(f"\n{'sample index':24}{'[ms]':>10}{'min-max [ms]':>16}")
    for name, durations in times.items():
        samples = durations[1:]
        spread = f"{min(samples):.1f}-{max(samples):.1f}"
        print(f"{name:24}{statistics.median(samples):>10.1f}{spread:>16}")


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (default: 5)")
    parser.add_argument("--documents", type=int, default=10_000_000, help="default: 10 million")
    parser.add_argument("--save-at", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.save_at:
        save_at(Path(options.save_at[0]), json.loads(options.save_at[1]))
        return
    with tempfile.TemporaryDirectory(prefix="slipway-resume-") as name:
        directory = Path(name)
        windows = write_data(directory / "data", options.documents)
        write_tokenizer(directory)
        size = sum(path.stat().st_size for path in directory.glob("data.*"))
        print(
            f"Medians of {options.runs} interleaved runs; Python {sys.version.split()[0]}, "
            f"{os.cpu_count()} cores\n{options.documents:,} documents, {windows:,} windows of {SEQ_LENGTH} "
            f"tokens, {size / 1e6:,.0f} MB, warm page cache\n"
        )
        measure_runs(directory, windows, options.runs)
        measure_index(directory / "data", options.runs)
    print("\nAim: the ratio to 1 % is 1, whatever the position.")


if __name__ == "__main__":
    main()
