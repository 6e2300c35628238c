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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slipway.trainer.logs import silence_warnings

silence_warnings()

import torch  # noqa: E402

from slipway.arithmetic.parameters import padded_vocabulary  # noqa: E402
from slipway.trainer import cpu_shim  # noqa: E402
from slipway.trainer.config.layout import make_layout  # noqa: E402
from slipway.trainer.config.settings import Settings, read_settings  # noqa: E402
from slipway.trainer.world import World  # noqa: E402

Batches = list[tuple[Any, Any]]
Step = Callable[[], float]


class Cost(NamedTuple):
    """Seconds of one step, and those of CPU time, which other processes on the machine change less."""

    wall: float
    cpu: float


# Four layers: a step of half a second on two cores.
SMALL = {"layers": 4, "hidden": 256, "heads": 8, "length": 256, "micro_batch": 4, "micro_batches": 2}
GPT3_1_3B = {"layers": 24, "hidden": 2048, "heads": 16, "length": 2048, "micro_batch": 4, "micro_batches": 4}
# The ratios leave it out: it has no fp32 weights that keep small updates.
NO_PEER = "(GPT by hand, bf16 weights)"
VOCABULARIES = {"cpu": 8192, "cuda": 50304}


def settings_of(shape: Any, precision: str, backend: str, directory: str) -> Settings:
    """Return the shape in NeMo's words."""
    return read_settings(
        {
            "trainer.max_steps": 1000,
            "trainer.gradient_clip_val": 1.0,
            "trainer.precision": "bf16" if precision == "bf16" else 32,
            "exp_manager.explicit_log_dir": directory,
            "model.micro_batch_size": shape.micro_batch,
            "model.global_batch_size": shape.micro_batch * shape.micro_batches,
            "model.encoder_seq_length": shape.length,
            "model.num_layers": shape.layers,
            "model.hidden_size": shape.hidden,
            "model.num_attention_heads": shape.heads,
            "model.hidden_dropout": 0.0,
            "model.attention_dropout": 0.0,
            "model.attention_backend": backend,
            "model.megatron_amp_O2": precision == "bf16",
            "model.transformer_engine": True,
            "model.make_vocab_size_divisible_by": 128,
            "model.override_vocab_size": shape.vocabulary,
            "model.optim.name": "mcore_distributed_optim",
            "model.optim.lr": 1e-4,
            "model.optim.weight_decay": 0.1,
            "model.optim.betas": [0.9, 0.95],
            "model.data.data_impl": "mock",
        }
    )


def our_step(settings: Settings, rank_context: Any, shape: Any, batches: list[Any]) -> tuple[Step, int]:
    """Return our step, and how many parameters it trains."""
    from slipway.trainer.loop.step import StepReduction, train_losses
    from slipway.trainer.model.build import build_model
    from slipway.trainer.model.model import parameter_count
    from slipway.trainer.optim.build import Optimizer

    padded = padded_vocabulary(shape.vocabulary, settings.architecture.vocab_divisor, 1)
    model = build_model(settings, rank_context, padded)
    optimizer = Optimizer(settings, model, rank_context.device)

    def step() -> float:
        reduction = StepReduction(train_losses(settings, model, iter(batches), shape.micro_batches))
        optimizer.step(1e-4)
        return reduction.read()[0]

    return step, parameter_count(model)


def peer_steps(shape: Any, device: Any, precision: str, batches: list[Any]) -> dict[str, tuple[Step, int]]:
    """Return the steps of the peers."""
    from plain_gpt import HuggingFaceGPT, Peer, PlainGPT

    pairs: Batches = [(batch.tokens, batch.labels) for batch in batches]
    in_bf16 = precision == "bf16"
    models = {
        "GPT by hand": Peer(PlainGPT(shape), device, in_bf16),
        "Hugging Face GPT-2": Peer(HuggingFaceGPT(shape), device, in_bf16),
    }
    if in_bf16:
        models[NO_PEER] = Peer(PlainGPT(shape), device, False, torch.bfloat16)
    return {name: ((lambda peer=peer: peer(pairs)), peer.parameters) for name, peer in models.items()}  # type: ignore[misc]


