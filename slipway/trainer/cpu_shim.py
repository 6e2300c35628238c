"""Let megatron-core 0.16 run where there is no CUDA device.

megatron-core calls ``torch.cuda`` unconditionally, writes ``device="cuda"`` in a few modules, and recognises
optimizer dtypes by the names of CUDA tensor types. On a machine with CUDA nothing here takes effect.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slipway.trainer import startup_cost

# torch's own, which `install` takes from megatron-core.
COMPILER = torch.compile
# The modules on GPT's path that spell device="cuda" out.
_LITERAL_CUDA = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.mapping",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "empty_like", "zeros_like")


def install() -> bool:
    """Make megatron-core run on the CPU; call it before importing megatron.

    Returns
    -------
    bool
        False, having changed nothing, where CUDA is available.
    """
    if torch.cuda.is_available():
        return False
    _skip_compilation()
    _replace_cuda_calls()
    _replace_rng()
    startup_cost.share_gloo_thread()
    startup_cost.skip_reductions_of_one()
    proxy = _TorchOnCpu()
    for name in _LITERAL_CUDA:
        importlib.import_module(name).torch = proxy  # type: ignore[attr-defined]
    return True


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Have ``Tensor.type()`` say ``torch.cuda.*`` for CPU tensors.

    The optimizers compare this name where they sort parameters by dtype; it is confined to their calls.
    """
    original = torch.Tensor.type

    def named(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = original


def _skip_compilation() -> None:
    # megatron-core decorates its fused functions with torch.compile at import. On a CPU that needs a C++
    # compiler in the job, and importing it costs a second per process. The functions compute the same.
    def uncompiled(function: Any = None, **_: Any) -> Any:
        return function if function is not None else (lambda inner: inner)

    torch.compile = uncompiled
    startup_cost.skip_compiler()


def _replace_cuda_calls() -> None:
    cpu = torch.device("cpu")

    def nothing() -> Callable[..., None]:
        # A new function for each name: torch's own tables know functions by identity.
        return lambda *_, **__: None

    def itself(subject: Any, *_: Any, **__: Any) -> Any:
        return subject

    torch.cuda.current_device = lambda: cpu
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, nothing())
    torch.cuda.nvtx.range_push = nothing()
    torch.cuda.nvtx.range_pop = nothing()
    torch.Tensor.cuda = itself
    torch.nn.Module.cuda = itself


def _replace_rng() -> None:
    """Replace the device's generator by the CPU's: dropout stays right under tensor parallelism."""

    def get_state(*_: Any, **__: Any) -> Any:
        return torch.get_rng_state()

    def set_state(state: Any, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state
    # torch.manual_seed also seeds devices of four kinds; each that is missing stores a stack trace.
    torch.manual_seed = torch.cuda.manual_seed = torch.default_generator.manual_seed
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    random._set_cuda_rng_state = set_state  # type: ignore[attr-defined]


class _TorchOnCpu(types.ModuleType):
    """``torch``, whose tensor factories read ``device="cuda"`` as the CPU, and pin nothing."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _make_on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _make_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create
