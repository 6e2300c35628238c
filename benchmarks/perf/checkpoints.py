"""The cost of a save and a load: with and without checksums, and by the format of sharded optimizer states.

    python benchmarks/perf/checkpoints.py [--runs N] [--layers N] [--ranks N]

One process holds a GPT and an Adam optimizer with its states. It saves and loads checkpoints with the
trainer's own functions, with checksums and without, in turn, so that a noisy machine slows both; a save is
timed until its files are on disk and it has its name, in the training's own thread. Quote the ratios of the
medians. The files of a load are in the page cache, where its ratio is highest. The second table is how fast
the standard library's checksums are, over as many bytes in memory.

In the third several ranks share the states of the optimizer, with the stand-in for the fused Adam of GPUs
that the tests have. They save and load them in shards (ours), gathered on each rank and written in equal
shares, and gathered and written by one rank, as earlier versions did. The peak is that of the fullest rank:
resident memory at most during the save or the load, less that before it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from resume import configuration, environment, write_tokenizer  # noqa: E402

WITH, WITHOUT = "with checksums", "without (floor)"
HIDDEN = 512


@contextlib.contextmanager
def checksums(is_on: bool) -> Iterator[None]:
    """Save and load with checksums, or as if there were none."""
    from slipway.trainer.checkpoint import reader, store

    before: tuple[Any, Any] = store.checksum_part, reader.verify
    if not is_on:
        store.checksum_part = lambda *_: {}
        reader.verify = lambda *_: None
    try:
        yield
    finally:
        store.checksum_part, reader.verify = before


def seconds_of(action: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and the CPU seconds of an action."""
    start, cpu_start = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - cpu_start


def load(session: Any) -> None:
    """Restore the newest checkpoint into a training."""
    from slipway.trainer.checkpoint import state
    from slipway.trainer.loop.session import _choose

    choice = _choose(session)
    assert choice
    state.restore(choice, session.model, session.optimizer.inner, session.rank_context, session.settings.seed)


def measure(directory: Path, layers: int, runs: int) -> int:
    """Save and load in turn, print the table and return the bytes of a checkpoint."""
    from slipway.trainer import cpu_shim
    from slipway.trainer.config.layout import make_layout
    from slipway.trainer.config.load import flatten, load_config
    from slipway.trainer.config.settings import read_settings
    from slipway.trainer.world import World

    config = configuration(directory, "writer", 10, True)
    flat = flatten(load_config(config.parent, config.name))
    larger = {"num_layers": layers, "hidden_size": HIDDEN, "num_attention_heads": 8, "data.data_impl": "mock"}
    settings = read_settings({**flat, **{f"model.{key}": value for key, value in larger.items()}})
    settings.output.log_dir.mkdir(parents=True)
    cpu_shim.install()
    from slipway.trainer.checkpoint import state, store
    from slipway.trainer.distributed import make_rank_context, process_group
    from slipway.trainer.loop.saving import Saver
    from slipway.trainer.loop.session import open_session

    costs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    world = World.from_environment(os.environ)
    with process_group(world, settings.accelerator) as device:
        session = open_session(settings, make_rank_context(world, make_layout(settings, 1), device))
        session.model.zero_grad_buffer()
        session.optimizer.step(0.0)
        session.progress = state.Progress(1, 8)

        for run in range(runs + 1):
            for name in (WITH, WITHOUT) if run % 2 else (WITHOUT, WITH):
                target = directory / f"{run} {name}"
                saving = dataclasses.replace(settings.saving, directory=target)
                session.settings = dataclasses.replace(settings, saving=saving)
                with checksums(name == WITH):
                    save_cost = seconds_of(lambda: Saver(session, None).end(0.0, None))
                    load_cost = seconds_of(lambda: load(session))
                (checkpoint,) = store.list_complete(target)
                size = sum(checkpoint.marker.files.values())
                assert bool(checkpoint.marker.checksums) == (name == WITH)
                shutil.rmtree(target)
                if run:
                    # The first of all warms the page cache and the allocator.
                    costs.setdefault(("save", name), []).append(save_cost)
                    costs.setdefault(("load", name), []).append(load_cost)
    print(f"checkpoint of {size / 1e6:,.0f} MB; medians of {runs} interleaved runs")
    print(f"{'':24}{'wall [s]':>10}{'min-max':>14}{'ratio':>8}{'CPU [s]':>10}{'ratio':>8}")
    for (operation, name), rows in sorted(costs.items(), key=lambda item: (item[0][0], item[0][1] == WITH)):
        walls, cpu_times = zip(*rows, strict=True)
        floor = [statistics.median(column) for column in zip(*costs[operation, WITHOUT], strict=True)]
        wall, cpu = statistics.median(walls), statistics.median(cpu_times)
        print(
            f"{operation + ', ' + name:24}{wall:>10.3f}{f'{min(walls):.3f}-{max(walls):.3f}':>14}"
            f"{wall / floor[0]:>8.2f}{cpu:>10.3f}{cpu / floor[1]:>8.2f}"
        )
    return size


