"""The distributed optimizer on CPUs, by a stand-in for Transformer Engine's Adam."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

STAND_IN = Path(__file__).resolve().parents[1] / "nemo" / "cpu"


def stand_in_for_fused_adam() -> None:
    """Let this process shard optimizer states, with a stand-in for the fused Adam."""
    sys.path.insert(0, str(STAND_IN))
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer
    from nemo_on_cpu.adam import FusedAdam as StandIn

    from slipway.trainer.loop import startup_report
    from slipway.trainer.model import build as model_build
    from slipway.trainer.optim import build

    class FusedAdam(StandIn):  # type: ignore[misc, valid-type]
        """The stand-in, whose results do not depend on where in a buffer a parameter's part begins.

        PyTorch's kernels for CPUs round a product and a sum of one operation once or twice, by the place.
        """

        def _update(self, parameter: Any, group: dict[str, Any]) -> None:
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = (
                    torch.zeros_like(parameter),
                    torch.zeros_like(parameter),
                )
            (first, second), step = group["betas"], group["step"]
            mean = state["exp_avg"].mul_(first).add_(gradient * (1 - first))
            square = state["exp_avg_sq"].mul_(second).add_(gradient * gradient * (1 - second))
            denominator = (square / (1 - second**step)).sqrt_().add_(group["eps"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(mean / denominator * (group["lr"] / (1 - first**step)))

    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = FusedAdam, True
    distrib_optimizer.USING_TE_OPTIMIZER = True

    def uses_distributed_optimizer(settings: Any, device: Any) -> bool:
        return settings.optimization.name in build.DISTRIBUTED_OPTIMIZERS

    for module in (build, model_build, startup_report):
        module.uses_distributed_optimizer = uses_distributed_optimizer  # type: ignore[attr-defined]
