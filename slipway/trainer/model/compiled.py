"""Whole layers compiled by torch.compile: where that is possible, and how."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType
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
# Layers of one graph. What a call costs the host is paid once for them; the compiler takes longer for more.
_TOGETHER = 4
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
    """Have the layers of the chunks, up to four at a time, and the norm after the last one run as graphs.

    Groups of layers of one kind share a graph. A training has few shapes; each is a graph of its own.

    Parameters
    ----------
    backend
        The compiler, by torch's name.
    """
    # Two stacks, in training, recomputed and in validation, may have more than the 8 graphs of torch's limit.
    importlib.import_module("torch._dynamo").config.recompile_limit = _GRAPHS
    compiled = partial(COMPILER, fullgraph=True, dynamic=False, backend=backend)
    graphs: dict[Any, Callable[..., Any]] = {}
    for chunk in chunks:
        # A teacher's are not wrapped: they have no gradients.
        wrapper = getattr(chunk, "ddp_config", None)
        accumulates = wrapper is not None and not wrapper.overlap_grad_reduce
        for stack in (part for part in chunk.modules() if isinstance(part, TransformerBlock)):
            for group in _split(stack):
                layers = _Layers(group)
                kind = id(stack.config), tuple((name, x.shape) for name, x in layers.named_parameters())
                if kind not in graphs:
                    graphs[kind] = compiled(
                        _make_function(layers), options={"guard_filter_fn": _select_guards}
                    )
                group[0].forward = _Group(graphs[kind], layers, accumulates)
                for layer in group[1:]:
                    layer.forward = _pass
            if stack.final_layernorm is not None:
                stack.final_layernorm.forward = compiled(stack.final_layernorm.forward)


class _Layers(torch.nn.Module):  # type: ignore[misc]
    """Layers one after another, as `TransformerBlock` runs them."""

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, hidden_states: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        for layer in self.layers:
            hidden_states, context = type(layer).forward(layer, hidden_states=hidden_states, **options)
        return hidden_states, context


class _Group:
    """The forward pass of a group's first layer: that of all its layers, by a graph for their weights.

    Parameters
    ----------
    accumulates
        Whether the graph adds gradients to `main_grad`: nothing else waits for them as they are computed.
    """

    def __init__(self, graph: Callable[..., Any], layers: _Layers, accumulates: bool) -> None:
        self._graph, self._accumulates = graph, accumulates
        self._weights = list(layers.parameters())

    def __call__(self, hidden_states: Any, **options: Any) -> tuple[Any, Any]:
        if self._accumulates and torch.is_grad_enabled() and hidden_states.requires_grad:
            # Autograd visits nothing for these.
            weights = [weight.detach() for weight in self._weights]
            # As tensors of their own: those of a buffer have one count of changes, by which autograd would
            # take the gradients of other layers for changes of these.
            gradients = [weight.main_grad.data for weight in self._weights]
        else:
            # Not the parameters themselves: for the layers of the graph it would be compiled with their own.
            weights, gradients = [weight.view_as(weight) for weight in self._weights], None
        return self._graph(weights, gradients, hidden_states, options)  # type: ignore[no-any-return]


def _make_function(layers: _Layers) -> Callable[..., Any]:
    """Return the function of a kind of group that is compiled; `layers` are one of them."""
    names = [name for name, _ in layers.named_parameters()]

    def run(weights: Any, gradients: Any, hidden_states: Any, options: Any) -> Any:
        if gradients is not None:
            pairs = zip(weights, gradients, strict=True)
            weights = [_Accumulation.apply(*pair, hidden_states) for pair in pairs]
        state = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(layers, state, (hidden_states, options))

    # Graphs belong to the code, and those of another kind must not be found there.
    code = run.__code__.replace()
    return FunctionType(code, run.__globals__, run.__name__, run.__defaults__, run.__closure__)


class _Accumulation(torch.autograd.Function):  # type: ignore[misc]
    """The identity of a weight, whose backward pass adds its gradient to another tensor.

    `hidden_states` only needs a gradient, so that the result does.
    """

    @staticmethod
    def forward(ctx: Any, weight: Any, gradient: Any, hidden_states: Any) -> Any:
        ctx.save_for_backward(gradient)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[None, None, None]:
        (total,) = ctx.saved_tensors
        total.add_(gradient)
        return None, None, None


def _select_guards(entries: Sequence[Any]) -> list[bool]:
    """Return which guards are evaluated in each call of a graph.

    Those of what stays as it was are not: of layers, except for their mode, of the weights of a kind of
    group, and of modules.
    """
    constant = ("layers", "names", "weights", "gradients")
    return [
        entry.name.endswith("training")
        or not (entry.is_global or any(name in entry.name for name in constant))
        for entry in entries
    ]


def _split(stack: Any) -> list[list[Any]]:
    """Return the prepared layers of a stack in groups of one size; of one, where layers are recomputed."""
    layers = list(stack.layers)
    for layer in layers:
        _prepare(layer)
    size = 1 if stack.config.recompute_granularity == "full" else _TOGETHER
    while len(layers) % size:
        size -= 1
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _pass(hidden_states: Any, context: Any = None, **_: Any) -> tuple[Any, Any]:
    """Stand in for a layer that the first of its group has computed."""
    return hidden_states, context


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