def measure_digests(size: int, runs: int) -> None:
    """Print how fast each checksum is."""
    content = os.urandom(min(size, 1 << 28))
    digests: dict[str, Callable[[bytes], object]] = {
        "zlib.crc32 (ours)": zlib.crc32,
        "zlib.adler32": zlib.adler32,
        **{name: getattr(hashlib, name) for name in ("sha1", "sha256", "blake2b", "md5")},
    }
    print(f"\n{'in memory':24}{'[GB/s]':>10}")
    for name, digest in digests.items():
        seconds = statistics.median(seconds_of(lambda digest=digest: digest(content))[0] for _ in range(runs))
        print(f"{name:24}{len(content) / seconds / 1e9:>10.2f}")


FORMATS = {
    "in shards (ours)": ("dp_reshardable", True),
    "gathered, in shares": ("fully_reshardable", True),
    "gathered, one writer": ("fully_reshardable", False),
}


@contextlib.contextmanager
def optimizer_format(name: str) -> Iterator[None]:
    """Save and load in a format, by all ranks or by one."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    from slipway.trainer.checkpoint import state, strategies

    form, in_shares = FORMATS[name]
    before: tuple[Any, Any, Any] = (
        state.optimizer_format,
        strategies.FullyParallelSaveStrategyWrapper,
        state.load_strategy,
    )
    state.optimizer_format = lambda *_: form
    if not in_shares:
        strategies.FullyParallelSaveStrategyWrapper = lambda files, *_, **__: files
        state.load_strategy = TorchDistLoadShardedStrategy
    try:
        yield
    finally:
        state.optimizer_format, strategies.FullyParallelSaveStrategyWrapper, state.load_strategy = before


def peak(action: Callable[[], object]) -> int:
    """Return the bytes by which the resident memory of this process grows at most during an action."""

    def status(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if name in line)
        return int(line.split()[1]) * 1024

    # Memory that earlier actions freed goes back to the system, or its reuse would not be seen.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Sets the high-water mark to what is resident now (man 5 proc).
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def measure_rank(directory: Path, layers: int, runs: int) -> None:
    """Save and load as a rank of several, in each format in turn; rank 0 writes the results."""
    from slipway.trainer import cpu_shim
    from slipway.trainer.config.layout import make_layout
    from slipway.trainer.config.load import flatten, load_config
    from slipway.trainer.config.settings import read_settings
    from slipway.trainer.world import World
    from tests.trainer.fused_adam import stand_in_for_fused_adam

    world = World.from_environment(os.environ)
    config = directory / "formats.yaml"
    flat = flatten(load_config(config.parent, config.name))
    larger = {"num_layers": layers, "hidden_size": HIDDEN, "num_attention_heads": 8, "data.data_impl": "mock"}
    sharded = {"megatron_amp_O2": True, "optim.name": "mcore_distributed_optim", "micro_batch_size": 1}
    model = {f"model.{key}": value for key, value in {**larger, **sharded}.items()}
    settings = read_settings({**flat, **model, "trainer.precision": "bf16", "trainer.devices": world.size})
    settings.output.log_dir.mkdir(parents=True, exist_ok=True)
    cpu_shim.install()
    stand_in_for_fused_adam()
    import torch.distributed as dist

    from slipway.trainer.checkpoint import state, store
    from slipway.trainer.distributed import make_rank_context, process_group
    from slipway.trainer.loop.saving import Saver
    from slipway.trainer.loop.session import open_session

    results: dict[str, list[tuple[float, float, int, int, int]]] = {name: [] for name in FORMATS}
    with process_group(world, settings.accelerator) as device:
        session = open_session(settings, make_rank_context(world, make_layout(settings, world.size), device))
        session.model.zero_grad_buffer()
        session.optimizer.step(0.0)
        session.progress = state.Progress(1, 8)

        def save() -> None:
            # The save runs beside the training, for which a rank copies its share of the state.
            saver = Saver(session, None)
            saver._save(0.0, None, background=True)
            saver.settle()

        for run in range(runs + 1):
            for name in FORMATS:
                target = directory / f"{run} {name}"
                saving = dataclasses.replace(settings.saving, directory=target)
                session.settings = dataclasses.replace(settings, saving=saving)
                with optimizer_format(name):
                    times, peaks = [], []
                    for action in (save, lambda: load(session)):
                        dist.barrier()
                        start = time.perf_counter()
                        peaks.append(peak(action))
                        times.append(time.perf_counter() - start)
                rank_costs: list[Any] = [None] * world.size
                dist.all_gather_object(rank_costs, (times, peaks))
                if world.is_main:
                    (checkpoint,) = store.list_complete(target)
                    assert checkpoint.marker.optimizer == FORMATS[name][0]
                    size = sum(checkpoint.marker.files.values())
                    seconds = [
                        max(column) for column in zip(*(costs[0] for costs in rank_costs), strict=True)
                    ]
                    peak_bytes = [
                        max(column) for column in zip(*(costs[1] for costs in rank_costs), strict=True)
                    ]
                    shutil.rmtree(target)
                    if run:
                        results[name].append((seconds[0], seconds[1], size, peak_bytes[0], peak_bytes[1]))
                dist.barrier()
    if world.is_main:
        (directory / "formats.json").write_text(json.dumps(results))


def measure_formats(directory: Path, layers: int, runs: int, ranks: int) -> None:
    """Start the ranks and print the table."""
    configuration(directory, "formats", 10, True).rename(directory / "formats.yaml")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--runs", str(runs), "--layers", str(layers), "--rank-in", str(directory)]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *options],
            env={**os.environ, **{key: str(value) for key, value in {**world, **variables}.items()}},
            stderr=(directory / f"formats.{variables['RANK']}.err").open("w"),
        )
        for variables in ({"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks))
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        errors = "\n".join(path.read_text()[-2000:] for path in sorted(directory.glob("formats.*.err")))
        raise SystemExit(f"a rank failed: exit codes {codes}\n{errors}")
    results = json.loads((directory / "formats.json").read_text())
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in results.items()
    }
    reference = medians[next(iter(FORMATS))]
    size = f"{reference[2] / 1e6:,.0f} MB"
    print(f"\n{ranks} ranks, a checkpoint of {size}; medians of {runs} interleaved runs, ratios to ours")
    heads = ("save [s]", "load [s]", "files [MB]", "peak, save [MB]", "peak, load [MB]")
    print(f"{'':24}{''.join(f'{head:>18}{chr(32):7}' for head in heads)}")
    for name, row in medians.items():
        cells = ""
        for column, (value, ours) in enumerate(zip(row, reference, strict=True)):
            cells += f"{value:>18.2f}" if column < 2 else f"{value / 1e6:>18,.0f}"
            cells += f"{value / ours:>6.1f}x" if ours > (1e6 if column > 2 else 0) else f"{'-':>7}"
        print(f"{name:24}{cells}")


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each (default: 7)")
    parser.add_argument("--layers", type=int, default=16, help="of a GPT of hidden size 512 (default: 16)")
    parser.add_argument("--ranks", type=int, default=2, help="that share an optimizer (default: 2)")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_in:
        measure_rank(options.rank_in, options.layers, options.runs)
        return
    os.environ.update(environment())
    with tempfile.TemporaryDirectory(prefix="slipway-checkpoints-") as name:
        write_tokenizer(Path(name))
        size = measure(Path(name), options.layers, options.runs)
        measure_digests(size, options.runs)
        measure_formats(Path(name), options.layers, options.runs, options.ranks)


if __name__ == "__main__":
    main()
