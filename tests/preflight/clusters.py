"""What a cluster of four nodes of eight GPUs says of itself, made of literals."""

from __future__ import annotations

from typing import Any

from launcher.preflight.cluster_facts import (
    Association,
    ClusterFacts,
    Limits,
    Node,
    Partition,
    Qos,
    Settings,
)


def node(name: str, **changes: Any) -> Node:
    features = frozenset({"ib", "a100"})
    base = Node(name, "idle", True, cpus=64, memory=512_000, gpus=(("a100", 8),), features=features)
    return base._replace(**changes)


GPU = tuple(node(f"n{number}") for number in range(1, 5))
DOWN = {"state": "down*", "is_usable": False}

ENFORCED = Settings(1001, 10_000, True, frozenset({"associations", "limits", "qos"}))

CLUSTER = ClusterFacts(
    gpu_types=("a100",),
    partitions=(
        Partition("gpu", is_default=True, total_nodes=4, max_seconds=86400),
        Partition("short", total_nodes=4, max_seconds=600, max_nodes=1),
        Partition("big", total_nodes=64),
    ),
    nodes={"gpu": GPU},
    settings=ENFORCED,
    associations=(
        Association("research", qos=("debug", "normal"), default_qos="normal", is_default=True),
        Association("vision", partition="big", qos=("normal",)),
    ),
    qos=(
        Qos("normal"),
        Qos("debug", Limits(max_seconds=1800, per_job={"node": 1}, max_submitted=4)),
        Qos("idle"),
        Qos("long", flags=frozenset({"denyonlimit", "partitiontimelimit"})),
    ),
    pyxis=True,
)
