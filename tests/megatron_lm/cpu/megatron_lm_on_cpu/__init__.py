"""Stand-ins on a CPU for what Megatron-LM's scripts expect of GPU machines, each with the line that needs it.

Every change is made right after the import of the module that it concerns; Megatron-LM's code is untouched.
The hooks, torch's calls and Adam are those of tests/nemo/cpu, which must be on PYTHONPATH too.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from nemo_on_cpu import torch_calls  # and with it all of its hooks
from nemo_on_cpu.hooks import after_import, forget

forget("megatron.core.fusions.fused_softmax")  # its change is for the masks that NeMo makes


@after_import(
    "megatron.training.global_vars"
)  # the first that its package imports, before any line that stops
def _use_the_cpu(_: Any) -> None:
    import torch

    torch_calls._use_the_cpu(_)
    cuda = torch.cuda
    # megatron/training/initialize.py, _initialize_distributed: without a device no parallel state is made.
    cuda.device_count = lambda: 1
    # megatron/training/utils.py, get_device_arch_version: 9 is Hopper.
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=1)
    cuda.get_device_capability = lambda *_: (9, 0)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.memory_stats = lambda *_: {}
    # megatron/training/training.py, get_model: the model is wrapped on a stream of its own.
    cuda.Stream, cuda.stream = _Stream, lambda _: nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    _start_gloo(torch.distributed)
    _use_the_new_numpy()


def _use_the_new_numpy() -> None:
    """Restore `np.product` of numpy 1 for core_v0.12.3's megatron/core/dist_checkpointing/validation.py."""
    import numpy

    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod  # type: ignore[attr-defined]


class _Stream:
    """A stream that never waits: a CPU's work is done when a call returns."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


def _start_gloo(distributed: Any) -> None:
    """Start with gloo instead of NCCL; all groups of a process get the backend of its first one."""
    start = distributed.init_process_group

    @functools.wraps(start)
    def start_with_gloo(*arguments: Any, **options: Any) -> Any:
        return start(*arguments, **{**options, "backend": "gloo"})

    distributed.init_process_group = start_with_gloo


@after_import("megatron.core.tensor_parallel.random")
def _one_generator(random: Any) -> None:
    """Silence the warning that the CPU's generator moves under that of a GPU: here they are one."""
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


@after_import("megatron.training.initialize")
def _without_cuda(initialize: Any) -> None:
    """Skip `assert torch.cuda.is_available(), "Megatron requires CUDA."` in initialize_megatron."""
    initialize.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)


@after_import("megatron.training.checkpointing")
def _no_fp8(checkpointing: Any) -> None:
    """Skip core_v0.12.3's fix for FP8, which asks Transformer Engine for its version before each load."""
    name = "fix_fp8_params_lose_precision_when_loading_dist_ckpt"
    if hasattr(checkpointing, name):
        setattr(checkpointing, name, lambda _: None)


@after_import("megatron.core.optimizer")
def _adam_of_apex(optimizer: Any) -> None:
    """Load nemo_on_cpu's Adam as Apex's, as it counts steps so; torch's ends at `assert len(steps) == 1`."""
    from megatron.core.optimizer import distrib_optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.USING_APEX_OPTIMIZER = True


@after_import("megatron.core.datasets")
def _compiled_helpers(_: Any) -> None:
    """Import the index helpers of megatron-core's wheel; the scripts would compile them into the checkout."""
    name = "megatron.core.datasets.helpers_cpp"
    files = metadata.files("megatron-core") or ()
    path = next(str(file.locate()) for file in files if file.name.startswith("helpers_cpp."))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


@after_import("megatron.core.datasets.utils")
def _compile_nothing(utils: Any) -> None:
    utils.compile_helpers = lambda: None


@after_import("megatron.legacy.fused_kernels")
def _load_no_kernels(kernels: Any) -> None:
    """Load no kernels: without CUDA, `[cuda_dir + "/bin/nvcc", "-V"]` adds a text to None."""
    kernels.load = lambda _: None
