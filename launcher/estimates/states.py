"""The bytes that a parameter takes: weight, gradient, and the optimizer's states.

Sources: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054, section 3.1 and figure 1): of each parameter 2 bytes
for its weight, 2 for its gradient, and K = 12 for Adam's states in fp32. Megatron adds gradients up in fp32,
so that there are 18 bytes, and 6 + 12 / d with its distributed optimizer (docs/user-guide/features/
dist_optimizer.md there), d being data × context parallel; of a routed expert the copies of it.

With FP8, Transformer Engine keeps of each matrix of a layer a copy in 8 bits and its transpose, from the
first micro batch of a step on (transformer_engine/pytorch/module/linear.py, is_first_microbatch), unless the
weights are in FP8 themselves (NeMo's `fp8_params`): these and their transposes take as much as 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.estimates.reading import Training

_DISTRIBUTED = ("mcore_distributed_optim", "distributed_fused_adam")
_HALF = ("bf16", "bfloat16")
_MASTER = 4
_REMAINDER = 2
# What an optimizer remembers of a parameter, in fp32; Adam's are two moments, and so for what is not named.
_ADAM = 8
_MOMENTS = {"sgd": 4, "lion": 4, "adafactor": 0}


# A weight in FP8, and its transpose.
_QUANTIZED = 2


class ParameterBytes(NamedTuple):
    """Bytes of one parameter on one GPU.

    `shared_by` is the number of GPUs that share the optimizer's, and `experts_shared_by` those of a routed
    expert; `quantized` are the bytes of the FP8 copies of a matrix of a layer.
    """

    weight: int
    gradient: int
    optimizer: int
    shared_by: int
    experts_shared_by: int
    quantized: int = 0


def bytes_per_parameter(training: Training) -> ParameterBytes:
    """Return what the engine allocates for a parameter."""
    each = _of_weights(training)
    has_copies = training.has_fp8 and not training.values.flag("model.fp8_params")
    return each._replace(quantized=_QUANTIZED) if has_copies else each


def _of_weights(training: Training) -> ParameterBytes:
    name = str(training.values.raw("model.optim.name") or "")
    shared_by = training.data * training.shape.context, training.expert_data
    if name not in _DISTRIBUTED:
        shared_by = 1, 1
    moments = _MOMENTS.get(name, _ADAM)
    if not training.has_half_weights:
        # NeMo without `megatron_amp_O2` keeps the 16-bit copies that autocast makes until the backward pass.
        copy = 2 if training.precision != "32" else 0
        return ParameterBytes(4 + copy, 4, moments, *shared_by)
    if training.precision == "16" and training.engine != "nemo":
        return ParameterBytes(*_half_precision(moments), *shared_by)
    gradient = 4
    if training.engine == "nemo" and training.values.raw("model.optim.grad_sync_dtype") in _HALF:
        gradient = 2
    master = _MASTER
    if training.engine == "nemo" and name == "distributed_fused_adam" and training.precision == "bf16":
        # Apex keeps what a bf16 weight lacks of an fp32 one (NeMo's megatron_base_model.py:
        # store_param_remainders).
        master = _REMAINDER
    return ParameterBytes(2, gradient, master + moments, *shared_by)


def _half_precision(moments: int) -> tuple[int, int, int]:
    """Return the bytes in fp16: gradients too, and these again in fp32 beside the master weights.

    megatron/core/optimizer.
    """
    return 2, 2, 4 + _MASTER + moments
