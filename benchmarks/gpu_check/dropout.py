"""The masks of dropout in the trainer's compiled functions: ``python -m benchmarks.gpu_check.dropout``.

Since torch 2.13 a compiled function may draw a wrong mask on CUDA, in silence: four neighbours share a draw,
or the recomputed mask is another one than the first (pytorch #198333). It depends on the kernels that the
compiler makes, and so on the function, on shapes and on whether there are gradients. The functions here
compute numbers that show their masks, forward and backward, with and without recomputation. Their results are
printed as a JSON object.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.machine import SMALL
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.world import World

# Kept values are doubled, which is exact in bf16.
PROBABILITY = 0.5
# Gradients are sums over as many tokens, and exact too.
_TOKENS = 64
_GPU_SHAPE = {
    "micro_batch_size": 4,
    "encoder_seq_length": 2048,
    "hidden_size": 768,
    "num_attention_heads": 12,
}


@dataclass(frozen=True)
class Masks:
    """The masks of one function.

    Attributes
    ----------
    draws
        Number of values that are kept or dropped.
    kept
        The part that is kept.
    group_variance
        Variance of the number of kept values among four neighbours; 1 is that of independent draws.
    other_backward, other_recomputed
        Numbers of columns whose gradient is not that of the forward mask, without and with recomputation.
    """

    draws: int
    kept: float
    group_variance: float
    other_backward: int
    other_recomputed: int


def main() -> None:
    """Print the masks of each function."""
    from slipway.trainer.logs import silence_warnings

    silence_warnings()
    from slipway.trainer import cpu_shim

    on_cpu = cpu_shim.install()
    from slipway.trainer.config.layout import make_layout
    from slipway.trainer.distributed import make_rank_context, process_group
    from slipway.trainer.model.build import build_model

    settings = _settings(on_cpu)
    world = World.from_environment(os.environ)
    with process_group(world, settings.accelerator) as device:
        rank_context = make_rank_context(world, make_layout(settings, 1), device)
        model = build_model(settings, rank_context, 512)
        model.train()
        masks = {
            "bias_dropout_add": _function_masks(settings, device),
            **_layer_masks(settings, model, device),
        }
    print(json.dumps({name: asdict(value) for name, value in masks.items()}))


def summarize_masks(first: Any, second: Any, gradients: tuple[Any, Any], tokens: Any) -> Masks:
    """Compare masks ``[length, batch, hidden]`` with each other and with gradients ``[hidden]``.

    Parameters
    ----------
    first, second
        True where a value is kept, of a pass without recomputation and of one with it.
    gradients
        For both, the sums of the doubled masks over `tokens`.
    tokens
        Which positions have a gradient, ``[length, batch]``.
    """
    whole = first.double()
    groups = whole.reshape(-1, 4).sum(1)
    others = [
        int((gradient.double() != 2 * mask[tokens].sum(0)).sum())
        for mask, gradient in zip((first, second), gradients, strict=True)
    ]
    keep = 1 - PROBABILITY
    variance = float(groups.var()) / (4 * keep * PROBABILITY)
    return Masks(first.numel(), float(whole.mean()), variance, *others)


def _settings(on_cpu: bool) -> Settings:
    config = json.loads(json.dumps(SMALL))
    config["trainer"] |= {"precision": "bf16", "accelerator": "cpu" if on_cpu else "gpu"}
    # Nothing is written.
    config["exp_manager"]["explicit_log_dir"] = str(Path.cwd())
    config["model"] |= {"megatron_amp_O2": True, "num_layers": 1, "hidden_dropout": PROBABILITY}
    config["model"] |= {} if on_cpu else _GPU_SHAPE
    return read_settings(flatten(config))


def _chosen_tokens(settings: Settings, device: Any) -> Any:
    """Return the positions that have a gradient, ``[length, batch]``."""
    import torch

    length, batch = settings.seq_length, settings.micro_batch
    chosen = torch.zeros(length * batch, dtype=torch.bool, device=device)
    chosen[:: max(1, length * batch // _TOKENS)] = True
    return chosen.view(length, batch)


def _function_masks(settings: Settings, device: Any) -> Masks:
    """Return the masks of megatron-core's bias, dropout and addition, as a layer calls it."""
    import torch
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import checkpoint

    shape = (settings.seq_length, settings.micro_batch, settings.architecture.hidden_size)
    zeros = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    add, tokens = get_bias_dropout_add(True, True), _chosen_tokens(settings, device)

    def run(recompute: bool) -> tuple[Any, Any]:
        bias = torch.ones(shape[-1], dtype=torch.bfloat16, device=device, requires_grad=True)
        x = zeros.clone().requires_grad_()

        def function(x: Any, bias: Any) -> Any:
            return add((x, bias), zeros, PROBABILITY)

        out = checkpoint(function, False, x, bias) if recompute else function(x, bias)
        out.backward(tokens.unsqueeze(-1).expand(shape).to(out.dtype))
        return out.detach() > 0, bias.grad

    (first, gradient), (second, recomputed) = run(False), run(True)
    return summarize_masks(first, second, (gradient, recomputed), tokens)


def _layer_masks(settings: Settings, model: Any, device: Any) -> dict[str, Masks]:
    """Return the masks after attention and after the MLP of a layer, as the trainer builds it.

    All weights are zero but the last biases of the two, 1 and 2: the layer adds 2 to its input where the
    first mask keeps, and 4 where the second one does.
    """
    import torch

    (chunk,) = model.chunks
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    decoder = chunk.decoder
    (layer,) = decoder.layers
    biases = (layer.self_attention.linear_proj.bias, layer.mlp.linear_fc2.bias)
    decoder.final_layernorm = None
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
        for value, bias in enumerate(biases, 1):
            bias.fill_(value)
    shape = (settings.seq_length, settings.micro_batch, settings.architecture.hidden_size)
    tokens = _chosen_tokens(settings, device)

    def run(recompute: bool) -> tuple[Any, Any]:
        config = decoder.config
        config.recompute_granularity, config.recompute_method = (
            ("full", "uniform") if recompute else (None, None)
        )
        config.recompute_num_layers = 1 if recompute else None
        model.zero_grad_buffer()
        x = torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        out = decoder(hidden_states=x, attention_mask=None)
        out.backward(tokens.unsqueeze(-1).expand(shape).to(out.dtype))
        kept = out.detach().long() // 2
        return ((kept & 1) > 0, (kept & 2) > 0), [bias.main_grad.clone() for bias in biases]

    (first, gradients), (second, recomputed) = run(False), run(True)
    return {
        name: summarize_masks(first[at], second[at], (gradients[at], recomputed[at]), tokens)
        for at, name in enumerate(("layer after attention", "layer after MLP"))
    }


if __name__ == "__main__":
    main()
