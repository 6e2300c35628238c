"""Checks of the cluster against a real one: each of them content, and each of them not."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.checks.findings import Finding, Severity
from launcher.checks.gate import gather, refuse
from launcher.checks.gathering.host import cluster_facts
from launcher.checks.registry import CHECKS, run_checks
from launcher.drafting import Draft, Request, draft
from launcher.errors import Mistakes
from launcher.plan import Chain, Container, Plan, Queue
from launcher.sandbox.lifecycle import Sandbox
from tests.checks.plans import GPT, KNOWN, draft_of, findings_of, plan_of
from tests.sandbox.fixtures import booted, slurm_is_at_least

pytestmark = pytest.mark.slurm

OURS = [check.id for check in CHECKS if check.id.startswith("cluster.")]


class Cluster:
    """Two nodes with GPUs of a type, accounts and a QOS that limits; and partitions of several kinds."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        for partition in (
            "short Nodes=n1 MaxTime=10 MaxNodes=1",
            "closed Nodes=n1 State=DRAIN",
            "theirs Nodes=n[1-2] AllowAccounts=vision AllowQos=normal",
        ):
            self.run("scontrol", "create", *f"PartitionName={partition}".split())
        limits = ("maxwall=30", "maxtres=node=1", "maxsubmitjobsperuser=3")
        self.run("sacctmgr", "--immediate", "modify", "qos", "debug", "set", *limits)
        self.run("sacctmgr", "--immediate", "add", "qos", "locked")

    def run(self, *command: str) -> None:
        subprocess.run(command, env=self.sandbox.environment(), check=True, stdout=subprocess.DEVNULL)

    def plan(self, changes: Mapping[str, Any]) -> Plan:
        """A job of one node with two GPUs, or of what else is asked for."""
        asked = {"nodes": 1, "tasks_per_node": 2, "gpus_per_node": 2, "time_limit": "10", **changes}
        queue = {name: asked.pop(name) for name in Queue.__slots__ if name in asked}
        links, image = asked.pop("links", 1), asked.pop("container", None)
        plan = plan_of(GPT, resources=asked)
        job = replace(
            plan.job,
            queue=Queue(**queue),
            chain=Chain(links=links, from_job=False),
            container=Container(image, ()) if image else None,
        )
        return replace(plan, job=job, slurm_conf=str(self.sandbox.slurm_conf))

    def found(self, *, tasks: int | None = None, **asked: Any) -> list[Finding]:
        """Return the findings of the checks of the cluster."""
        plan = self.plan(asked)
        facts = replace(KNOWN, cluster=cluster_facts(draft_of(plan)), array_tasks=tasks)
        return [one for one in run_checks(plan, facts) if one.id in OURS]

    def drafted(self, *overrides: str) -> Draft:
        asked = [
            "training=gpt3/tiny",
            "cluster=sandbox",
            f"cluster.slurm_conf={self.sandbox.slurm_conf}",
            "training.run.time_limit=10",
            "training.trainer.num_nodes=1",
            *overrides,
        ]
        return draft(Request(overrides=asked, command=["slipway"]))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    choices = {"gpu_type": "a100", "accounts": ("research", "vision"), "qos": ("debug",), "cloud_nodes": 0}
    with booted(nodes=2, accounting=True, **choices) as sandbox:
        yield Cluster(sandbox)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_cluster_tells_what_it_has(cluster: Cluster) -> None:
    facts = gather([cluster.drafted()])[0].cluster
    assert facts is not None
    assert facts.missing == {}
    assert facts.gpu_types == ("a100",)
    assert {one.name for one in facts.partitions or ()} == {"gpu", "low", "high", "short", "closed", "theirs"}
    (nodes,) = (facts.nodes or {}).values()
    assert [(one.name, one.gpus, one.cpus) for one in nodes] == [
        (name, (("a100", 8),), 64) for name in ("n1", "n2")
    ]
    assert {(one.account, one.is_default) for one in facts.associations or ()} == {
        ("research", True),
        ("vision", False),
        ("root", False),
    }
    assert {one.name: dict(one.limits.per_job) for one in facts.qos or ()} == {
        "normal": {},
        "debug": {"node": 1},
        "locked": {},
    }


