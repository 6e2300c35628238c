"""NeMo 2.4 without CUDA, apex and Transformer Engine."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

from nemo_on_cpu.hooks import after_import

_MEGATRON = "nemo.collections.nlp.modules.common.megatron"
_MODELS = "nemo.collections.nlp.models.language_modeling"


@after_import(f"{_MEGATRON}.build_model")
def _attributes_of_parameters(build_model: Any) -> None:
    """Take from megatron-core the one function of apex that building a model needs."""
    from megatron.core.tensor_parallel import layers

    name = "set_defaults_if_not_set_tensor_model_parallel_attributes"
    setattr(build_model, name, getattr(layers, name))
    build_model.HAVE_APEX = True


@after_import("nemo.collections.nlp.parts.nlp_overrides")
def _optimizer_of_megatron_core(overrides: Any) -> None:
    """Set megatron-core's optimizer, which NeMo imports only together with apex's."""
    from nemo.core.optim.mcore_optim import McoreDistributedOptimizer

    overrides.McoreDistributedOptimizer = McoreDistributedOptimizer
    overrides.MegatronDistributedFusedAdam = type("MegatronDistributedFusedAdam", (), {})
    overrides.HAVE_APEX = True


@after_import("nemo.core.optim.optimizers")
def _adamw_that_can_be_saved(optimizers: Any) -> None:
    """Replace torch's AdamW, whose state megatron-core cannot save; T5's distributed optimizer is apex's."""
    from nemo_on_cpu.adam import FusedAdam

    optimizers.AVAILABLE_OPTIMIZERS["adamw"] = optimizers.FusedAdam = FusedAdam
    optimizers.HAVE_APEX = True  # so that NeMo makes room for its state when it resumes


@after_import(f"{_MEGATRON}.utils")
def _norms_by_name(utils: Any) -> None:
    """Set the classes whose parameters get no weight decay."""
    import torch

    class Absent(torch.nn.Module):
        pass

    utils.FusedLayerNorm = torch.nn.LayerNorm
    utils.FastLayerNorm = utils.MixedFusedRMSNorm = Absent
    utils.listify_model = lambda model: model if isinstance(model, list) else [model]


@after_import(f"{_MEGATRON}.clip_grads")
def _norm_of_gradients(clip_grads: Any) -> None:
    """Compute the norm of many tensors without apex's kernel."""
    import torch

    def norm_of_all(_: object, __: object, lists: list[list[Any]], *___: object) -> tuple[Any, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))), None

    clip_grads.multi_tensor_applier = norm_of_all
    clip_grads.amp_C = SimpleNamespace(multi_tensor_l2norm=None)


@after_import(f"{_MODELS}.megatron_base_model")
def _no_jit_settings(base_model: Any) -> None:
    base_model.MegatronBaseModel._enable_nvidia_optimizations = lambda _: None


@after_import(f"{_MODELS}.megatron_gpt_model")
def _local_layers(gpt_model: Any) -> None:
    """Build layers in plain torch; NeMo would first build those of Transformer Engine, to choose."""
    gpt_model.get_specs = lambda *_, **__: gpt_model.get_gpt_layer_local_spec()


@after_import(f"{_MEGATRON}.megatron_init")
def _seed_without_devices(megatron_init: Any) -> None:
    """Seed megatron-core's own random streams, which NeMo does only where it counts a GPU."""
    seed_all = megatron_init._set_random_seed

    def seed(number: int) -> None:
        seed_all(number)
        rank = megatron_init.get_pipeline_model_parallel_rank()
        megatron_init.tensor_parallel.model_parallel_cuda_manual_seed(number + 100 * rank)

    megatron_init._set_random_seed = seed


@after_import("nemo.utils.exp_manager")
def _preemption(exp_manager: Any) -> None:
    """Add the callback that saves on SIGTERM, which NeMo adds only where it finds CUDA."""
    configure = exp_manager.configure_checkpointing

    def configure_as_with_cuda(*arguments: Any, **options: Any) -> Any:
        cuda = exp_manager.torch.cuda
        is_available, cuda.is_available = cuda.is_available, lambda: True
        try:
            return configure(*arguments, **options)
        finally:
            cuda.is_available = is_available

    exp_manager.configure_checkpointing = configure_as_with_cuda


@after_import("nemo.utils.distributed")
def _processes_without_devices(distributed: Any) -> None:
    """Start torch.distributed with gloo; the scripts that convert checkpoints start it for NCCL."""
    import torch

    def initialize(arguments: Any, backend: str = "gloo") -> tuple[int, int, int]:
        torch.distributed.init_process_group(backend)  # by the variables of torchrun
        return int(arguments.local_rank), torch.distributed.get_rank(), torch.distributed.get_world_size()

    distributed.initialize_distributed = initialize


@after_import("lightning.pytorch.trainer.trainer")
def _trainer_without_devices(trainer: Any) -> None:
    """Run on the CPU, although those scripts ask for GPUs by name."""
    start = trainer.Trainer.__init__

    @functools.wraps(start)  # its parameters are read
    def start_on_cpu(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **{**options, "accelerator": "cpu"})

    trainer.Trainer.__init__ = start_on_cpu


@after_import(f"{_MODELS}.megatron_gpt_model")
def _names_of_fused_norms(gpt_model: Any) -> None:
    """Add the norms' names of Transformer Engine, which the script that converts a Llama expects."""
    if not sys.argv[0].endswith("_nemo_to_hf.py"):
        return
    model = gpt_model.MegatronGPTModel
    state_dict = model.state_dict
    names = {
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    }

    def with_fused_names(self: Any, *arguments: Any, **options: Any) -> Any:
        weights = state_dict(self, *arguments, **options)
        for name in list(weights):
            for local, fused in names.items():
                if local in name:
                    weights[name.replace(local, fused)] = weights[name]
        return weights

    model.state_dict = with_fused_names
