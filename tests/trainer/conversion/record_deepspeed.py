"""The recorder of tests/trainer/conversion/recorded/deepspeed: DeepSpeed's own checkpoints of a tiny model.

Run by hand, in an environment with torch, safetensors and deepspeed (the tests need no deepspeed)::

    python tests/trainer/conversion/record_deepspeed.py OUTPUT [STAGE ...]

It trains on two ranks (gloo, CPU) and writes for each ZeRO stage the checkpoint, without the scripts that
DeepSpeed puts beside it, and `STAGE.safetensors`: the weights that DeepSpeed's own conversion makes of it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

RANKS = 2
STAGES = ("zero1", "zero2", "zero3", "zero1-bf16")


class Tiny(torch.nn.Module):
    """A model with odd sizes, a tied head, a frozen parameter, a buffer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 5, bias=False)])
        self.frozen = torch.nn.Parameter(torch.linspace(1, 2, 15).reshape(5, 3), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor([0.5]))
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("running", torch.tensor([0.25, 0.125, 3.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state = self.embedding(tokens)
        for layer in self.layers:
            state = state + torch.tanh(layer(state)) * self.scale
        state = state + (state @ self.frozen).sum(-1, keepdim=True) * self.running.sum()
        return self.head(state)


def train(rank: int, name: str, directory: str) -> None:
    """Train three steps and save, as one of the ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    import deepspeed

    torch.manual_seed(0)
    model = Tiny()
    decayed = [weight for weight in model.parameters() if weight.requires_grad and weight.dim() > 1]
    plain = [weight for weight in model.parameters() if weight.requires_grad and weight.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": int(name[4]), "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": name.endswith("bf16")},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        tokens = torch.randint(0, 7, (2, 4), generator=generator)
        logits = engine(tokens)
        engine.backward(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()))
        engine.step()
    engine.save_checkpoint(directory)


def record(name: str, output: Path) -> None:
    """Write one checkpoint and the weights that DeepSpeed makes of it."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(train, (name, scratch), nprocs=RANKS)
        weights = get_fp32_state_dict_from_zero_checkpoint(scratch)
        for script in Path(scratch).glob("*.py"):
            script.unlink()
        shutil.copytree(scratch, output / name)
    save_file({key: weight.clone() for key, weight in weights.items()}, output / f"{name}.safetensors")


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29577", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for stage in sys.argv[2:] or STAGES:
        record(stage, target)
