"""Our models with Hugging Face's weights, against its outputs; run by test_parity.py, one process a rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.logs import silence_warnings
from slipway.trainer.world import World

silence_warnings()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from slipway.trainer import cpu_shim  # noqa: E402
from slipway.trainer.conversion.weight_map import Row  # noqa: E402
from tests.trainer.parity.parity_weights import rows_by_parameter  # noqa: E402


def main(arguments: list[str]) -> int:
    cpu_shim.install()
    from slipway.trainer.distributed import make_rank_context, process_group

    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    references = torch.load(arguments[1], weights_only=True)
    cases: dict[str, dict[str, Any]] = json.loads(arguments[2])
    world = World.from_environment(os.environ)
    with process_group(world, "auto") as device:
        settings = {name: read_settings({**base, **keys}) for name, keys in cases.items()}
        rank_context = make_rank_context(
            world, make_layout(next(iter(settings.values())), world.size), device
        )
        # The first case of a family is right: those with a wrong key come last.
        right: dict[str, Settings] = {}
        for name in cases:
            right.setdefault(name.split()[0], settings[name])
        results = {
            name: compare(
                settings[name], rank_context, references, name.split()[0], right, "compiled" in name
            )
            for name in cases
        }
        checks = {} if device.type == "cuda" else attention_checks(world.size)
    if world.is_main:
        print(json.dumps({"cases": results, **checks}))
    return 0


def attention_checks(ranks: int) -> dict[str, Any]:
    from tests.trainer.parity import attention_probe

    return attention_probe.on_two_ranks() if ranks > 1 else attention_probe.on_one_rank()


def compare(
    settings: Settings,
    rank_context: Any,
    references: dict[str, Any],
    family: str,
    right: dict[str, Settings],
    compiled: bool,
) -> dict[str, float]:
    """Return the largest differences: of logits, and of a parameter's gradient, relative to its largest.

    `ours` and `theirs` are differences of logits in 32 bits from Hugging Face's in 64 bits.
    """
    from slipway.trainer.model.build import build_model
    from slipway.trainer.model.compiled import compile_layers

    reference = references[family]
    vocabulary = reference["logits"].shape[-1]
    model, rows = (
        build_model(settings, rank_context, vocabulary),
        rows_by_parameter(right[family], vocabulary),
    )
    if compiled:
        compile_layers(model.chunks, "aot_eager")
    model.train()
    model.zero_grad_buffer()
    chunk = model.chunks[0]
    load(chunk.module, rank_context, rows, reference["weights"])
    arguments = our_arguments(
        family, {name: x.to(rank_context.device) for name, x in reference["arguments"].items()}
    )
    with torch.no_grad():
        logits = gather_logits(chunk(**arguments), rank_context).cpu()
    labels = {"lm_labels" if settings.encoder else "labels": reference["labels"].to(rank_context.device)}
    chunk(**arguments, **labels).float().mean().backward()
    model.config.finalize_model_grads_func(model.chunks)
    exact = reference["exact"]
    return {
        "ours": float((logits - exact).abs().max()),
        "theirs": float((reference["logits"] - exact).abs().max()),
        "logits": float((logits - reference["logits"]).abs().max()),
        "largest": float(exact.abs().max()),
        "gradient": worst_gradient(chunk.module, rank_context, rows, reference["gradients"]),
    }


def our_arguments(family: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of megatron-core's model from those of Hugging Face's."""
    tokens = arguments["input_ids"]
    if family.startswith("t5"):
        masks = dict.fromkeys(("encoder_attn_mask", "decoder_attn_mask", "encoder_decoder_attn_mask"))
        return {"encoder_input_ids": tokens, "decoder_input_ids": arguments["decoder_input_ids"], **masks}
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": None}


def load(module: Any, rank_context: Any, rows: dict[str, Row], weights: dict[str, Any]) -> None:
    for name, parameter in module.named_parameters():
        row = rows[name]
        tensor = row.to_ours(*(weights[source] for source in row.theirs))
        parameter.data.copy_(own_part(parameter, tensor, rank_context))


def worst_gradient(module: Any, rank_context: Any, rows: dict[str, Row], gradients: dict[str, Any]) -> float:
    worst = torch.zeros(())
    for name, parameter in module.named_parameters():
        row = rows[name]
        if not row.theirs:
            continue
        tensor = row.join(*(gradients[source] for source in row.theirs)) / row.scale
        expected = own_part(parameter, tensor, rank_context)
        difference = (parameter.main_grad.cpu() - expected).abs().max()
        worst = worst.maximum(difference / expected.abs().max())
    worst = worst.to(rank_context.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def own_part(parameter: Any, tensor: Any, rank_context: Any) -> Any:
    """Return this tensor-parallel rank's part of a whole parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    ranks = rank_context.layout.tensor
    # A gated unit's two matrices are cut apart each: that is the stride.
    blocks = tensor.chunk(ranks * parameter.partition_stride, parameter.partition_dim)
    return torch.cat(blocks[rank_context.tensor_rank :: ranks], parameter.partition_dim)


def gather_logits(logits: Any, rank_context: Any) -> Any:
    """Gather ``[b, s, v / ranks]`` from the tensor-parallel ranks: ``[b, s, v]``."""
    parts = [torch.empty_like(logits) for _ in range(rank_context.layout.tensor)]
    dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, -1)


if __name__ == "__main__":
    main(sys.argv[1:])
