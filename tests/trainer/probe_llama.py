"""The effects of Llama's keys on a model; run by test_llama.py from a warm process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.distributed import make_rank_context, process_group
from slipway.trainer.world import World

END, LENGTH, FIRST = 299, 32, 11
ROPE = {
    "model.position_embedding_type": "rope",
    "model.rotary_base": 500000,
    "model.kv_channels": 64,
    "model.normalization": "rmsnorm",
}

FULL = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}


class TwoDocuments:
    """One window: a document of twelve tokens, its end among them, and one of twenty."""

    windows = 1

    def __init__(self, first: int) -> None:
        self._tokens = np.concatenate(([first] * FIRST, [END], np.arange(LENGTH - FIRST) * 7 % 290))

    def window(self, index: int) -> Any:
        return self._tokens.astype(np.int64)


def main(arguments: list[str]) -> int:
    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    world = World.from_environment({"MASTER_PORT": arguments[1]})

    def settings(**changes: Any) -> Settings:
        return read_settings({**base, **{f"model.{key}": value for key, value in changes.items()}})

    with process_group(world, "auto") as device:
        rank_context = make_rank_context(world, make_layout(settings(), 1), device)
        rope = {key.removeprefix("model."): value for key, value in ROPE.items()}
        scaled = {**rope, "scale_positional_embedding": True}
        result = {
            "plain": frequencies(settings(**rope), rank_context),
            "scaled": frequencies(settings(**scaled), rank_context),
            "by four": frequencies(settings(**scaled, scale_factor=4), rank_context),
            "halved": half_positions(settings(**rope, seq_len_interpolation_factor=2), rank_context),
            "interleaved": chunk(
                settings(**rope, rotary_interleaved=True), rank_context
            ).config.rotary_interleaved,
            "documents": {
                f"{backend}, {name}": documents(settings(**changes, attention_backend=backend), rank_context)
                for backend in ("local", "sdpa")
                for name, changes in {"rope": rope, "learned": {}}.items()
            },
            "masks": {
                name: masks_kept(settings(**rope, **changes, attention_backend="sdpa"), rank_context)
                for name, changes in {"plain": {}, "recomputed": FULL}.items()
            },
            "lengths": lengths(settings(**rope, **FULL, num_query_groups=2), rank_context),
            "groups": repeated_groups(),
            "always masked": [always_masked(settings(attention_dropout=p), rank_context) for p in (0.0, 0.1)],
        }
    print(json.dumps(result))
    return 0


def chunk(settings: Settings, rank_context: Any) -> Any:
    """Return a GPT as megatron-core made it."""
    from slipway.trainer.model.build import build_model

    return build_model(settings, rank_context, 304).chunks[0].module


def frequencies(settings: Settings, rank_context: Any) -> list[float]:
    """Return how fast each pair of channels turns, in radians per token."""
    return [float(value) for value in chunk(settings, rank_context).rotary_pos_emb.inv_freq]


def half_positions(settings: Settings, rank_context: Any) -> float:
    """Return the first pair's angle at the second position."""
    return float(chunk(settings, rank_context).rotary_pos_emb.get_freqs_non_repeated(2)[1, 0])


def masks_kept(settings: Settings, rank_context: Any) -> int:
    """Return how many masks of documents a micro batch keeps for its backward pass."""
    from slipway.trainer.data.batches import GPTBatchBuilder, Resets

    model = chunk(settings, rank_context)
    batch = next(
        GPTBatchBuilder(304, None, 1, rank_context.device, Resets(END, True, True)).batches(
            TwoDocuments(1), [0]
        )
    )
    places: set[int] = set()

    def pack(tensor: Any) -> Any:
        if tensor.numel() == LENGTH**2 and tensor.shape[-2:] == (LENGTH, LENGTH):
            places.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = model(**batch.arguments())
    losses.mean().backward()
    return len(places)


def lengths(settings: Settings, rank_context: Any) -> dict[str, Any]:
    """Return the norms of gradients with documents by a mask and by their lengths, recomputed."""
    from slipway.trainer.data.batches import GPTBatchBuilder, Resets
    from tests.trainer import variable_lengths

    variable_lengths.register()
    model = chunk(settings, rank_context)
    norms, is_mask = [], []
    for is_by_length in (False, True):
        resets = Resets(END, True, True, is_by_length)
        batch = next(GPTBatchBuilder(304, None, 1, rank_context.device, resets).batches(TwoDocuments(1), [0]))
        is_mask.append(batch.arguments()["attention_mask"].dim() > 1)
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        model(**batch.arguments()).mean().backward()
        norms.append([float(parameter.main_grad.norm()) for parameter in model.parameters()])
    return {"norms": norms, "is_mask": is_mask}


def repeated_groups() -> float:
    """Return by how much attention with repeated keys and values differs from that with groups."""
    from slipway.trainer.model.attention import make_added_mask, repeat_groups

    query, key, value = (torch.randn(8, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    mask = make_added_mask(torch.rand(2, 1, 8, 8) < 0.3, torch.float64)

    def attend(*parts: Any) -> Any:
        rows = [part.permute(1, 2, 0, 3) for part in parts]
        return torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)

    grouped = attend(query, key, value)
    return float((attend(query, repeat_groups(key, 4), repeat_groups(value, 4)) - grouped).abs().max())


def always_masked(settings: Settings, rank_context: Any) -> bool:
    """Return True if attention has a mask even where a window is one document."""
    from slipway.trainer.data.vocabulary import Vocabulary
    from slipway.trainer.loop.batch_building import document_resets

    data = replace(settings.data, reset_attention=True)
    resets = document_resets(replace(settings, data=data), rank_context, Vocabulary(304, END, "by hand"))
    assert resets is not None
    return resets.same_kernel


def documents(settings: Settings, rank_context: Any) -> dict[str, float]:
    """Return how far the second document's losses move with the first one's tokens, and from those alone."""
    from slipway.trainer.data.batches import GPTBatchBuilder, Resets

    model = chunk(settings, rank_context).eval()

    def losses(first: int, resets: Resets | None) -> Any:
        batch = next(
            GPTBatchBuilder(304, None, 1, rank_context.device, resets).batches(TwoDocuments(first), [0])
        )
        with torch.no_grad():
            return model(**batch.arguments())[0, FIRST + 1 :]

    apart = Resets(END, True, True)
    alone = torch.from_numpy(TwoDocuments(1).window(0))[FIRST + 1 :]
    with torch.no_grad():
        count = len(alone) - 1
        places = torch.arange(count)[None]
        expected = model(alone[None, :-1], places, None, labels=alone[None, 1:])[0]
    return {
        "together": float((losses(1, None) - losses(2, None)).abs().max()),
        "apart": float((losses(1, apart) - losses(2, apart)).abs().max()),
        "alone": float((losses(1, apart) - expected).abs().max()),
    }
