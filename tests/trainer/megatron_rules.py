"""Megatron-LM's own rules for a training on GPUs, and the configuration of one as this trainer makes it.

The rules are the assertions of Megatron-LM at core_v0.16.1 that concern what this trainer has, each with its
line: of ``megatron/training/arguments.py`` unless another file is named. The checks in the constructors of
megatron-core's configurations hold once one was built.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from slipway.trainer.config.layout import Layout, make_layout
from slipway.trainer.config.settings import Settings
from slipway.trainer.device import prepare_environment

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Gpu:
    """Configurations of megatron-core and the environment, as a process on a GPU would have them."""

    settings: Settings
    layout: Layout
    model: Any
    ddp: Any
    optimizer: Any
    environment: dict[str, str]

    @property
    def virtual(self) -> int | None:
        """Return the virtual stages in Megatron-LM's words."""
        return self.model.virtual_pipeline_model_parallel_size  # type: ignore[no-any-return]


def configure(settings: Settings, rank_context: Any, world: int) -> Gpu:
    """Build the configurations of a process on a GPU, without one."""
    from slipway.trainer.model.build import data_parallel_config
    from slipway.trainer.model.transformer import transformer_config
    from slipway.trainer.optim.build import _config

    on_cuda, environment = replace(rank_context, device=CUDA), {}
    prepare_environment(settings, rank_context.world, environment)
    return Gpu(
        settings,
        make_layout(settings, world),
        transformer_config(settings, settings.architecture, on_cuda),
        data_parallel_config(settings, CUDA),
        _config(settings, CUDA),
        environment,
    )


@contextlib.contextmanager
def pretend_engine() -> Iterator[None]:
    """Let the trainer, and megatron-core's constructors, find a Transformer Engine of their range."""
    import megatron.core.models.common.embeddings.rope_utils as rope
    from megatron.core import optimizer, utils
    from packaging.version import Version

    from slipway.trainer.model import backends

    originals = utils._te_version, rope.fused_apply_rotary_pos_emb, optimizer.USING_PYTORCH_OPTIMIZER
    problem = backends.transformer_engine_problem
    utils._te_version, rope.fused_apply_rotary_pos_emb = Version("2.9.0"), object()
    optimizer.USING_PYTORCH_OPTIMIZER = False
    backends.transformer_engine_problem = lambda: None
    try:
        yield
    finally:
        utils._te_version, rope.fused_apply_rotary_pos_emb, optimizer.USING_PYTORCH_OPTIMIZER = originals
        backends.transformer_engine_problem = problem


class Rule(NamedTuple):
    """An assertion of Megatron-LM: where it stands, when it applies, and what must hold then."""

    source: str
    applies: Callable[[Gpu], Any]
    holds: Callable[[Gpu], Any]


def always(_: Gpu) -> bool:
    return True


