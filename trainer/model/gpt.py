"""A GPT from an :class:`~trainer.config.architecture.Architecture`: megatron-core's GPTModel."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal

from trainer.config.architecture import Architecture
from trainer.config.settings import Settings
from trainer.distributed import Place
from trainer.model.norms import ZeroCenteredLayerNorm


def squared_relu(x: Any) -> Any:
    """ReLU squared (So et al. 2021, Primer)."""
    return torch.square(F.relu(x))


# The function inside a gated unit carries the unit's first letters: SwiGLU is SiLU-gated (Shazeer 2020).
_FUNCTIONS = {
    "gelu": F.gelu,
    "geglu": F.gelu,
    "reglu": F.relu,
    "relu": F.relu,
    "swiglu": F.silu,
    "silu": F.silu,
    "squared-relu": squared_relu,
}


def uses_transformer_engine(shape: Architecture, device: Any) -> bool:
    """Whether the layers are Transformer Engine's: asked for, on a CUDA device, and installed."""
    if not shape.transformer_engine or device.type != "cuda":
        return False
    return importlib.util.find_spec("transformer_engine") is not None


def build_model(settings: Settings, place: Place, vocabulary: int) -> Any:
    """Build the model on this rank's device, wrapped for data parallelism.

    On the CPU every rank draws the whole of each weight and keeps its slice, so that the initial weights
    depend neither on the data- nor on the tensor-parallel size. On CUDA they depend on the latter.

    Parameters
    ----------
    settings
        What to train.
    place
        This process.
    vocabulary
        Padded size of the vocabulary.

    Returns
    -------
    DistributedDataParallel
        megatron-core's wrapper, with identical weights on all data-parallel ranks.
    """
    shape = settings.architecture
    config = transformer_config(settings, place)
    model_parallel_cuda_manual_seed(settings.seed)
    torch.manual_seed(settings.seed)
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=_layers(shape, place),
        vocab_size=vocabulary,
        max_sequence_length=shape.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type=shape.position,
        rotary_percent=shape.rotary_percentage,
        rotary_base=shape.rotary_base,
    ).to(place.device)
    if settings.precision == "bf16":
        model = Float16Module(config, model)
    # Dropout must not depend on how many numbers the initial weights took.
    model_parallel_cuda_manual_seed(settings.seed)
    return _wrap(config, model, settings, place)


def transformer_config(settings: Settings, place: Place) -> TransformerConfig:
    """Translate the settings into megatron-core's TransformerConfig."""
    shape = settings.architecture
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    function = _FUNCTIONS[shape.activation]
    gated = shape.activation.endswith("glu")
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        hidden_dropout=shape.hidden_dropout,
        attention_dropout=shape.attention_dropout,
        normalization=shape.normalization,
        layernorm_epsilon=shape.norm_epsilon,
        layernorm_zero_centered_gamma=shape.zero_centered_gamma,
        add_bias_linear=shape.bias,
        gated_linear_unit=gated,
        activation_func=function,
        bias_activation_fusion=shape.bias_activation_fusion and _has_fusion(function, gated, shape.bias),
        bias_dropout_fusion=shape.bias_dropout_fusion,
        init_method_std=shape.init_std,
        output_layer_init_method=None if shape.scaled_init else init_method_normal(shape.init_std),
        fp32_residual_connection=shape.fp32_residual,
        # The local attention computes its softmax in bf16 otherwise, which Transformer Engine never does.
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=uses_transformer_engine(shape, place.device),
        tensor_model_parallel_size=place.layout.tensor,
        use_cpu_initialization=place.device.type == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=settings.precision == "bf16",
        **_recompute_options(shape),
    )


def parameter_count(model: Any, tensor_parallel: int) -> int:
    """Count the parameters of the whole model, each once, over all tensor-parallel ranks."""
    split = whole = 0
    for parameter in model.parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            split += parameter.numel()
        else:
            whole += parameter.numel()
    return split * tensor_parallel + whole


def _layers(shape: Architecture, place: Place) -> Any:
    if uses_transformer_engine(shape, place.device):
        return get_gpt_layer_with_transformer_engine_spec()
    layer = get_gpt_layer_local_spec(normalization=shape.normalization)
    if not shape.zero_centered_gamma:
        return layer
    layer = copy.deepcopy(layer)
    layer.submodules.input_layernorm = ZeroCenteredLayerNorm
    layer.submodules.pre_mlp_layernorm = ZeroCenteredLayerNorm
    return TransformerBlockSubmodules([layer] * shape.num_layers, layer_norm=ZeroCenteredLayerNorm)


def _has_fusion(function: Any, gated: bool, bias: bool) -> bool:
    # megatron-core 0.16 fuses SwiGLU, GEGLU, and GELU with a bias; other activations run as they are.
    return (function is F.silu and gated) or (function is F.gelu and (gated or bias))


def _recompute_options(shape: Architecture) -> dict[str, Any]:
    if shape.recompute is None:
        return {}
    options: dict[str, Any] = {"recompute_granularity": shape.recompute.granularity}
    if shape.recompute.granularity == "full":
        options["recompute_method"] = shape.recompute.method
        options["recompute_num_layers"] = shape.recompute.num_layers
    return options


def _wrap(config: TransformerConfig, model: Any, settings: Settings, place: Place) -> Any:
    from trainer.optim.build import uses_distributed_optimizer

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=uses_distributed_optimizer(settings, place.device),
        overlap_grad_reduce=False,
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    wrapped.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped
