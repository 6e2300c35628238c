"""Tokens per second of our step next to a GPT-2 by hand and Hugging Face's, of the same shape.

    python benchmarks/perf/train_step.py [--turns N] [--steps N] [--threads N] [--precision fp32|bf16]

Ours is the trainer's own step: its model, its losses through megatron-core's schedule, its optimizer. All
take turns, some steps at a time, on the same tokens, which are made beforehand; quote the ratios of the
medians. On CUDA the shape is that of GPT-3's 1.3 billion parameters, and the table has the share of
the GPU's peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slipway.trainer.logs import silence_warnings

silence_warnings()

import torch  # noqa: E402
from plain_gpt import HuggingFaceGPT, Peer, PlainGPT  # noqa: E402
from programs import (  # noqa: E402
    Program,
    Shape,
    check_learning,
    check_sizes,
    free_port,
    keys_of,
    micro_batches,
    our_program,
    peer_program,
)

from benchmarks.measuring import Cost, synchronizer, take_turns  # noqa: E402
from slipway.trainer import cpu_shim, requirements  # noqa: E402
from slipway.trainer.config.layout import make_layout  # noqa: E402
from slipway.trainer.config.settings import Settings, read_settings  # noqa: E402
from slipway.trainer.world import World  # noqa: E402

# Four layers: a step of half a second on two cores.
SMALL = Shape(layers=4, hidden=256, heads=8, length=256, vocabulary=8192, micro_batch=4, micro_batches=2)
GPT3_1_3B = Shape(
    layers=24, hidden=2048, heads=16, length=2048, vocabulary=50304, micro_batch=4, micro_batches=4
)
# The ratios leave it out: it has no fp32 weights that keep small updates.
NO_PEER = "(GPT by hand, bf16 weights)"


def settings_of(shape: Shape, precision: str, backend: str, directory: str) -> Settings:
    """Return the trainer's settings of a shape with a kind of attention."""
    keys = keys_of(shape, precision, directory)
    keys["model.transformer_engine"] = backend == "transformer_engine"
    return read_settings({**keys, "model.attention_backend": backend})


def peer_programs(shape: Shape, device: Any, precision: str, batches: list[Any]) -> dict[str, Program]:
    """Build the peers."""
    in_bf16 = precision == "bf16"
    compiler = torch.compile if device.type == "cuda" else None
    models = {"GPT by hand": Peer(PlainGPT(shape), device, in_bf16, compiler)}
    if requirements.version("transformers"):
        models["Hugging Face GPT-2"] = Peer(HuggingFaceGPT(shape), device, in_bf16)
    if in_bf16:
        models[NO_PEER] = Peer(PlainGPT(shape), device, False, compiler, torch.bfloat16)
    return {name: peer_program(peer, batches) for name, peer in models.items()}


def report(shape: Shape, settings: Settings, costs: dict[str, list[Cost]], device: Any) -> None:
    """Print the table."""
    from slipway.trainer.report.flops import device_peak, model_flops

    flops = model_flops(settings.architecture, shape.vocabulary) * settings.global_batch
    peak = device_peak(torch.cuda.get_device_name(), settings.precision) if device.type == "cuda" else None
    walls = {name: statistics.median(cost.wall for cost in runs) for name, runs in costs.items()}
    cpus = {name: statistics.median(cost.cpu for cost in runs) for name, runs in costs.items()}
    peer_names = [name for name in walls if not name.startswith("ours") and name != NO_PEER]
    best, least = min(walls[name] for name in peer_names), min(cpus[name] for name in peer_names)
    heads = f"{'tokens/s':>10}{'ratio':>7}{'s/step':>8}{'min-max':>15}{'CPU s':>8}{'ratio':>7}"
    print(f"{'':28}{heads}{'TFLOP/s':>9}{'MFU':>7}")
    for name, wall in walls.items():
        spread = f"{min(cost.wall for cost in costs[name]):.3f}-{max(cost.wall for cost in costs[name]):.3f}"
        utilization = f"{flops / wall / peak:.1%}" if peak else "-"
        wall_cells = f"{shape.tokens / wall:>10,.0f}{best / wall:>7.2f}{wall:>8.3f}{spread:>15}"
        cpu_cells = f"{cpus[name]:>8.3f}{least / cpus[name]:>7.2f}"
        print(f"{name:28}{wall_cells}{cpu_cells}{flops / wall / 1e12:>9.3f}{utilization:>7}")


def compare(rank_context: Any, shape: Shape, precision: str, arguments: argparse.Namespace) -> None:
    """Measure one shape in one precision."""
    device = rank_context.device
    with tempfile.TemporaryDirectory() as directory:
        all_settings = {name: settings_of(shape, precision, name, directory) for name in _backends(device)}
    settings = next(iter(all_settings.values()))
    batches = micro_batches(settings, rank_context)
    programs = {
        f"ours, {name} attention": our_program(variant, rank_context, batches)
        for name, variant in all_settings.items()
    } | peer_programs(shape, device, precision, batches)
    print(f"\n{precision}: {shape}: {check_sizes(programs):,} parameters")
    steps = {name: program.step for name, program in programs.items()}
    for name, step in steps.items():
        check_learning(name, [float(step()) for _ in range(2)])
    counts = dict.fromkeys(steps, arguments.steps)
    report(shape, settings, take_turns(steps, arguments.turns, counts, synchronizer(device)), device)


def _backends(device: Any) -> tuple[str, ...]:
    from slipway.trainer.model.backends import transformer_engine_problem

    if device.type == "cpu":
        return "sdpa", "local"
    return ("sdpa",) if transformer_engine_problem() else ("transformer_engine", "sdpa")


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--turns", type=int, default=9, help="turns of each (default: 9)")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn (default: 3)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: both, on CUDA bf16 alone")
    arguments = parser.parse_args()
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    cpu_shim.install()

    import megatron.core

    from slipway.trainer.distributed import make_rank_context, process_group

    with process_group(World.from_environment({"MASTER_PORT": str(free_port())}), "auto") as device:
        shape = GPT3_1_3B if device.type == "cuda" else SMALL
        with tempfile.TemporaryDirectory() as directory:
            layout = make_layout(settings_of(shape, "fp32", "auto", directory), 1)
        rank_context = make_rank_context(World.from_environment({}), layout, device)
        name = (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"{torch.get_num_threads()} CPU threads"
        )
        transformers = requirements.version("transformers") or "not installed"
        print(
            f"torch {torch.__version__}, megatron-core {megatron.core.__version__}, transformers "
            f"{transformers}, {name}; medians of {arguments.turns} interleaved turns of "
            f"{arguments.steps} steps"
        )
        precisions = ("bf16",) if device.type == "cuda" else ("fp32", "bf16")
        for precision in (arguments.precision,) if arguments.precision else precisions:
            compare(rank_context, shape, precision, arguments)
    print(
        "\nratio: of the medians to the best peer's, above 1 is faster; of CPU seconds on a shared machine."
    )
    print("Aim: 1 on a CPU; on a GPU 0.9, with 45 % of its peak (MFU).")


if __name__ == "__main__":
    main()
