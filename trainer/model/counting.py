"""How many parameters a model has."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer.model.model import Model


def parameter_count(model: Model) -> int:
    """Count the parameters of the whole model, each once; every rank calls this.

    Tensor-parallel slices are added up; the last pipeline stage's copy of tied embeddings is not counted.
    """
    split = whole = 0
    for parameter in model.parameters():
        if getattr(parameter, "shared", False):
            continue
        if getattr(parameter, "tensor_model_parallel", False):
            split += parameter.numel()
        else:
            whole += parameter.numel()
    tensor = int(parallel_state.get_tensor_model_parallel_world_size())
    total = torch.tensor([split * tensor + whole], dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return int(total.item())
