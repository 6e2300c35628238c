"""Adam as apex and Transformer Engine have it: one count of steps for a group, kept with its options.

With torch's own, whose count is part of each parameter's state, megatron-core 0.12 saves but cannot resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW by its formula, in place of the fused kernel."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        **_: object,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        mean, square, gradient = state["exp_avg"], state["exp_avg_sq"], parameter.grad
        first, second = group["betas"]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        correct_mean, correct_square = 1.0, 1.0
        if group["bias_correction"]:
            correct_mean = 1 - first ** group["step"]
            correct_square = 1 - second ** group["step"]
        denominator = (square / correct_square).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / correct_mean)
