"""One process of `gpu_step.py`: ``gpu_case.py DIR`` reads DIR/case.json, and writes DIR/result.json."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from programs import (
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

from benchmarks.measuring import Profile, Speed, profile_host, profile_step, speed, synchronizer, take_turns
from slipway.trainer.config.keys import KEYS
from slipway.trainer.config.settings import Settings, read_settings

BY_HAND = "by hand"
# Ours, by what each changes of the trainer's defaults.
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, compile_layers=False": {"model.compile_layers": False},
}
_WARM_STEPS, _TURNS = 6, 5


@dataclass(frozen=True)
class Measurement:
    """The measurement of one program: its speed, its kernels, and the losses of its first steps.

    `start_seconds` is the time until those steps are done, with compiling; `busy` the part of a step in which
    a kernel of the GPU runs; `peak_bytes` the most that the program's tensors take there; `host` what
    `profile_host` returns.
    """

    parameters: int
    losses: list[float]
    start_seconds: float
    speed: Speed
    busy: float | None
    peak_bytes: int | None
    profile: Profile
    host: list[tuple[str, float, float]]


def main() -> None:
    """Measure the programs of a case in turn, and write their rows."""
    directory = Path(sys.argv[1])
    case = json.loads((directory / "case.json").read_text())
    shape, programs = Shape(**case["shape"]), [name for name in case["programs"] if _is_known(name)]
    accelerator = {"trainer.accelerator": "cpu" if case["on_cpu"] else "gpu"}
    settings = {
        name: read_settings({**keys_of(shape, "bf16", str(directory)), **accelerator, **OURS.get(name, {})})
        for name in programs
    }
    from slipway.trainer import device as devices
    from slipway.trainer.logs import silence_warnings
    from slipway.trainer.world import World

    silence_warnings()
    world = World.from_environment({"MASTER_PORT": str(free_port())})
    # As a training, before torch is imported. Some of the trainers that this program measures take no world.
    values = {"settings": settings[programs[0]], "world": world, "environment": os.environ}
    prepare = devices.prepare_environment
    prepare(**{name: values[name] for name in inspect.signature(prepare).parameters})
    import torch

    compiler = torch.compile
    from slipway.trainer import cpu_shim

    # On a CPU it takes torch.compile away.
    on_cpu = cpu_shim.install()
    from slipway.trainer.config.layout import make_layout
    from slipway.trainer.distributed import make_rank_context, process_group

    with process_group(world, settings[programs[0]].accelerator) as device:
        rank_context = make_rank_context(world, make_layout(settings[programs[0]], 1), device)
        builders = _builders(shape, settings, rank_context, None if on_cpu else compiler)
        at_peak = _seconds_at_peak(shape, settings[programs[0]], device)
        rows = _measure(builders, shape.tokens, at_peak, device, case["turn_seconds"])
    (directory / "result.json").write_text(json.dumps({name: asdict(row) for name, row in rows.items()}))


def _is_known(program: str) -> bool:
    """Return whether this trainer has the keys of a program."""
    return all(key in KEYS for key in OURS.get(program, {}))


def _builders(
    shape: Shape, settings: Mapping[str, Settings], rank_context: Any, compiler: Any
) -> dict[str, Callable[[], Program]]:
    from plain_gpt import Peer, PlainGPT

    batches = micro_batches(next(iter(settings.values())), rank_context)

    def build_peer() -> Program:
        return peer_program(Peer(PlainGPT(shape), rank_context.device, True, compiler), batches)

    ours = {name: partial(our_program, own, rank_context, batches) for name, own in settings.items()}
    return {name: build_peer if name == BY_HAND else build for name, build in ours.items()}


def _seconds_at_peak(shape: Shape, settings: Settings, device: Any) -> tuple[float, float] | None:
    """Return the seconds of a step at the GPU's peak, with attention counted in full and causal."""
    import torch

    from slipway.trainer.report.flops import device_peak, model_flops

    if device.type == "cpu":
        return None
    peak = device_peak(torch.cuda.get_device_name(), "bf16")
    counts = (model_flops(settings.architecture, shape.vocabulary, causal=causal) for causal in (False, True))
    full, causal = (flops * settings.global_batch for flops in counts)
    return (full / peak, causal / peak) if peak else None


def _measure(
    builders: Mapping[str, Callable[[], Program]],
    tokens: int,
    at_peak: tuple[float, float] | None,
    device: Any,
    turn_seconds: float,
) -> dict[str, Measurement]:
    """Build and warm up all programs, let them take turns, and profile a step of each."""
    synchronize = synchronizer(device)
    programs: dict[str, Program] = {}
    starts: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    for name, build in builders.items():
        begin, held = time.perf_counter(), _restart_peak(device)
        programs[name] = build()
        losses = [float(programs[name].step()) for _ in range(_WARM_STEPS)]
        check_learning(name, losses)
        synchronize()
        start_seconds = time.perf_counter() - begin
        starts[name] = {"losses": losses, "start_seconds": start_seconds, "peak_bytes": _peak(device, held)}
        begin = time.perf_counter()
        programs[name].step()
        synchronize()
        counts[name] = max(2, round(turn_seconds / (time.perf_counter() - begin)))
    parameters = check_sizes(programs)
    steps = {name: program.step for name, program in programs.items()}
    costs = take_turns(steps, _TURNS, counts, synchronize)
    rows = {}
    for name, step in steps.items():
        pace = speed([cost.wall for cost in costs[name]], tokens, at_peak)
        profile = profile_step(step, device)
        rows[name] = Measurement(
            parameters=parameters,
            speed=pace,
            # A CPU's operators take longer while they are profiled.
            busy=profile.busy_seconds / pace.step_seconds if device.type == "cuda" else None,
            profile=profile,
            host=profile_host(step),
            **starts[name],
        )
    return rows


def _restart_peak(device: Any) -> int:
    """Begin to count the peak of a GPU anew; return the bytes that tensors take now."""
    import torch

    if device.type == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _peak(device: Any, held: int) -> int | None:
    import torch

    return None if device.type == "cpu" else int(torch.cuda.max_memory_allocated()) - held


if __name__ == "__main__":
    main()
