"""Build a model on this rank's device, wrapped for data parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module

from slipway.trainer.config.settings import Settings
from slipway.trainer.conversion.teacher import Teacher
from slipway.trainer.distributed import RankContext, run_on_all_ranks
from slipway.trainer.model.backends import fuse_accumulation, overlaps_tensor, start_tensor_overlap
from slipway.trainer.model.compiled import compile_layers, explain_uncompiled, guard_dropout
from slipway.trainer.model.distillation import Student, attach_teachers
from slipway.trainer.model.gpt import gpt_chunks
from slipway.trainer.model.loss import compute_loss
from slipway.trainer.model.model import Model
from slipway.trainer.model.seeding import seed_training, seed_weights
from slipway.trainer.model.t5 import t5_chunks
from slipway.trainer.model.transformer import check_device
from slipway.trainer.optim.build import uses_distributed_optimizer


def build_model(
    settings: Settings,
    rank_context: RankContext,
    vocabulary: int,
    is_trained: bool = True,
    teacher: Teacher | None = None,
) -> Model:
    """Build this rank's part of the model.

    On the CPU (``model.use_cpu_initialization``, or no CUDA) every rank draws the whole of each weight and
    keeps its slice, and each layer has its own seed: the initial weights do not depend on the layout at all.
    Drawn on CUDA they depend on the tensor-parallel size.

    Parameters
    ----------
    vocabulary
        Padded size of the vocabulary.
    is_trained
        Whether there is memory for gradients; without it the model can only be evaluated.
    teacher
        The model that it learns from, if any.

    Returns
    -------
    Model
        With identical weights on all data-parallel ranks.
    """
    check_device(settings, rank_context.device)
    seed_weights(settings.seed)
    build = t5_chunks if settings.encoder else partial(gpt_chunks, kind=Student) if teacher else gpt_chunks
    config, chunks = build(settings, rank_context, vocabulary)
    chunks = [chunk.to(rank_context.device) for chunk in chunks]
    if rank_context.device.type == "cuda":
        for chunk in chunks:
            chunk.compute_language_model_loss = compute_loss
    teachers = _load_teacher(settings, rank_context, teacher, vocabulary) if teacher else []
    if settings.distillation and teacher:
        tokens = teacher.description.vocabulary.size
        config = attach_teachers(config, chunks, teachers, settings.distillation, tokens)
    if not is_trained:
        for chunk in chunks:
            chunk.requires_grad_(False)
    if settings.precision == "bf16":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    if overlaps_tensor(settings, rank_context.device):
        start_tensor_overlap(settings)
    if settings.accumulation_fusion and rank_context.device.type == "cuda":
        fuse_accumulation(chunks)
    seed_training(settings.seed)
    wrapped = [_wrap(config, chunk, settings, rank_context, number) for number, chunk in enumerate(chunks)]
    config.finalize_model_grads_func = finalize_model_grads
    _set_communication(config, wrapped, settings)
    guard_dropout(settings, rank_context.device)
    # Texts and evaluations have other lengths than a training, and each would be another graph.
    uncompiled = (
        explain_uncompiled(settings, config, wrapped, rank_context.device) if is_trained else "not trained"
    )
    if uncompiled is None:
        compile_layers([*wrapped, *teachers])
    return Model(wrapped, config, uncompiled)


def _load_teacher(
    settings: Settings, rank_context: RankContext, teacher: Teacher, vocabulary: int
) -> list[Any]:
    """Return this rank's chunks of a teacher, with its weights."""
    # The buffers of overlapped exchanges have the student's width.
    parallel = replace(settings.parallel, overlap_tensor=False)
    shape = teacher.shape_for(settings)
    plain = replace(settings, architecture=shape, parallel=parallel, fp8=None, cpu_weights=False)
    _, chunks = gpt_chunks(plain, rank_context, vocabulary)
    if settings.precision == "bf16":
        chunks = [chunk.bfloat16() for chunk in chunks]
    chunks = [chunk.to(rank_context.device) for chunk in chunks]
    state = {str(number): chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    layers = range(teacher.description.decoder.num_layers)
    run_on_all_ranks(lambda: teacher.fill(state, layers))
    return chunks


def data_parallel_config(settings: Settings, device: Any) -> DistributedDataParallelConfig:
    """Translate the settings into megatron-core's configuration of data parallelism on a device."""
    overlap, is_distributed = settings.overlap, uses_distributed_optimizer(settings, device)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=is_distributed,
        overlap_grad_reduce=overlap.gradients,
        overlap_param_gather=overlap.parameters and is_distributed,
        # As in Megatron-LM: the schedule of a plain pipeline does not gather, and each bucket would wait.
        align_param_gather=overlap.align_parameters and settings.parallel.virtual > 1,
        bucket_size=overlap.bucket_size,
        # A mean over tokens is taken of sums (megatron-core, DistributedDataParallel).
        average_in_collective=overlap.average and device.type == "cuda" and not settings.data.eod_mask_loss,
    )


def _wrap(config: Any, chunk: Any, settings: Settings, rank_context: RankContext, number: int) -> Any:
    ddp = data_parallel_config(settings, rank_context.device)
    # The communication of the later chunks is hidden behind the first one's computation anyway.
    wrapped = DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
    wrapped.broadcast_params()
    return wrapped


def _set_communication(config: Any, chunks: list[Any], settings: Settings) -> None:
    """Configure when megatron-core's schedules reduce gradients and gather weights.

    As Megatron-LM 0.16.1 does (training.py, `train`): without `no_sync_func` each micro batch would reduce.
    """
    overlap = settings.overlap
    if not overlap.gradients:
        return

    def functions(name: str) -> Any:
        bound = [getattr(chunk, name) for chunk in chunks]
        return bound if len(bound) > 1 else bound[0]

    config.no_sync_func = functions("no_sync")
    if overlap.align_gradients:
        config.grad_sync_func = functions("start_grad_sync")
    if chunks[0].ddp_config.align_param_gather and chunks[0].use_forward_hook:
        config.param_sync_func = functions("start_param_sync")
