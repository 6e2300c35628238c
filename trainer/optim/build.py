"""megatron-core's optimizer for the model."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from trainer import cpu_shim
from trainer.config.settings import Settings

DISTRIBUTED_OPTIMIZERS = ("mcore_distributed_optim", "distributed_fused_adam")


def uses_distributed_optimizer(settings: Settings, device: Any) -> bool:
    """Return whether optimizer states are spread over the data-parallel ranks.

    Only on CUDA with the fused Adam of Transformer Engine or Apex: with torch's Adam megatron-core's sharded
    states do not restore each parameter's step count.
    """
    if settings.optimization.name not in DISTRIBUTED_OPTIMIZERS:
        return False
    return bool(device.type == "cuda" and not mcore_optimizer.USING_PYTORCH_OPTIMIZER)


class Optimizer:
    """AdamW on fp32 master weights, with clipping of the global gradient norm.

    As in Megatron, biases and norms (one-dimensional parameters) are decayed only if the settings ask for it.
    """

    def __init__(self, settings: Settings, model: Any, device: Any) -> None:
        self._chosen = settings.optimization
        self._on_cpu = device.type == "cpu"
        with self._type_names():
            self.inner = get_megatron_optimizer(
                _config(settings, device), model.chunks, use_gloo_process_groups=False
            )

    def step(self, lr: float) -> float:
        """Apply the gradients with learning rate `lr`; return their global L2 norm before clipping."""
        chosen = self._chosen
        for group in self.inner.param_groups:
            # All of them, each time: a checkpoint brings the values of the launch that wrote it.
            group["lr"] = lr
            group["weight_decay"] = chosen.weight_decay * (1.0 if chosen.decay_all else group["wd_mult"])
            group["betas"], group["eps"] = chosen.betas, chosen.eps
            if "fused" in group:
                # torch's AdamW in one pass over the memory: the same numbers on any number of threads.
                group["fused"] = True
        with self._type_names():
            _, norm, _ = self.inner.step()
        return float(norm)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.inner.zero_grad()

    def _type_names(self) -> contextlib.AbstractContextManager[None]:
        return cpu_shim.cuda_type_names() if self._on_cpu else contextlib.nullcontext()


def _config(settings: Settings, device: Any) -> OptimizerConfig:
    chosen = settings.optimization
    return OptimizerConfig(
        optimizer="adam",
        lr=chosen.lr,
        min_lr=chosen.min_lr,
        weight_decay=chosen.weight_decay,
        adam_beta1=chosen.betas[0],
        adam_beta2=chosen.betas[1],
        adam_eps=chosen.eps,
        # An infinite limit clips nothing and still has the norm computed.
        clip_grad=chosen.gradient_clip or math.inf,
        bf16=settings.precision == "bf16",
        params_dtype=torch.bfloat16 if settings.precision == "bf16" else torch.float32,
        use_distributed_optimizer=uses_distributed_optimizer(settings, device),
    )
