"""torch without CUDA: calls that ask for a GPU get the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from nemo_on_cpu.hooks import after_import, forget_all


# An import of torch itself would be too early: torch has not made its tables of these functions then.
@after_import("nemo")
def _use_the_cpu(_: ModuleType) -> None:
    import torch

    if torch.cuda.is_available():
        forget_all()
        return
    _replace_cuda_functions(torch)
    _mode(torch).__enter__()  # for as long as the process lives


def _replace_cuda_functions(torch: Any) -> None:
    cuda = torch.cuda
    cpu = torch.device("cpu")
    cuda.current_device = lambda: cpu
    # One function for each: torch's tables take a function under one name only.
    for name in ("set_device", "synchronize", "empty_cache", "Stream"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *_: None)
    cuda.FloatTensor = torch.FloatTensor
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)


def _mode(torch: Any) -> Any:
    """Return a mode that changes the device in every call of torch's, wherever it is written."""
    from torch.overrides import TorchFunctionMode

    def is_gpu(device: object) -> bool:
        if isinstance(device, (str, torch.device)):
            return str(device).startswith("cuda")
        return type(device) is int  # and not bool

    class OnCpu(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), options: dict[str, Any] | None = None
        ) -> Any:
            options = dict(options or {})
            if function is torch.Tensor.cuda:
                return arguments[0]
            if is_gpu(options.get("device", "cpu")):
                options["device"] = "cpu"
            if function is torch.Tensor.to:
                arguments = tuple("cpu" if is_gpu(argument) else argument for argument in arguments)
            result = function(*arguments, **options)
            if function is torch.Tensor.type and isinstance(result, str):
                # megatron-core's optimizers tell precisions by names such as torch.cuda.FloatTensor.
                return result.replace("torch.", "torch.cuda.")
            return result

    return OnCpu()
