"""The options of recomputing activations fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.checks.findings import Finding, error, warning
from launcher.estimates.parallelism import stacks_of
from launcher.estimates.values import Values, full

_GRANULARITIES = ("full", "selective")
_METHODS = ("block", "uniform")
# Parts of a layer that selective recomputing knows, the last not in megatron-core 0.12, and what some need.
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
_NEEDED = {"moe_act": "model.moe_grouped_gemm", "mla_up_proj": "model.multi_latent_attention"}
_NAMED = "model.recompute_modules"
# NeMo's, of which neither the memory nor the time is estimated.
_PARTIAL = (
    "num_micro_batches_with_partial_activation_checkpoints",
    "activations_checkpoint_layers_per_pipeline",
)


def recompute_problems(values: Values) -> Iterator[Finding]:
    """What megatron/core/transformer/transformer_config.py raises, of `activations_checkpoint_*`.

    `full` needs a method and a number of layers, `selective` takes no number of layers. Without a granularity
    nothing is recomputed, and the others are not read.
    """
    for stack in stacks_of(values):
        start = f"{stack.node}.activations_checkpoint"
        granularity = values.raw(f"{start}_granularity")
        if granularity is None:
            continue
        if granularity not in _GRANULARITIES:
            yield _problem(f"{start}_granularity", granularity, "expected full, selective or null")
        elif granularity == "full":
            yield from _full(values, start)
        else:
            yield from _selective(values, start)
            yield from _modules(values)
        yield from _partial(values, stack.node)


def _full(values: Values, start: str) -> Iterator[Finding]:
    method = values.raw(f"{start}_method")
    if method not in _METHODS:
        told = "activations_checkpoint_granularity=full needs block or uniform here"
        yield _problem(f"{start}_method", method, told, f"{start}_granularity")
    if values.raw(f"{start}_num_layers") is None:
        told = "activations_checkpoint_granularity=full needs a number of layers here, such as 1"
        yield _problem(f"{start}_num_layers", None, told, f"{start}_granularity")


def _partial(values: Values, node: str) -> Iterator[Finding]:
    """Warn of layers or micro batches that are not recomputed after all: estimates count all of them."""
    for name in _PARTIAL:
        value = values.raw(f"{node}.{name}")
        if value:
            told = "memory and time are estimated without it, as if all micro batches recomputed alike"
            yield warning("model.recompute", f"{node}.{name}", value, told)


def _selective(values: Values, start: str) -> Iterator[Finding]:
    method, layers = values.raw(f"{start}_method"), values.raw(f"{start}_num_layers")
    if method is not None and method not in _METHODS:
        yield _problem(f"{start}_method", method, "expected block, uniform or null")
    if layers is not None:
        told = "activations_checkpoint_granularity=selective is for all layers; null is needed here"
        yield _problem(f"{start}_num_layers", layers, told, f"{start}_granularity")


def _modules(values: Values) -> Iterator[Finding]:
    named = values.raw(_NAMED)
    if named is None:
        return
    if not isinstance(named, (list, tuple)) or not all(name in _MODULES for name in named):
        yield _problem(_NAMED, named, f"expected a list of {', '.join(_MODULES)}, or null")
        return
    for name, key in _NEEDED.items():
        if name in named and not values.flag(key):
            yield _problem(_NAMED, named, f"{name} needs {full(key)}=True", key)


def _problem(key: str, value: Any, told: str, *also: str) -> Finding:
    return error("model.recompute", key, value, told, also=also)
