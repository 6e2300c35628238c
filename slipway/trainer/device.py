"""The device of this process: which it is, and what libraries read from the environment at their start."""

from __future__ import annotations

import os
import resource
import socket
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.config.settings import Settings
from slipway.trainer.world import World

_DRIVER = Path("/proc/driver/nvidia/version")
_EXPECTED = "expected a CUDA device that torch can use; to train on the CPU: training.trainer.accelerator=cpu"
# Megatron-LM 0.16 (arguments.py, `deterministic_mode`) asks for these; cuBLAS needs the second in any case.
_DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}


def prepare_environment(settings: Settings, world: World, environment: MutableMapping[str, str]) -> None:
    """Set the variables that libraries read once, where the job has not set them."""
    if settings.accelerator != "cpu" or settings.compile_layers == "True":
        _prepare_compiler(settings, world, environment)
    if settings.accelerator in ("cpu", "auto"):
        # A thread that waits for another sleeps, and leaves the core to it: ranks that share cores, with each
        # other or with other programs, otherwise spend most of their time in OpenMP's busy waiting.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if settings.accelerator == "cpu":
        # CUDA, and all that asks for it, is then not there: torch reads this when it first looks for devices.
        environment["CUDA_VISIBLE_DEVICES"] = ""
        return
    if not environment.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        # Segments grow in place of many that nothing fits into. Only NCCL's user buffers forbid them, which
        # this trainer does not have.
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if settings.parallel.tensor > 1 or settings.parallel.context > 1:
        # One queue to the GPU, so that communication starts before the computation that it hides behind.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if settings.deterministic:
        for name, value in _DETERMINISTIC.items():
            environment.setdefault(name, value)


def _prepare_compiler(settings: Settings, world: World, environment: MutableMapping[str, str]) -> None:
    """Keep compiled kernels with the run, so that a later launch in a fresh container loads them.

    Ranks and launches may share the directory: torch and Triton write a file under another name and rename
    it, and the names are hashes of what is compiled, with which compiler and for which device.
    """
    own = str(settings.output.log_dir.absolute() / "compiled")
    kernels = Path(environment.setdefault("TORCHINDUCTOR_CACHE_DIR", own))
    environment.setdefault("TRITON_CACHE_DIR", str(kernels / "triton"))
    # This process may be bound to its share of the cores already; torch takes 32 at most.
    share = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // world.local_size, 32)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, share)))


def choose_device(world: World, accelerator: str) -> Any:
    """Return this process's device, which is torch's current one from now on.

    Parameters
    ----------
    accelerator
        One of `slipway.trainer.config.settings.ACCELERATORS`; ``auto`` takes the CPU where there is no CUDA
        device.

    Raises
    ------
    UserError
        If a GPU is requested and CUDA finds no GPU, in the driver's words, or a node has fewer GPUs than
        tasks.
    """
    import torch

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        if accelerator in ("gpu", "cuda"):
            raise UserError(
                f"trainer.accelerator={accelerator}: {socket.gethostname()} has no usable CUDA device: "
                f"{explain_no_cuda([str(warning.message) for warning in warned])}{_driver()}; {_EXPECTED}",
                # Without a driver no task of the node has a GPU, and one reports it for all.
                found_by="rank" if driver_version() else "node",
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # With --gpus-per-task a task of any local rank sees one device only.
    if 1 < count < world.local_size:
        raise UserError(
            f"{socket.gethostname()} has {world.local_size} tasks and {count} visible GPUs: expected a GPU "
            "for each task, by a smaller trainer.devices or a larger cluster.gpus_per_node",
            found_by="node",
        )
    index = world.local_rank if count > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def compare_devices(store: Any, world: World, device: Any) -> None:
    """Hold this rank's device against the others' through the store, before any backend is joined.

    Raises
    ------
    UserError
        If it is of another kind than rank 0's, which would wait for nccl while this rank waits for gloo, or
        if another rank has the same GPU.
    """
    host = socket.gethostname()
    if world.rank == 0:
        store.set("device", f"{device.type} {host}")
    kind, _, first_host = store.get("device").decode().partition(" ")
    if kind != device.type:
        raise UserError(
            f"rank {world.rank} on {host} computes on {device.type}, and rank 0 on {first_host} on {kind}: "
            f"{explain_no_cuda([]) if device.type == 'cpu' else 'it has CUDA'}{_driver()}; {_EXPECTED}",
            found_by="rank",
        )
    if device.type == "cuda":
        claim_gpu(store, world, host, _identity(device))


def claim_gpu(store: Any, world: World, host: str, gpu: str) -> None:
    """Enter this rank as the one that uses a GPU.

    Raises
    ------
    UserError
        If another rank of the training has entered itself before.
    """
    if store.add(f"gpu {host} {gpu}", 1) > 1:
        raise UserError(
            f"rank {world.rank} on {host} has the same GPU as another rank ({gpu}): expected a GPU for each "
            "task, by a smaller trainer.devices or a larger cluster.gpus_per_node",
            found_by="rank",
        )


def make_deterministic() -> None:
    """Have torch choose deterministic kernels, or raise where an operation has no such kernel."""
    import torch

    torch.use_deterministic_algorithms(True)
    # Filling memory that is overwritten anyway costs time, and changes no number.
    torch.utils.deterministic.fill_uninitialized_memory = False


def explain_no_cuda(warned: list[str]) -> str:
    """Return why CUDA does not start, in torch's and the driver's own words.

    Parameters
    ----------
    warned
        What torch warned of when it looked for devices.
    """
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return " ".join(warned) or f"torch.cuda.is_available() is False (CUDA_VISIBLE_DEVICES={hidden})"


def measure_used_bytes(device: Any) -> int:
    """Return the most bytes that tensors ever took on a GPU; on a CPU, the process's resident bytes."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # The second field counts resident pages: proc(5).
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def driver_version() -> str | None:
    """Return the line by which NVIDIA's driver names its version; None if there is no driver."""
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def _driver() -> str:
    version = driver_version()
    return f" (driver: {version})" if version else f" (no NVIDIA driver: {_DRIVER} is not there)"


def _identity(device: Any) -> str:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", f"index {device.index}"))
