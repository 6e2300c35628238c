"""The preparations for a CUDA device, without one; run by test_gpu_readiness.py from a warm process."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from slipway.common.errors import UserError
from slipway.trainer import cpu_shim, device
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.parallel import Timeouts
from slipway.trainer.config.settings import read_settings
from slipway.trainer.distributed import make_rank_context, process_group, shorten_timeouts
from slipway.trainer.world import World

CUDA = torch.device("cuda", 0)


def main(arguments: list[str]) -> int:
    cpu_shim.install()
    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    result: dict[str, Any] = {"engine": broken_engine(Path(arguments[2]))}
    with process_group(World.from_environment({"MASTER_PORT": arguments[1]}), "auto") as cpu:
        rank_context = make_rank_context(World.from_environment({}), make_layout(read_settings(base), 1), cpu)
        result["generators"] = generators_that_differ(rank_context)
        shorten_timeouts(Timeouts(30, 7))
        backends = [group._get_backend(cpu) for group in dist.distributed_c10d._world.pg_map]
        result["timeouts"] = [backend.options._timeout.total_seconds() for backend in backends]
    result["devices"] = devices()
    result["claims"] = [answer_of(compare, *case) for case in (("cpu", ""), ("cuda", "A"), ("cuda", "B"))]
    print(json.dumps(result))
    return 0


def devices() -> dict[str, str]:
    """Return the chosen device, or the error, for each accelerator and number of visible GPUs."""
    torch.version.cuda = "13.0"
    choices = {}
    for accelerator in ("gpu", "auto", "cpu"):
        with gpus(0):
            choices[f"{accelerator} 0"] = answer_of(device.choose_device, world(0, 2), accelerator)
    with gpus(0):
        for driver in (None, "NVRM version: 535.0"):
            device.driver_version = lambda driver=driver: driver
            try:
                device.choose_device(world(0, 2), "gpu")
            except UserError as error:
                choices[f"told by, driver {driver}"] = error.found_by
    for visible, rank, tasks in ((1, 3, 8), (8, 3, 8), (4, 3, 8)):
        with gpus(visible):
            choices[f"gpu {visible} of {tasks}"] = answer_of(device.choose_device, world(rank, tasks), "gpu")
    return choices


@contextmanager
def gpus(count: int) -> Iterator[None]:
    """Stand in for the driver, which is the outermost edge."""
    cuda, originals = torch.cuda, (torch.cuda.is_available, torch.cuda.device_count, torch.cuda.init)

    def is_available() -> bool:
        if not count:
            warnings.warn("CUDA initialization: an old driver", stacklevel=2)
        return count > 0

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12020)")

    cuda.is_available, cuda.device_count, cuda.init = is_available, lambda: count, init
    try:
        yield
    finally:
        cuda.is_available, cuda.device_count, cuda.init = originals


def world(rank: int, tasks: int) -> World:
    names = {"RANK": rank, "WORLD_SIZE": tasks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": tasks}
    return World.from_environment({name: str(value) for name, value in names.items()})


def answer_of(function: Any, *arguments: Any) -> str:
    try:
        return str(function(*arguments))
    except UserError as error:
        return str(error)


def compare(kind: str, gpu: str) -> None:
    """Let rank 1 join rank 0, which has GPU A of the same host."""
    store, first = dist.HashStore(), {"A": "A", "B": "A"}.get(gpu, "A")
    device._identity = lambda _: first
    device.compare_devices(store, world(0, 2), CUDA)
    device._identity = lambda _: gpu
    device.compare_devices(store, world(1, 2), torch.device(kind))


def broken_engine(directory: Path) -> dict[str, Any]:
    """Return the problem of a Transformer Engine whose library does not load, and if it is used."""
    from slipway.trainer.model import backends

    package = directory / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("raise OSError('libcudnn.so.9: cannot open\\nshared object file')")
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    backends.transformer_engine_problem.cache_clear()
    problem = backends.transformer_engine_problem()
    sys.path.remove(str(directory))
    shape = type("Shape", (), {"transformer_engine": True})
    return {"problem": problem, "used": backends.uses_transformer_engine(shape, CUDA)}


def generators_that_differ(rank_context: Any) -> dict[str, Any]:
    """Return the warning when this rank drew more than the first, and if it gets the first's state."""
    from slipway.trainer.checkpoint import rng_state
    from slipway.trainer.logs import LOGGER

    messages: list[str] = []
    originals, warning, first = (
        (dist.all_gather_object, dist.broadcast_object_list),
        LOGGER.warning,
        rng_state._states(),
    )

    def gather(digests: list[str], digest: str, group: Any = None) -> None:
        originals[0](digests, digest, group=group)
        digests.append(rng_state._digest(first))

    def broadcast(received: list[Any], src: int, group: Any) -> None:
        received[0] = first

    LOGGER.warning = lambda text, *values: messages.append(text % values)
    rng_state.make_equal(rank_context)
    silent = not messages
    torch.rand(1)
    dist.all_gather_object, dist.broadcast_object_list = gather, broadcast
    rng_state.make_equal(rank_context)
    (dist.all_gather_object, dist.broadcast_object_list), LOGGER.warning = originals, warning
    took_first = torch.equal(first["cpu"], torch.get_rng_state())
    # A GPU's state is a seed and an offset.
    states = (rng_state._states(), {"device": torch.zeros(16, dtype=torch.uint8)})
    return {
        "silent": silent,
        "said": messages,
        "kept": took_first,
        "fit": [rng_state.fits(state) for state in states],
    }
