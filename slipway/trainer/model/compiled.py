"""Whole layers compiled by torch.compile: where that is possible, and how."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from slipway.common.errors import UserError
from slipway.trainer.config.layout import find_compile_obstacle
from slipway.trainer.config.settings import COMPILE, Settings
from slipway.trainer.cpu_shim import COMPILER
from slipway.trainer.model.backends import attention_backend

# Of one function; a mistake that takes a graph for each step comes to it soon, and is an error then.
_GRAPHS = 32
# The variable that names the compiler, and where it is not set, those that are looked for.
_COMPILERS = {"cpu": ("CXX", ["g++"]), "cuda": ("CC", ["gcc", "clang", "cc"])}


def explain_uncompiled(
    settings: Settings, config: TransformerConfig, chunks: Sequence[Any], device: Any
) -> str | None:
    """Return why the layers of wrapped chunks are not to be compiled; None if they are.

    Raises
    ------
    UserError
        If ``model.compile_layers=True`` asks for it and it is not possible.
    """
    if settings.compile_layers == "False":
        return "as the configuration says"
    if settings.compile_layers == "auto" and device.type != "cuda":
        return "auto compiles on a GPU alone"
    obstacle = find_compile_obstacle(settings)
    if obstacle is None and (backend := attention_backend(settings.architecture, config, device)) != "sdpa":
        obstacle = f"the attention is {backend}: expected model.attention_backend=sdpa"
    if obstacle is None and chunks[0].ddp_config.overlap_param_gather:
        obstacle = "weights are gathered inside the layers: expected model.optim.overlap_param_sync=False"
    obstacle = obstacle or _find_missing_compiler(device)
    if obstacle and settings.compile_layers == "True":
        raise UserError(f"{COMPILE}=True: {obstacle}", found_by="node")
    return obstacle


def compile_layers(chunks: Sequence[Any], backend: str = "inductor") -> None:
    """Have each layer of the chunks, and the norm after the last one, run as one compiled graph.

    Layers of one kind share a graph. A training has few shapes; each is a graph of its own.

    Parameters
    ----------
    backend
        The compiler, by torch's name.
    """
    # Two stacks, in training, recomputed and in validation, may have more than the 8 graphs of torch's limit.
    importlib.import_module("torch._dynamo").config.recompile_limit = _GRAPHS
    compiled = partial(COMPILER, fullgraph=True, dynamic=False, backend=backend)
    stacks = [part for chunk in chunks for part in chunk.modules() if isinstance(part, TransformerBlock)]
    for stack in stacks:
        for layer in stack.layers:
            _prepare(layer)
            layer.forward = compiled(layer.forward)
        if stack.final_layernorm is not None:
            stack.final_layernorm.forward = compiled(stack.final_layernorm.forward)


def guard_dropout(settings: Settings, device: Any) -> None:
    """Keep torch 2.13's compiler from wrong dropout masks on CUDA (pytorch/pytorch issue 198333).

    It draws four numbers at a time as if a kernel's elements were neighbours in memory, also where they are
    not; but not if it is to draw the numbers that uncompiled code draws.
    """
    stacks = filter(None, (settings.encoder, settings.architecture))
    if device.type == "cuda" and torch.__version__ >= (2, 13) and any(x.hidden_dropout for x in stacks):
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.align_random_eager = True


def _find_missing_compiler(device: Any) -> str | None:
    """Return that the compiler is missing with which torch, or Triton for CUDA, makes kernels callable."""
    variable, names = _COMPILERS[device.type]
    names = os.environ.get(variable, "").split()[:1] or names
    if any(map(shutil.which, names)):
        return None
    missing = f"{socket.gethostname()} has no {' or '.join(names)} on PATH"
    return f"{missing}: expected a compiler, or its path in {variable}"


def _prepare(layer: Any) -> None:
    """Leave out of a layer what cannot be part of a graph, and is of no use in one."""
    # It enables gradients, also in validation: the first layer, whose input has none, would be another graph.
    layer.bias_dropout_add_exec_handler = nullcontext
    for attention in (layer.self_attention, layer.cross_attention):
        # Selective recomputation is of the scores, which SDPA does not keep.
        attention.checkpoint_core_attention = False
    for module in layer.modules():
        # Apex's kernel adds to the gradients of weights, and a graph returns them.
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False
