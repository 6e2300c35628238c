"""A model as a whole in this process, without a training: to compare it, or to write text with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipway.trainer import cpu_shim
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.config.architecture import Architecture
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.world import World

_ALONE = World(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=0)


def settings_of(description: Description) -> Settings:
    """Return settings of a model in 32 bits; what only a training needs is of no account."""
    keys = {
        "trainer.max_steps": 1,
        "exp_manager.explicit_log_dir": os.devnull,
        "model.data.data_impl": "mock",
        "model.optim.lr": 0.0,
        **{f"model.{name}": 1 for name in ("micro_batch_size", "global_batch_size", "num_layers")},
        **{f"model.{name}": 8 for name in ("hidden_size", "num_attention_heads", "encoder_seq_length")},
    }

    def plain(shape: Architecture) -> Architecture:
        return replace(shape, attention_backend="auto", recompute=None)

    encoder = None if description.encoder is None else plain(description.encoder)
    return replace(read_settings(keys), architecture=plain(description.decoder), encoder=encoder)


@contextlib.contextmanager
def enter_single_process(settings: Settings) -> Iterator[Any]:
    """Enter a process group of this process, whose model has no other parts; yield its rank's context."""
    cpu_shim.install()
    import torch.distributed as dist
    from megatron.core import parallel_state

    from slipway.trainer.device import choose_device
    from slipway.trainer.distributed import make_rank_context

    device = choose_device(_ALONE, "auto")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_rank_context(_ALONE, make_layout(settings, 1), device)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def load_model(checkpoint: Path, settings: Settings, description: Description, rank_context: Any) -> Any:
    """Return megatron-core's module with the weights of a checkpoint, which any layout wrote."""
    from slipway.trainer.checkpoint.state import load_weights
    from slipway.trainer.model.build import build_model

    model = build_model(settings, rank_context, description.padded_vocabulary, is_trained=False)
    load_weights(checkpoint, model)
    model.eval()
    return model.chunks[0].module
