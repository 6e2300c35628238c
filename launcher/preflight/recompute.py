"""The options of recomputing activations fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.preflight.findings import Finding, error
from launcher.preflight.shape import stacks_of
from launcher.preflight.values import Values

_GRANULARITIES = ("full", "selective")
_METHODS = ("block", "uniform")


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


def _full(values: Values, start: str) -> Iterator[Finding]:
    method = values.raw(f"{start}_method")
    if method not in _METHODS:
        told = "activations_checkpoint_granularity=full needs block or uniform here"
        yield _problem(f"{start}_method", method, told, f"{start}_granularity")
    if values.raw(f"{start}_num_layers") is None:
        told = "activations_checkpoint_granularity=full needs a number of layers here, such as 1"
        yield _problem(f"{start}_num_layers", None, told, f"{start}_granularity")


def _selective(values: Values, start: str) -> Iterator[Finding]:
    method, layers = values.raw(f"{start}_method"), values.raw(f"{start}_num_layers")
    if method is not None and method not in _METHODS:
        yield _problem(f"{start}_method", method, "expected block, uniform or null")
    if layers is not None:
        told = "activations_checkpoint_granularity=selective is for all layers; null is needed here"
        yield _problem(f"{start}_num_layers", layers, told, f"{start}_granularity")


def _problem(key: str, value: Any, told: str, *also: str) -> Finding:
    return error("model.recompute", key, value, told, also=also)
