"""Train a step with FSDP and save in each known way; run by test_dcp.py on two ranks of a warm process.

``probe_fsdp OUTPUT``: the checkpoints are directories of OUTPUT, and the model's weights OUTPUT/weights.pt.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class StatefulContent:
    """The objects of a training that DCP saves as one."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def state_dict(self) -> dict[str, Any]:
        """Return the saved content."""
        return self._content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; DCP asks for it."""


def main(arguments: list[str]) -> int:
    """Train, and save; return the exit code."""
    output = Path(arguments[0])
    # torch warns of the old way while it uses it itself.
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False), torch.nn.BatchNorm1d(3)
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    fsdp1_model = FullyShardedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(5, 7)),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        device_mesh=mesh,
    )
    contents: dict[str, dict[str, Any]] = {
        "nested": {"model": weights, "optimizer": states, "step": 3},
        "stateful": {"app": StatefulContent({"model": weights, "optim": states})},
        "plain": dict(weights),
        "beside": {**weights, "optimizer": states, "train_state": {"step": torch.tensor(1)}},
        "compiled": {"model": {f"module._orig_mod.{name}": weight for name, weight in weights.items()}},
        "fsdp1": {"model": get_model_state_dict(fsdp1_model)},
    }
    for name, content in contents.items():
        dcp.save(content, checkpoint_id=output / name)
    full_weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    full_fsdp1 = get_model_state_dict(fsdp1_model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save({"fsdp2": full_weights, "fsdp1": full_fsdp1}, output / "weights.pt")
    dist.destroy_process_group()
    print("{}")
    return 0
