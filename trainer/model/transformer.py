"""megatron-core's TransformerConfig from the settings."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal

from trainer.config.architecture import Architecture
from trainer.config.parallel import Parallel
from trainer.config.settings import Settings
from trainer.distributed import Place
from trainer.model.activations import activation
from trainer.model.backends import uses_transformer_engine


def transformer_config(settings: Settings, shape: Architecture, place: Place) -> TransformerConfig:
    """Translate the settings into the configuration of one stack of layers.

    Parameters
    ----------
    settings
        What to train.
    shape
        The stack: ``settings.architecture``, or another of the model's.
    place
        This process.
    """
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    function, fused = activation(shape, place.device)
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
        gated_linear_unit=shape.activation.endswith("glu"),
        activation_func=function,
        bias_activation_fusion=fused,
        bias_dropout_fusion=shape.bias_dropout_fusion,
        rotary_interleaved=shape.rope.interleaved,
        apply_rope_fusion=shape.rope.fusion and uses_transformer_engine(shape, place.device),
        cross_entropy_loss_fusion=shape.loss_fusion and fuses_loss(settings),
        init_method_std=shape.init_std,
        output_layer_init_method=None if shape.scaled_init else init_method_normal(shape.init_std),
        softmax_scale=None if shape.normalize_scores else 1.0,
        # The local attention computes its softmax in bf16 otherwise, which Transformer Engine never does.
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=uses_transformer_engine(shape, place.device),
        use_cpu_initialization=settings.cpu_weights or place.device.type == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=settings.precision == "bf16",
        deterministic_mode=settings.deterministic,
        **_parallel_options(settings, place),
        **_recompute_options(shape),
    )


def fuses_loss(settings: Settings) -> bool:
    """Whether megatron-core's fused loss computes what the plain loss does.

    Its gradient of the logits is bf16 whatever they are (fusions/fused_cross_entropy.py), and Megatron-LM
    excludes it from the deterministic mode.
    """
    return settings.precision == "bf16" and not settings.deterministic


def overlaps_p2p(parallel: Parallel) -> bool:
    """Whether pipeline stages exchange while they compute, on CUDA.

    With two stages, the next one is the previous one: a batch of sends and receives would hold two of each
    for one peer, which NCCL matches by their order alone, so that a stage takes a gradient for an activation.
    Megatron-LM refuses that combination (arguments.py).
    """
    return parallel.virtual > 1 and (parallel.overlap_p2p or parallel.pipeline == 2)


def _parallel_options(settings: Settings, place: Place) -> dict[str, Any]:
    parallel, on_cuda = settings.parallel, place.device.type == "cuda"
    interleaved, overlapped = parallel.virtual > 1, on_cuda and overlaps_p2p(parallel)
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual if interleaved else None,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        # megatron-core overlaps in its interleaved schedule alone; gloo has no batches of sends and receives.
        "overlap_p2p_comm": overlapped,
        "batch_p2p_comm": on_cuda and not overlapped,
        # Only where a send is waited for before its tensor is freed: the overlapped schedule waits later
        # (schedules.py, warm-up), and over gloo that was seen to change the loss.
        "deallocate_pipeline_outputs": on_cuda and parallel.pipeline > 1 and not overlapped,
    }


def _recompute_options(shape: Architecture) -> dict[str, Any]:
    if shape.recompute is None:
        return {}
    options: dict[str, Any] = {"recompute_granularity": shape.recompute.granularity}
    if shape.recompute.granularity == "full":
        options["recompute_method"] = shape.recompute.method
        options["recompute_num_layers"] = shape.recompute.num_layers
    return options
