"""megatron-core's TransformerConfig from the settings, and the functions of the feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal

from slipway.common.errors import UserError
from slipway.trainer.config.architecture import ROWS, Architecture
from slipway.trainer.config.fp8 import NEEDS
from slipway.trainer.config.parallel import Parallel
from slipway.trainer.config.settings import Settings
from slipway.trainer.distributed import RankContext
from slipway.trainer.model.backends import (
    has_apex_accumulation,
    overlaps_tensor,
    transformer_engine_problem,
    uses_transformer_engine,
)

Activation = Callable[[Any], Any]


def tanh_gelu(x: Any) -> Any:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, section 2), as GPT-2 and T5 1.1 use it."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Any) -> Any:
    """ReLU squared (So et al. 2021, Primer)."""
    return torch.square(F.relu(x))


# The function inside a gated unit carries the unit's first letters: SwiGLU is SiLU-gated (Shazeer 2020).
_FUNCTIONS: dict[str, Activation] = {
    "gelu": tanh_gelu,
    "geglu": tanh_gelu,
    "reglu": F.relu,
    "relu": F.relu,
    "swiglu": F.silu,
    "silu": F.silu,
    "squared-relu": squared_relu,
}


def activation(shape: Architecture, device: Any) -> tuple[Activation, bool]:
    """Return the function, and whether megatron-core fuses it with the bias before it.

    megatron-core selects its fusion by the function: for `torch.nn.functional.gelu`, which is the exact
    GELU, it computes the tanh form. So that the key means one function, it is that form without fusion too.
    Nothing is fused on a CPU: the fused functions are not compiled there, and slower than PyTorch's own.
    """
    function, gated = _FUNCTIONS[shape.activation], shape.activation.endswith("glu")
    if device.type != "cuda" or not shape.bias_activation_fusion:
        return function, False
    if function is tanh_gelu and (gated or shape.bias):
        return F.gelu, True
    # Of the others megatron-core 0.16 fuses SwiGLU alone.
    return function, function is F.silu and gated


def transformer_config(
    settings: Settings, shape: Architecture, rank_context: RankContext
) -> TransformerConfig:
    """Translate the settings into the configuration of one stack of layers.

    Parameters
    ----------
    shape
        The stack: ``settings.architecture``, or another of the model's.
    """
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    function, fused = activation(shape, rank_context.device)
    return TransformerConfig(
        **{row.megatron: getattr(shape, name) for name, row in ROWS.items() if row.megatron},
        gated_linear_unit=shape.activation.endswith("glu"),
        activation_func=function,
        bias_activation_fusion=fused,
        rotary_interleaved=shape.rope.interleaved,
        apply_rope_fusion=shape.rope.fusion and uses_transformer_engine(shape, rank_context.device),
        output_layer_init_method=None if shape.scaled_init else init_method_normal(shape.init_std),
        softmax_scale=None if shape.normalize_scores else 1.0,
        # The local attention computes its softmax in bf16 otherwise, which Transformer Engine never does.
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=(
            settings.accumulation_fusion and rank_context.device.type == "cuda" and has_apex_accumulation()
        ),
        persist_layer_norm=uses_transformer_engine(shape, rank_context.device),
        use_cpu_initialization=settings.cpu_weights or rank_context.device.type == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=settings.precision == "bf16",
        deterministic_mode=settings.deterministic,
        calculate_per_token_loss=settings.data.eod_mask_loss,
        **_parallel_options(settings, rank_context),
        **_recompute_options(shape),
        **_fp8_options(settings, rank_context.device),
    )


def _recompute_options(shape: Architecture) -> dict[str, Any]:
    if shape.recompute is None:
        return {}
    return {f"recompute_{name}": value for name, value in vars(shape.recompute).items()}


def overlaps_p2p(parallel: Parallel) -> bool:
    """Return whether pipeline stages exchange while they compute, on CUDA.

    With two stages, the next one is the previous one: a batch of sends and receives would hold two of each
    for one peer, which NCCL matches by their order alone, so that a stage takes a gradient for an activation.
    Megatron-LM refuses that combination (arguments.py).
    """
    return parallel.virtual > 1 and (parallel.overlap_p2p or parallel.pipeline == 2)


def _parallel_options(settings: Settings, rank_context: RankContext) -> dict[str, Any]:
    parallel, on_cuda = settings.parallel, rank_context.device.type == "cuda"
    interleaved, overlapped = parallel.virtual > 1, on_cuda and overlaps_p2p(parallel)
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual if interleaved else None,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        "tp_comm_overlap": overlaps_tensor(settings, rank_context.device),
        # megatron-core overlaps in its interleaved schedule alone; gloo has no batches of sends and receives.
        "overlap_p2p_comm": overlapped,
        "batch_p2p_comm": on_cuda and not overlapped,
        # Only where a send is waited for before its tensor is freed: the overlapped schedule waits later
        # (schedules.py, warm-up), and over gloo that was seen to change the loss.
        "deallocate_pipeline_outputs": on_cuda and parallel.pipeline > 1 and not overlapped,
    }


def _fp8_options(settings: Settings, device: Any) -> dict[str, Any]:
    fp8 = settings.fp8
    if fp8 is None or device.type != "cuda":
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_margin": fp8.margin,
        "fp8_amax_history_len": fp8.history,
        "fp8_amax_compute_algo": fp8.algorithm,
        "fp8_wgrad": fp8.wgrad,
    }


def check_device(settings: Settings, device: Any) -> None:
    """Check that Transformer Engine and FP8 are there, on a GPU that is asked for them.

    Raises
    ------
    UserError
        If one is not.
    """
    if device.type != "cuda":
        return
    if settings.architecture.transformer_engine and (problem := transformer_engine_problem()) is not None:
        raise UserError(
            f"model.transformer_engine=True: it cannot be imported here: {problem}; expected an image that "
            "has it (container=megatron builds one), or False: megatron-core's own layers are slower, and "
            "every rank keeps whole optimizer states",
            found_by="node",
        )
    fp8 = settings.fp8
    if fp8 is None:
        return
    found, needed = torch.cuda.get_device_capability(device), NEEDS[fp8.recipe].capability
    if found < needed:
        raise UserError(
            f"model.fp8_recipe={fp8.recipe}: needs compute capability {'.'.join(map(str, needed))} or newer, "
            f"and {torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}; expected "
            f"model.fp8=False"
            f"{', or another recipe' if found >= NEEDS['delayed'].capability else ''}"
        )