GREEN: list[dict[str, Any]] = [
    {},
    {"partition": "gpu", "account": "vision", "qos": "normal", "cpus_per_task": 32, "nodes": 2},
    {"partition": "short,low", "gpus_per_node": None, "gres": "gpu:a100:8", "time_limit": "1-0"},
    {"partition": "theirs", "account": "vision", "memory": "100G", "gpu": "a100-80gb"},
    {"qos": "debug", "time_limit": "30", "nodelist": "n2", "links": 3},
]

THEIRS = {"partition": "theirs"}
RED: dict[str, list[dict[str, Any]]] = {
    "cluster.partition": [{"partition": "gup"}, {"partition": "closed"}],
    "cluster.time_limit": [{"partition": "short", "time_limit": "11"}],
    "cluster.nodes": [
        {"nodes": 3},
        {"nodes": 2, "partition": "short"},
        {"constraint": "nvlink"},
        {"nodelist": "n3"},
    ],
    "cluster.gpus": [{"gpus_per_node": None, "gres": "gpu:h100:2"}, {"gpus_per_node": 9}],
    "cluster.cpus": [{"cpus_per_task": 33}],
    "cluster.memory": [{"memory": "1T"}],
    "cluster.account": [{"account": "nobody"}, THEIRS],
    "cluster.qos": [
        {"qos": "debgu"},
        {"qos": "locked"},
        {"qos": "debug", "time_limit": "31"},
        {"qos": "debug", "nodes": 2},
        {"qos": "debug", "links": 4},
        {"qos": "debug", "partition": "theirs", "account": "vision"},
    ],
    "cluster.array": [{"tasks": 10_001}],
}


@pytest.mark.parametrize("asked", GREEN, ids=[",".join(asked) for asked in GREEN])
def test_checks_are_content(cluster: Cluster, asked: dict[str, Any]) -> None:
    found = cluster.found(**asked)
    # Where the machine is busy, a node may not have answered for a while.
    assert [one for one in found if one.severity is Severity.ERROR or one.id != "cluster.nodes"] == []


@pytest.mark.parametrize("check", RED)
def test_a_check_finds_what_cannot_run(cluster: Cluster, check: str) -> None:
    for asked in RED[check]:
        found = cluster.found(**asked)
        # Since 23.02 the account may be one below those that the partition takes.
        is_unsure = (check, asked) == ("cluster.account", THEIRS) and slurm_is_at_least(23, 2)
        severity = Severity.WARNING if is_unsure else Severity.ERROR
        assert {(one.id, one.severity) for one in found} == {(check, severity)}, asked


def test_every_check_is_seen_red() -> None:
    """Pyxis' is below, for want of one on this cluster."""
    assert [*RED, "cluster.pyxis"] == OURS


def test_pyxis_is_not_there(cluster: Cluster) -> None:
    (found,) = cluster.found(container="nvcr.io#nvidia/nemo:24.07")
    assert (found.id, found.severity) == ("cluster.pyxis", Severity.WARNING)


def test_a_node_that_is_drained_is_waited_for(cluster: Cluster) -> None:
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        (found,) = cluster.found(nodes=2)
        assert cluster.found(nodes=1) == []
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=UNDRAIN")
    assert (found.id, found.severity) == ("cluster.nodes", Severity.WARNING)
    assert re.search(r"cannot be used now \(.*drained", found.message)


def test_proposed_values_are_accepted(cluster: Cluster) -> None:
    """Words of the user's that are wrong in three ways, and the fixes pasted behind them."""
    asked = ["cluster.partition=short", "training.run.time_limit=1:00:00", "training.trainer.num_nodes=2"]
    made = cluster.drafted(*asked)
    found = findings_of(made)
    with pytest.raises(Mistakes, match="partition short gives a job 00:10:00 at most"):
        refuse(made, found)  # as a launch does
    fixes = [(one.fix or "").split()[0] for one in found if one.id in OURS]
    assert fixes == ["training.run.time_limit=00:10:00", "training.trainer.num_nodes=1"]
    again = findings_of(cluster.drafted(*asked, *fixes))
    assert [one for one in again if one.id in OURS] == []
