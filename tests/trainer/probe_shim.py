"""The shim where there is CUDA; run by test_models.py in a process of its own, without megatron-core."""

from __future__ import annotations

import json
import sys

from slipway.trainer.logs import silence_warnings

silence_warnings()

import torch  # noqa: E402

from slipway.trainer import cpu_shim  # noqa: E402


def shim_with_cuda() -> dict[str, bool]:
    """Pretend that there is a CUDA device: the shim must change nothing."""
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    functions = {name: getattr(torch.cuda, name) for name in ("current_device", "synchronize", "manual_seed")}
    was_installed = cpu_shim.install()
    torch.cuda.is_available = available
    return {
        "installed": was_installed,
        "changed": any(getattr(torch.cuda, name) is not value for name, value in functions.items()),
        "imported": "megatron.core" in sys.modules,
    }


if __name__ == "__main__":
    print(json.dumps(shim_with_cuda()))