def micro_batches(settings: Settings, rank_context: Any) -> list[Any]:
    """Make the tokens of a step, once."""
    from slipway.trainer.data.prefetch import move_to_device
    from slipway.trainer.data.source import MockSource
    from slipway.trainer.loop.batch_building import make_batch_builder, vocabulary_of

    vocabulary = vocabulary_of(settings)
    source = MockSource(settings.seq_length, vocabulary.size, settings.seed)
    windows: list[int | None] = list(range(settings.global_batch))
    batch_builder = make_batch_builder(settings, rank_context, vocabulary)
    return [move_to_device(batch, rank_context.device) for batch in batch_builder.batches(source, windows)]


def measure(steps: dict[str, Step], turns: int, count: int, device: Any) -> dict[str, list[Cost]]:
    """Return the costs of a step of each program, one for each turn."""
    costs: dict[str, list[Cost]] = {name: [] for name in steps}
    for name, step in steps.items():
        first, last = step(), step()
        if not last < first:
            raise SystemExit(f"{name} does not learn: {first:.4f}, then {last:.4f}")
    for _ in range(turns):
        for name, step in steps.items():
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            wall = time.perf_counter() - start
            costs[name].append(Cost(wall / count, (time.process_time() - cpu) / count))
    return costs


def report(shape: Any, settings: Settings, costs: dict[str, list[Cost]], device: Any) -> None:
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


def compare(rank_context: Any, shape: Any, precision: str, arguments: argparse.Namespace) -> None:
    """Measure one shape in one precision."""
    with tempfile.TemporaryDirectory() as directory:
        backends = ("transformer_engine", "sdpa") if _has_engine(rank_context.device) else ("sdpa", "local")
        all_settings = {name: settings_of(shape, precision, name, directory) for name in backends}
    settings = all_settings[backends[0]]
    batches = micro_batches(settings, rank_context)
    programs = {
        f"ours, {name} attention": our_step(variant, rank_context, shape, batches)
        for name, variant in all_settings.items()
    } | peer_steps(shape, rank_context.device, precision, batches)
    counts = {count for _, count in programs.values()}
    if len(counts) != 1:
        raise SystemExit(f"the models differ in size: {counts}")
    print(f"\n{precision}: {shape}: {counts.pop():,} parameters")
    steps = {name: step for name, (step, _) in programs.items()}
    report(
        shape,
        settings,
        measure(steps, arguments.turns, arguments.steps, rank_context.device),
        rank_context.device,
    )


def _has_engine(device: Any) -> bool:
    import importlib.util

    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


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
    import transformers
    from plain_gpt import Shape

    from slipway.trainer.distributed import make_rank_context, process_group

    with process_group(World.from_environment({"MASTER_PORT": str(_free_port())}), "auto") as device:
        shape = Shape(**(GPT3_1_3B if device.type == "cuda" else SMALL), vocabulary=VOCABULARIES[device.type])
        with tempfile.TemporaryDirectory() as directory:
            layout = make_layout(settings_of(shape, "fp32", "auto", directory), 1)
        rank_context = make_rank_context(World.from_environment({}), layout, device)
        name = (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"{torch.get_num_threads()} CPU threads"
        )
        print(
            f"torch {torch.__version__}, megatron-core {megatron.core.__version__}, transformers "
            f"{transformers.__version__}, {name}; medians of {arguments.turns} interleaved turns of "
            f"{arguments.steps} steps"
        )
        precisions = ("bf16",) if device.type == "cuda" else ("fp32", "bf16")
        for precision in (arguments.precision,) if arguments.precision else precisions:
            compare(rank_context, shape, precision, arguments)
    print(
        "\nratio: of the medians to the best peer's, above 1 is faster; of CPU seconds on a shared machine."
    )
    print("Aim: 1 on a CPU; on a GPU 0.9, with 45 % of its peak (MFU).")


def _free_port() -> int:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
