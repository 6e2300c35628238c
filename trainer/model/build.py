"""Build a model on this rank's device, wrapped for data parallelism."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module

from trainer.config.settings import Settings
from trainer.distributed import RankContext
from trainer.model.gpt import gpt_chunks
from trainer.model.model import Model
from trainer.model.seeding import seed_training, seed_weights
from trainer.model.t5 import t5_chunks
from trainer.optim.build import uses_distributed_optimizer


def build_model(settings: Settings, rank_context: RankContext, vocabulary: int) -> Model:
    """Build this rank's part of the model.

    On the CPU (``model.use_cpu_initialization``, or no CUDA) every rank draws the whole of each weight and
    keeps its slice, and each layer has its own seed: the initial weights do not depend on the layout at all.
    Drawn on CUDA they depend on the tensor-parallel size.

    Parameters
    ----------
    settings
        What to train.
    rank_context
        This process.
    vocabulary
        Padded size of the vocabulary.

    Returns
    -------
    Model
        With identical weights on all data-parallel ranks.
    """
    seed_weights(settings.seed)
    build = t5_chunks if settings.encoder else gpt_chunks
    config, chunks = build(settings, rank_context, vocabulary)
    chunks = [chunk.to(rank_context.device) for chunk in chunks]
    if settings.precision == "bf16":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    seed_training(settings.seed)
    wrapped = [_wrap(config, chunk, settings, rank_context, number) for number, chunk in enumerate(chunks)]
    config.finalize_model_grads_func = finalize_model_grads
    return Model(wrapped, config)


def _wrap(config: Any, chunk: Any, settings: Settings, rank_context: RankContext, number: int) -> Any:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=uses_distributed_optimizer(settings, rank_context.device),
        overlap_grad_reduce=False,
    )
    wrapped = DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
    wrapped.broadcast_params()
    return wrapped
