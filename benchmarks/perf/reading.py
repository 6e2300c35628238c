"""What the verbs that read cost on a run of a million steps and on a tree of a thousand runs.

    python benchmarks/perf/reading.py [--steps N] [--log-megabytes N] [--jobs N] [--runs N]

The long run has 395 bytes of metrics a step, as our trainer writes them, a resume at three quarters of it that
repeats 1,000 steps, and a log of a gigabyte without an error in it; 1.5 GB of the temporary directory. It has
ended. The floors read the same files and do nothing with them but what any reader must.

The tree is of real jobs that wait on a throw-away Slurm, each with a short metrics file; a fifth of the jobs
has ended. `cancel` ends what waits, next to one `scancel` of as many ids.

The commands run in turn, so that a noisy machine slows all of them; quote ratios of medians. CPU seconds and
peak memory are the kernel's own account of each process and its children.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launch_latency import Cost, measure
from rich.console import Console
from rich.table import Table

from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.provenance import host, now, user

SLIPWAY = str(Path(sys.executable).with_name("slipway"))
RUN = "gpt3_126m"
_REPEATED = 1000


def steps_of(first: int, last: int, begun: float) -> Iterator[str]:
    """The lines of an attempt, from the step after `first` on."""
    start = {
        "kind": "start",
        "time": begun,
        "step": first,
        "max_steps": last,
        "consumed_samples": 256 * first,
    }
    sizes = {"world_size": 8, "tensor": 2, "pipeline": 1, "virtual": 1, "context": 1, "data": 4}
    work = {"parameters": 126_000_000, "tokens_per_step": 524288, "model_flops_per_sample": 1.7e12}
    yield json.dumps({**start, **sizes, **work, "peak_flops_per_gpu": 989e12, "resumed_from": None})
    held_out = {"kind": "data", "time": begun, "split": "validation", "tokens": 512000}
    yield json.dumps({**held_out, "unigram_entropy": 7.3196558035786525, "has_sentinels": False})
    noise = random.Random(first)
    for step in range(first + 1, last + 1):
        now, seconds = begun + (step - first) * 0.51234, 0.5 + noise.random() / 10
        speed, loss = 524288 / seconds, 2.3 + 8.0 / (1 + step / 500) + noise.gauss(0, 0.05)
        yield json.dumps(
            {
                "kind": "train",
                "time": now,
                "step": step,
                "loss": loss,
                "lr": 0.0003 * (1 - step / last / 1.1),
                "grad_norm": 1.0 + noise.random(),
                "consumed_samples": step * 256,
                "global_batch": 256,
                "tokens": 524288,
                "step_time": seconds,
                "tokens_per_second": speed,
                "tflops_per_gpu": speed / 3000,
                "mfu": speed / 3e6,
                "data_wait": noise.random() / 1e3,
                "memory_bytes": 40_301_735_936,
            }
        )
        if step % 2000 == 0:
            yield json.dumps({"kind": "validation", "time": now, "step": step, "val_loss": loss + 0.1})
    if last == start["max_steps"]:
        yield json.dumps({"kind": "end", "time": begun + (last - first), "step": last, "reason": "max_steps"})


def long_run(base: Path, steps: int, log_bytes: int) -> Path:
    """Leave the run as a launcher, a job's script and a trainer do; return its launch directory."""
    directory = base / RUN / "launches" / "1"
    (directory / "results").mkdir(parents=True)
    (directory / "marks").mkdir()
    ended, torn = time.time(), steps * 3 // 4
    attempts = itertools.chain(
        itertools.takewhile(lambda line: f'"step": {torn + 1},' not in line, steps_of(0, steps, ended - 9e5)),
        steps_of(max(torn - _REPEATED, 0), steps, ended - 4e5),
    )
    with (directory / "results" / "metrics.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in attempts)
    manifest = Manifest(
        run=RUN,
        launch=1,
        tag="20261121-000000-abcdef",
        stage="training",
        engine="megatron",
        scheduler="local",
        job_name="train",
        nodes=1,
        tasks_per_node=8,
        time_limit="1-00:00:00",
        command=["slipway", "launch"],
        overrides=["training=gpt3/126m", "cluster=local"],
        choices={"training": "gpt3/126m"},
        created=now(),
        version="0",
        user=user(),
        host=host(),
        job_id="17",
    )
    write_manifest(directory, manifest)
    for name, told in (
        ("started", {"started": ended - 9e5, "nodes": "n1"}),
        ("ended", {"ended": ended, "exit_code": 0}),
    ):
        (directory / "marks" / f"17.0.{name}.json").write_text(json.dumps({"job_id": "17", **told}))
    write_log(directory / "log-train_17.out", log_bytes)
    return directory


def write_log(path: Path, size: int) -> None:
    """Write lines as a trainer's rank 0 logs its steps, until there are so many bytes."""
    line = "[2026-11-22 19:20:58] INFO step {:>8} | loss 2.3456 | lr 2.999e-04 | grad norm 1.234 | 1.02 M tokens/s\n"
    block = "".join(line.format(step) for step in range(10_000)).encode()
    with path.open("wb") as stream:
        for _ in range(max(size // len(block), 1)):
            stream.write(block)
