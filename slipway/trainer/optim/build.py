"""megatron-core's optimizer for the model."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm

from slipway.trainer import cpu_shim
from slipway.trainer.config.settings import Settings

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
        _work_on_lists()
        with self._type_names():
            self.inner = get_megatron_optimizer(
                _config(settings, device), model.chunks, use_gloo_process_groups=False
            )
        for part in getattr(self.inner, "chained_optimizers", [self.inner]):
            if isinstance(part, DistributedOptimizer):
                _keep_padding(part)

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


def _work_on_lists() -> None:
    """Have megatron-core take norms, clip and copy weights by one operation for all tensors of a rank.

    Without Transformer Engine and Apex it launches four kernels for each parameter, and waits for the device
    once for each norm. The numbers are the same.
    """
    mixed_precision._multi_tensor_copy_this_to_that = _copy
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale


# These have the arguments of the functions of megatron-core in whose places they are.
def _norm(_chunk: int, _overflow: Any, lists: list[list[Any]], _by_tensor: bool) -> tuple[Any, None]:
    """Return the L2 norm of a list of tensors, ``[1]``, on their device."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None


def _scale(_chunk: int, _overflow: Any, lists: list[list[Any]], factor: float) -> None:
    """Multiply gradients in place."""
    sources, targets = lists
    assert sources is targets, "only clipping scales"
    torch._foreach_mul_(targets, factor)


def _copy(this: list[Any], that: list[Any], overflow_buf: Any = None) -> None:
    """Copy the first list to the second, whose type may be another."""
    if this:
        torch._foreach_copy_(that, this)


def _keep_padding(optimizer: DistributedOptimizer) -> None:
    """Have the states of several buckets saved with the padding between them.

    megatron-core 0.16.1 does not gather it for ``fully_reshardable``, and then cuts the parameters out
    at their places with the padding: those of the second bucket on are saved with others'
    values, in silence (distrib_optimizer.py, `sharded_param_state_fully_reshardable`).
    """
    gather = optimizer.get_parameter_state_dp_zero

    def gather_padded(*args: Any, **kwargs: Any) -> Any:
        state = gather(*args, **kwargs)
        if state is None:
            return None
        for index, buffer in enumerate(optimizer.buffers):
            for tensors in state[index].values():
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    tensors[key] = _pad(tensors[key], buffer)
        return state

    optimizer.get_parameter_state_dp_zero = gather_padded


def _pad(packed: Any, buffer: Any) -> Any:
    """Return ``[numel]``, each bucket at its place in the buffer, from ``[numel_unpadded]``."""
    if len(buffer.buckets) == 1:
        return packed
    whole, start = packed.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        size = bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + size] = packed[start : start + size]
        start += size
    return whole


def _config(settings: Settings, device: Any) -> OptimizerConfig:
    chosen, is_distributed = settings.optimization, uses_distributed_optimizer(settings, device)
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
        use_distributed_optimizer=is_distributed,
        fp8_recipe=settings.fp8.recipe if settings.fp8 else None,
        overlap_param_gather=settings.overlap.parameters and is_distributed,
    )
