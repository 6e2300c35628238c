"""The cost of a conversion to Hugging Face's format, next to a plain copy of all weights in memory.

    python benchmarks/perf/conversion.py [--runs N] [--layers N] [--hidden N] [--tensor N]

A GPT-2 of 1.56 billion parameters with random weights in 32 bits, 6.2 GB, is written twice: as a checkpoint
of ours in the chunks of tensor-parallel ranks, and as one file of `torch.save`. Then in turn `python -m
slipway.trainer.conversion export` converts the checkpoint (all its files are held against their checksums
first), and a plain script does `torch.load`, as many transposes, and safetensors' `save_file`. Both have
their output on disk when they end. The floor is `cat` of the checkpoint into a file that is synced. Peak
memory is the kernel's account of each process (its resident set at most). It takes 19 GB of the temporary
directory, and the plain script 13 GB of memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch_latency import Cost, measure  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

if TYPE_CHECKING:
    import torch

# GPT-2's vocabulary, with padding.
PADDED = 50304
# The memory of a conversion beside the largest tensor, for the interpreter and torch, in MB.
BESIDE = 400
FACTOR = 1.3
PLAIN = """
import os, sys
import torch
from safetensors.torch import save_file
weights = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
for name in [name for name in weights if name.endswith(turned)]:
    weights[name] = weights[name].t().contiguous()
save_file(weights, sys.argv[2], metadata={"format": "pt"})
descriptor = os.open(sys.argv[2], os.O_RDONLY)
os.fsync(descriptor)
"""
FLOOR = 'cat "$1"/* > "$2" && sync "$2"'
# Written by a process of its own, which has a layer at a time in memory.
WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
from conversion import write
from pathlib import Path
write(Path(sys.argv[2]), *map(int, sys.argv[3:]))
"""


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (default: 3)")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--tensor", type=int, default=2, help="tensor-parallel size of the checkpoint")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="conversion-") as name:
        directory = Path(name)
        sizes = [str(size) for size in (options.layers, options.hidden, options.tensor)]
        measure([sys.executable, "-c", WRITE, str(Path(__file__).parent), name, *sizes])
        console.print(table(directory, options.runs, options.hidden))


def table(directory: Path, runs: int, hidden: int) -> Table:
    """Run all in turn; return their medians."""
    checkpoint, output = str(next((directory / "checkpoints").glob("m*"))), str(directory / "output")
    commands = {
        "slipway.trainer.conversion": [
            *(sys.executable, "-m", "slipway.trainer.conversion", "export", str(directory / "checkpoints")),
            *("--to", output),
        ],
        "torch.load, save_file": [sys.executable, "-c", PLAIN, str(directory / "plain.pt"), output],
        "cat (floor)": [str(shutil.which("sh")), "-c", FLOOR, "sh", checkpoint, output],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            costs[name].append(measure(command, variables={"OMP_NUM_THREADS": "1"}, cwd=ROOT))
            remove(directory / "output")
    largest = PADDED * hidden * 4 / 1e6
    size = sum(path.stat().st_size for path in (directory / "checkpoints").rglob("*.distcp")) / 1e9
    result = Table(
        title=f"{size:.2f} GB of weights, the largest tensor {largest:.0f} MB; medians of {runs}",
        caption=f"bar for the conversion: {FACTOR} times the largest tensor + {BESIDE} MB = "
        f"{FACTOR * largest + BESIDE:.0f} MB",
    )
    for head in ("", "seconds", "ratio", "CPU [s]", "peak [MB]"):
        result.add_column(head, justify="right" if head else "left")
    base = statistics.median(cost.wall for cost in costs["torch.load, save_file"])
    for name, rows in costs.items():
        wall = statistics.median(cost.wall for cost in rows)
        cpu = statistics.median(cost.cpu for cost in rows)
        # The kernel counts in KiB.
        peak = max(cost.memory for cost in rows) * 1.048576
        result.add_row(name, f"{wall:.1f}", f"{wall / base:.2f}", f"{cpu:.1f}", f"{peak:,.0f}")
    return result


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def write(directory: Path, layers: int, hidden: int, tensor: int) -> None:
    """Write the checkpoint, and the same weights in one file."""
    import torch

    from slipway.trainer.checkpoint import store
    from slipway.trainer.checkpoint.description import description_of_model
    from slipway.trainer.checkpoint.marker import Marker
    from slipway.trainer.checkpoint.tensor_files import TensorFilesWriter
    from slipway.trainer.conversion.families import rows_of

    keys = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": hidden // 64}
    keys |= {"encoder_seq_length": 1024, "max_position_embeddings": 1024, "data.data_impl": "mock"}
    model = description_of_model({f"model.{key}": value for key, value in keys.items()}, PADDED, "fp32")
    checkpoints = directory / "checkpoints"
    unfinished = store.begin(checkpoints, "megatron_gpt--step=1000")
    plain: dict[str, torch.Tensor] = {}
    with TensorFilesWriter(unfinished) as writer:
        for row in rows_of(model):
            assert row.ours is not None
            shape = (PADDED, *row.shape[1:]) if row.is_padded else row.shape
            weight = torch.empty(shape).normal_(std=0.02)
            plain[row.theirs[0]] = weight[: row.shape[0]].clone() if row.is_padded else weight
            if row.layer is not None:
                weight, shape = weight[None], (layers, *shape)
            for offset, chunk in chunks(weight, tensor, row.layer or 0, is_stacked=row.layer is not None):
                writer.add(row.ours, chunk, shape, offset)
        writer.finish({"step": 1000}, b"{}")
    torch.save(plain, directory / "plain.pt")
    marker = Marker(
        step=1000,
        consumed_samples=1000,
        world_size=tensor,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=1,
        architecture={},
        files=store.sync_part(unfinished, 0),
        checksums=store.checksum_part(unfinished, 0),
        model=model.to_json(),
    )
    store.finish(unfinished, "megatron_gpt--step=1000", marker)


def chunks(
    weight: torch.Tensor, parts: int, layer: int, is_stacked: bool
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the chunks of matrices as tensor-parallel ranks have them, by rows; vectors are whole."""
    axis = int(is_stacked)
    first = (layer,) if is_stacked else ()
    count = parts if weight.dim() - axis == 2 and weight.shape[axis] % parts == 0 else 1
    step = weight.shape[axis] // count
    for number in range(count):
        rest = (0,) * (weight.dim() - axis - 1)
        yield (*first, number * step, *rest), weight.narrow(axis, number * step, step)


if __name__ == "__main__":
    main()
