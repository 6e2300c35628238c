"""Checks of the cluster against a real Slurm: each of them passes, and each of them fails."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.checks.findings import Finding, Severity
from launcher.checks.gate import check_drafts, gather, refuse, show_to_scheduler
from launcher.checks.gathering.host import cluster_facts
from launcher.checks.registry import CHECKS, run_checks
from launcher.drafting import Draft, Request, draft
from launcher.errors import Mistakes
from launcher.plan import Chain, Container, Plan, Queue
from launcher.sandbox.lifecycle import Sandbox
from tests.checks.plans import GPT, KNOWN, draft_of, findings_of, plan_of
from tests.sandbox.fixtures import booted

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
        whose = ("root", "where", "account=vision")
        self.run("sacctmgr", "--immediate", "modify", "user", *whose, "set", "maxsubmitjobs=5")

    def run(self, *command: str) -> None:
        subprocess.run(command, env=self.sandbox.environment(), check=True, stdout=subprocess.DEVNULL)

    def plan(self, changes: Mapping[str, Any]) -> Plan:
        """Return the plan of a job on one node with two GPUs, with changes to its requests."""
        resources = {"nodes": 1, "tasks_per_node": 2, "gpus_per_node": 2, "time_limit": "10", **changes}
        queue = {field.name: resources.pop(field.name) for field in fields(Queue) if field.name in resources}
        links, image = resources.pop("links", 1), resources.pop("container", None)
        plan = plan_of(GPT, resources=resources)
        job = replace(
            plan.job,
            queue=Queue(**queue),
            chain=Chain(links=links, from_job=False),
            container=Container(image, ()) if image else None,
        )
        return replace(plan, job=job, slurm_conf=str(self.sandbox.slurm_conf))

    def findings(self, *, tasks: int | None = None, **requests: Any) -> list[Finding]:
        """Return the findings of the checks of the cluster."""
        plan = self.plan(requests)
        facts = replace(KNOWN, cluster=cluster_facts(draft_of(plan)), array_tasks=tasks)
        return [finding for finding in run_checks(plan, facts) if finding.id in OURS]

    def draft_with(self, *overrides: str) -> Draft:
        words = [
            "training=gpt3/tiny",
            "cluster=sandbox",
            f"cluster.slurm_conf={self.sandbox.slurm_conf}",
            "training.run.time_limit=10",
            "training.trainer.num_nodes=1",
            *overrides,
        ]
        return draft(Request(overrides=words, command=["slipway"]))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    choices = {"gpu_type": "a100", "accounts": ("research", "vision"), "qos": ("debug",), "cloud_nodes": 0}
    with booted(nodes=2, accounting=True, **choices) as sandbox:
        yield Cluster(sandbox)


@pytest.fixture(autouse=True)
def change_to_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_facts_of_a_real_cluster_are_gathered(cluster: Cluster) -> None:
    facts = gather([cluster.draft_with()])[0].cluster
    assert facts is not None
    assert facts.missing == {}
    assert facts.gpu_types == ("a100",)
    assert {partition.name for partition in facts.partitions or ()} == {
        "gpu",
        "low",
        "high",
        "short",
        "closed",
        "theirs",
    }
    (nodes,) = (facts.nodes or {}).values()
    assert [(node.name, node.gpus, node.cpus) for node in nodes] == [
        (name, (("a100", 8),), 64) for name in ("n1", "n2")
    ]
    assert {(account.account, account.is_default) for account in facts.associations or ()} == {
        ("research", True),
        ("vision", False),
        ("root", False),
    }
    assert {qos.name: dict(qos.limits.per_job) for qos in facts.qos or ()} == {
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
    "cluster.account": [{"account": "vision", "links": 6}],
    "cluster.qos": [
        {"qos": "debug", "partition": "theirs", "account": "vision"},
        {"qos": "debug", "time_limit": "31"},
        {"qos": "debug", "nodes": 2},
        {"qos": "debug", "links": 4},
    ],
    "cluster.partitions": [
        {"partition": "theirs,short", "account": "vision", "qos": "debug", "time_limit": "11"}
    ],
    "cluster.array": [{"tasks": 10_001}],
}


@pytest.mark.parametrize("requests", GREEN, ids=[",".join(requests) for requests in GREEN])
def test_checks_pass_requests_that_can_run(cluster: Cluster, requests: dict[str, Any]) -> None:
    findings = cluster.findings(**requests)
    # Where the machine is busy, a node may not have answered for a while.
    assert [
        finding for finding in findings if finding.severity is Severity.ERROR or finding.id != "cluster.nodes"
    ] == []


@pytest.mark.parametrize("check", RED)
def test_checks_refuse_requests_that_cannot_run(cluster: Cluster, check: str) -> None:
    for requests in RED[check]:
        findings = cluster.findings(**requests)
        assert {(finding.id, finding.severity) for finding in findings} == {(check, Severity.ERROR)}, requests


def test_every_check_has_a_failing_case() -> None:
    """Pyxis has a test of its own below, for this cluster has none."""
    assert [*RED, "cluster.pyxis"] == OURS


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cluster.account=nobody", "cluster.account"),
        ("cluster.qos=debgu", "cluster.qos"),
        ("cluster.qos=locked", "cluster.qos"),
    ],
)
def test_names_that_slurm_refuses_are_reported_with_their_keys(
    cluster: Cluster, override: str, key: str
) -> None:
    (report,) = check_drafts([cluster.draft_with(override)])
    findings = show_to_scheduler(report).select(Severity.ERROR)
    errors = [(found.id, found.key) for found in findings if not found.id.startswith("path.")]
    assert errors == [("scheduler", key)], findings


def test_partition_of_other_accounts_is_a_warning(cluster: Cluster) -> None:
    """Slurm accepts the job, which then waits; since 23.02 the account may be below one that it takes."""
    (finding,) = cluster.findings(partition="theirs")
    assert (finding.id, finding.severity) == ("cluster.account", Severity.WARNING)


def test_missing_pyxis_is_a_warning(cluster: Cluster) -> None:
    (finding,) = cluster.findings(container="nvcr.io#nvidia/nemo:24.07")
    assert (finding.id, finding.severity) == ("cluster.pyxis", Severity.WARNING)


def test_drained_node_is_a_warning(cluster: Cluster) -> None:
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        (finding,) = cluster.findings(nodes=2)
        assert cluster.findings(nodes=1) == []
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=UNDRAIN")
    assert (finding.id, finding.severity) == ("cluster.nodes", Severity.WARNING)
    assert re.search(r"cannot be used now \(.*drained", finding.message)


def test_proposed_values_are_accepted(cluster: Cluster) -> None:
    """The fixes of wrong overrides, pasted behind them, leave no finding of the cluster."""
    words = ["cluster.partition=short", "training.run.time_limit=1:00:00", "training.trainer.num_nodes=2"]
    launch_draft = cluster.draft_with(*words)
    findings = findings_of(launch_draft)
    with pytest.raises(Mistakes, match="partition short limits a job to 00:10:00"):
        refuse(launch_draft, findings)  # as a launch does
    fixes = [(finding.fix or "").split()[0] for finding in findings if finding.id in OURS]
    assert fixes == ["training.run.time_limit=00:10:00", "training.trainer.num_nodes=1"]
    remaining = findings_of(cluster.draft_with(*words, *fixes))
    assert [finding for finding in remaining if finding.id in OURS] == []