RULES: tuple[Rule, ...] = (
    Rule(
        "317: the world is a multiple of tensor x pipeline x context",
        always,
        lambda gpu: gpu.layout.world % (gpu.layout.tensor * gpu.layout.pipeline * gpu.layout.context) == 0,
    ),
    Rule(
        "543: the layers are a multiple of the stages",
        lambda gpu: gpu.layout.pipeline > 1,
        lambda gpu: gpu.model.num_layers % gpu.layout.pipeline == 0,
    ),
    Rule(
        "547: those of a stage are a multiple of its chunks",
        lambda gpu: gpu.virtual,
        lambda gpu: gpu.model.num_layers // gpu.layout.pipeline % gpu.virtual == 0,
    ),
    Rule(
        "575: virtual stages that overlap need two stages",
        lambda gpu: gpu.virtual and gpu.model.overlap_p2p_comm,
        lambda gpu: gpu.layout.pipeline > 1,
    ),
    Rule(
        "579: virtual stages that do not overlap need three",
        lambda gpu: gpu.virtual and not gpu.model.overlap_p2p_comm,
        lambda gpu: gpu.layout.pipeline > 2,
    ),
    Rule(
        "586: nothing overlaps between stages, and weights are not aligned, without virtual ones",
        lambda gpu: not gpu.virtual,
        lambda gpu: not gpu.model.overlap_p2p_comm and not gpu.ddp.align_param_gather,
    ),
    Rule(
        "598: weights are gathered early by the distributed optimizer alone",
        lambda gpu: gpu.ddp.overlap_param_gather,
        lambda gpu: gpu.ddp.use_distributed_optimizer and gpu.optimizer.use_distributed_optimizer,
    ),
    Rule(
        "600: and where gradients are reduced early",
        lambda gpu: gpu.ddp.overlap_param_gather,
        lambda gpu: gpu.ddp.overlap_grad_reduce,
    ),
    Rule(
        "717: gradients of bf16 are summed in fp32",
        lambda gpu: gpu.model.bf16,
        lambda gpu: gpu.ddp.grad_reduce_in_fp32 and gpu.optimizer.main_grads_dtype is torch.float32,
    ),
    Rule(
        "711: the weights' type is that of the precision",
        always,
        lambda gpu: (gpu.model.params_dtype is torch.bfloat16) == gpu.model.bf16 == gpu.optimizer.bf16,
    ),
    Rule(
        "814: heads divide the hidden size, unless their channels are given",
        lambda gpu: gpu.model.kv_channels * gpu.model.num_attention_heads == gpu.model.hidden_size,
        lambda gpu: gpu.model.hidden_size % gpu.model.num_attention_heads == 0,
    ),
    Rule(
        "818: a sequence has two chunks for each context rank",
        lambda gpu: gpu.layout.context > 1,
        lambda gpu: gpu.settings.seq_length % (2 * gpu.layout.context) == 0,
    ),
    Rule(
        "830: there is a position for each token",
        always,
        lambda gpu: gpu.settings.architecture.max_positions >= gpu.settings.architecture.seq_length,
    ),
    Rule(
        "836: the lowest learning rate is not above the highest",
        always,
        lambda gpu: gpu.optimizer.min_lr <= gpu.optimizer.lr,
    ),
    Rule(
        "900: what is recomputed selectively has no method",
        lambda gpu: gpu.model.recompute_granularity == "selective",
        lambda gpu: gpu.model.recompute_method is None,
    ),
    Rule(
        "906: sequences are shared among tensor ranks alone",
        lambda gpu: gpu.layout.tensor == 1,
        lambda gpu: not gpu.model.sequence_parallel,
    ),
    Rule(
        "916: tensor ranks overlap where sequences are shared",
        lambda gpu: gpu.model.tp_comm_overlap,
        lambda gpu: gpu.model.sequence_parallel,
    ),
    Rule(
        "core/tensor_parallel/layers.py 924: fused accumulation of megatron-core's own layers needs Apex",
        lambda gpu: gpu.settings.accumulation_fusion,
        lambda gpu: not gpu.model.gradient_accumulation_fusion,
    ),
    Rule(
        "951: one connection to a GPU under tensor or context parallelism",
        lambda gpu: gpu.settings.accelerator != "cpu" and (gpu.layout.tensor > 1 or gpu.layout.context > 1),
        lambda gpu: gpu.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
    ),
    Rule(
        "1075: no fused loss in the deterministic mode",
        lambda gpu: gpu.model.deterministic_mode,
        lambda gpu: not gpu.model.cross_entropy_loss_fusion,
    ),
    Rule(
        "1078: NCCL's algorithm is named there",
        lambda gpu: gpu.model.deterministic_mode,
        lambda gpu: gpu.environment.get("NCCL_ALGO") in ("Tree", "Ring", "CollnetDirect", "CollnetChain"),
    ),
    Rule(
        "core/pipeline_parallel/schedules.py 921: exchanges are batched or overlapped",
        lambda gpu: gpu.layout.pipeline > 1,
        lambda gpu: gpu.model.overlap_p2p_comm is not gpu.model.batch_p2p_comm,
    ),
    Rule(
        "core/pipeline_parallel/schedules.py 996: a group of micro batches of virtual stages fits",
        lambda gpu: gpu.virtual,
        lambda gpu: (
            gpu.layout.pipeline <= gpu.model.microbatch_group_size_per_vp_stage <= gpu.layout.micro_batches
        ),
    ),
    Rule(
        "core/pipeline_parallel/schedules.py 1008: nor is the last one too small",
        lambda gpu: gpu.virtual,
        lambda gpu: (
            not 0
            < gpu.layout.micro_batches % gpu.model.microbatch_group_size_per_vp_stage
            < gpu.layout.pipeline
        ),
    ),
    Rule(
        "core/distributed/distributed_data_parallel.py 240: no mean in a collective of a loss by tokens",
        lambda gpu: gpu.ddp.average_in_collective,
        lambda gpu: not gpu.model.calculate_per_token_loss,
    ),
    Rule(
        "core/optimizer/optimizer.py 582: the optimizer gathers if and only if the forward pass does not",
        always,
        lambda gpu: gpu.optimizer.overlap_param_gather is gpu.ddp.overlap_param_gather,
    ),
    Rule(
        "core/optimizer/distrib_optimizer.py 515: both sides agree on the distributed optimizer",
        always,
        lambda gpu: gpu.optimizer.use_distributed_optimizer is gpu.ddp.use_distributed_optimizer,
    ),
    Rule(
        "core/fp8_utils.py, get_fp8_recipe: one of the formats and recipes",
        lambda gpu: gpu.settings.fp8,
        lambda gpu: (
            gpu.model.fp8 in ("e4m3", "hybrid")
            and gpu.model.fp8_recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")
            and gpu.model.bf16
        ),
    ),
    Rule(
        "656: weights in FP8 need the distributed optimizer",
        lambda gpu: gpu.settings.fp8,
        lambda gpu: not gpu.ddp.fp8_param_gather and not gpu.model.fp8_param,
    ),
    Rule(
        "Transformer Engine, pytorch/utils.py, assert_dim_for_fp8_exec: sides of matrices",
        lambda gpu: gpu.settings.fp8,
        lambda gpu: (
            gpu.model.hidden_size % 16 == 0
            and gpu.model.ffn_hidden_size // gpu.layout.tensor % 16 == 0
            and gpu.model.kv_channels * gpu.model.num_attention_heads // gpu.layout.tensor % 16 == 0
            and gpu.settings.seq_length * gpu.settings.micro_batch // gpu.layout.context % 16 == 0
        ),
    ),
    Rule(
        "seen over gloo: a send that is not waited for is not freed",
        lambda gpu: gpu.model.overlap_p2p_comm,
        lambda gpu: not gpu.model.deallocate_pipeline_outputs,
    ),
    Rule(
        "core/pipeline_parallel/schedules.py 155: one that is waited for is",
        lambda gpu: gpu.layout.pipeline > 1 and not gpu.model.overlap_p2p_comm,
        lambda gpu: gpu.model.deallocate_pipeline_outputs,
    ),
    Rule(
        "core/optimizer/optimizer.py: an infinite limit clips nothing and has the norm computed",
        always,
        lambda gpu: 0 < gpu.optimizer.clip_grad <= math.inf,
    ),
)


def broken_rules(gpu: Gpu, applied: dict[str, int]) -> list[str]:
    """Return the rules that do not hold, and count in `applied` those that say something here."""
    broken = []
    for rule in RULES:
        if rule.applies(gpu):
            applied[rule.source] = applied.get(rule.source, 0) + 1
            if not rule.holds(gpu):
                broken.append(rule.source)
    return broken
