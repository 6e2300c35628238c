"""The cost of checksums in a save and a load, next to the same without them.

    python benchmarks/perf/checkpoints.py [--runs N] [--layers N]

One process holds a GPT and an Adam optimizer with its states. It saves and loads checkpoints with the
trainer's own functions, with checksums and without, in turn, so that a noisy machine slows both; a save is
timed until its files are on disk and it has its name, in the training's own thread. Quote the ratios of the
medians. The files of a load are in the page cache, where its ratio is highest. The second table is how fast
the standard library's checksums are, over as many bytes in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import shutil
import statistics
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
    from trainer.checkpoint import reader, store

    before: tuple[Any, Any] = store.checksum_part, reader.verify
    if not is_on:
        store.checksum_part = lambda *_: {}
        reader.verify = lambda *_: None
    try:
        yield
    finally:
        store.checksum_part, reader.verify = before


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and the CPU seconds of an action."""
    began, used = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - used


def measure(directory: Path, layers: int, runs: int) -> int:
    """Save and load in turn, print the table and return the bytes of a checkpoint."""
    from trainer import cpu_shim
    from trainer.config.layout import make_layout
    from trainer.config.load import flatten, load_config
    from trainer.config.settings import read_settings
    from trainer.world import World

    config = configuration(directory, "writer", 10, True)
    flat = flatten(load_config(config.parent, config.name))
    larger = {"num_layers": layers, "hidden_size": HIDDEN, "num_attention_heads": 8, "data.data_impl": "mock"}
    settings = read_settings({**flat, **{f"model.{key}": value for key, value in larger.items()}})
    settings.output.log_dir.mkdir(parents=True)
    cpu_shim.install()
    from trainer.checkpoint import state, store
    from trainer.distributed import make_rank_context, process_group
    from trainer.loop.saving import Saver
    from trainer.loop.session import _choose, open_session

    costs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    world = World.from_environment(os.environ)
    with process_group(world) as device:
        session = open_session(settings, make_rank_context(world, make_layout(settings, 1), device))
        session.model.zero_grad_buffer()
        session.optimizer.step(0.0)
        session.progress = state.Progress(1, 8)

        def load() -> None:
            choice = _choose(session)
            assert choice
            state.restore(
                choice, session.model, session.optimizer.inner, session.rank_context, session.settings.seed
            )

        for run in range(runs + 1):
            for name in (WITH, WITHOUT) if run % 2 else (WITHOUT, WITH):
                where = directory / f"{run} {name}"
                saving = dataclasses.replace(settings.saving, directory=where)
                session.settings = dataclasses.replace(settings, saving=saving)
                with checksums(name == WITH):
                    saved = timed(lambda: Saver(session).end(0.0, None))
                    loaded = timed(load)
                (found,) = store.complete(where)
                size = sum(found.marker.files.values())
                assert bool(found.marker.checksums) == (name == WITH)
                shutil.rmtree(where)
                if run:
                    # The first of all warms the page cache and the allocator.
                    costs.setdefault(("save", name), []).append(saved)
                    costs.setdefault(("load", name), []).append(loaded)
    print(f"checkpoint of {size / 1e6:,.0f} MB; medians of {runs} interleaved runs")
    print(f"{'':24}{'wall [s]':>10}{'min-max':>14}{'ratio':>8}{'CPU [s]':>10}{'ratio':>8}")
    for (what, name), rows in sorted(costs.items(), key=lambda item: (item[0][0], item[0][1] == WITH)):
        walls, used = zip(*rows, strict=True)
        floor = [statistics.median(column) for column in zip(*costs[what, WITHOUT], strict=True)]
        wall, cpu = statistics.median(walls), statistics.median(used)
        print(
            f"{what + ', ' + name:24}{wall:>10.3f}{f'{min(walls):.3f}-{max(walls):.3f}':>14}"
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
        seconds = statistics.median(timed(lambda digest=digest: digest(content))[0] for _ in range(runs))
        print(f"{name:24}{len(content) / seconds / 1e9:>10.2f}")


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each (default: 7)")
    parser.add_argument("--layers", type=int, default=16, help="of a GPT of hidden size 512 (default: 16)")
    options = parser.parse_args()
    os.environ.update(environment())
    with tempfile.TemporaryDirectory(prefix="slipway-checkpoints-") as name:
        write_tokenizer(Path(name))
        size = measure(Path(name), options.layers, options.runs)
    measure_digests(size, options.runs)


if __name__ == "__main__":
    main()
