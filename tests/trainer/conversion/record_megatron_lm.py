"""The recorder of recorded/megatron_lm: checkpoints that Megatron-LM's own pretrain_gpt.py saves.

Run by hand with an interpreter and a checkout for which tests/megatron_lm pass (the tests need neither)::

    SLIPWAY_MEGATRON_LM_SOURCE=CHECKOUT PYTHON tests/trainer/conversion/record_megatron_lm.py OUTPUT

For each model two ranks train two steps and save. Then one rank loads that, as Megatron-LM does for any
layout, and writes the logits of a few tokens beside it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

CPU = Path(__file__).resolve().parents[2]
TOKENS = 12
MODELS = {
    "gpt2": ["--make-vocab-size-divisible-by", "48"],
    "llama": [
        "--normalization",
        "RMSNorm",
        "--swiglu",
        "--position-embedding-type",
        "rope",
        "--no-rope-fusion",
        "--disable-bias-linear",
        "--group-query-attention",
        "--num-query-groups",
        "2",
        "--untie-embeddings-and-output-weights",
        "--make-vocab-size-divisible-by",
        "8",
        "--rotary-base",
        "50000",
        "--norm-epsilon",
        "1e-6",
        "--no-bias-swiglu-fusion",
        "--ffn-hidden-size",
        "24",
    ],
}
LAYOUTS = {"gpt2": ["--pipeline-model-parallel-size", "2"], "llama": ["--tensor-model-parallel-size", "2"]}
COMMON = [
    "--num-layers",
    "2",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "16",
    "--max-position-embeddings",
    "16",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "2",
    "--train-iters",
    "2",
    "--lr",
    "1e-2",
    "--mock-data",
    "--split",
    "99,1,0",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "63",
    "--transformer-impl",
    "local",
    "--num-workers",
    "0",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--save",
    "checkpoints",
    "--save-interval",
    "2",
    "--no-save-optim",
    "--no-save-rng",
    "--ckpt-format",
    "torch_dist",
    "--eval-iters",
    "1",
    "--eval-interval",
    "1000",
    "--distributed-backend",
    "gloo",
    "--init-method-std",
    "0.2",
]


def run(script: Path, ranks: int, options: list[str], directory: Path) -> None:
    """Run a script as several ranks."""
    source = os.environ["SLIPWAY_MEGATRON_LM_SOURCE"]
    paths = [str(CPU / "megatron_lm/cpu"), str(CPU / "nemo/cpu"), source]
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, *COMMON, *options],
            cwd=directory,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{script} failed")


def write_logits() -> None:
    """Write the logits of a few tokens, as the one rank of Megatron-LM's own program."""
    import torch
    from gpt_builders import gpt_builder
    from megatron.training import get_model
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.initialize import initialize_megatron
    from model_provider import model_provider
    from safetensors.torch import save_file

    initialize_megatron()
    (model,) = get_model(partial(model_provider, gpt_builder), wrap_with_ddp=False)
    load_checkpoint([model], None, None)
    model.eval()
    tokens = torch.arange(TOKENS)[None] * 5 % 64
    mask = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    with torch.no_grad():
        logits = model(tokens, torch.arange(TOKENS)[None], mask)
    save_file({"tokens": tokens, "logits": logits.float().contiguous()}, "logits.safetensors")


def main(output: Path) -> None:
    """Record all models."""
    source = Path(os.environ["SLIPWAY_MEGATRON_LM_SOURCE"])
    for name, options in MODELS.items():
        directory = output / name
        directory.mkdir(parents=True)
        run(source / "pretrain_gpt.py", 2, [*options, *LAYOUTS[name]], directory)
        run(Path(__file__).resolve(), 1, [*options, "--load", "checkpoints"], directory)
        with tarfile.open(output / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(directory / "checkpoints", "checkpoints")
            archive.add(directory / "logits.safetensors", "logits.safetensors")


if __name__ == "__main__":
    if "RANK" in os.environ:
        write_logits()
    else:
        main(Path(sys.argv[1]))
