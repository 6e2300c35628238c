"""Checks of accounts, QOS and their limits, against facts made of literals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.checks.facts import SubmissionFacts
from launcher.checks.findings import Severity
from launcher.checks.registry import run_checks
from launcher.errors import literal
from launcher.plan import Chain
from launcher.slurm.cluster import (
    Limits,
    Partition,
    Qos,
    Settings,
)
from tests.checks.clusters import (
    CLUSTER,
    ENFORCED,
    LIMIT,
    NODES,
    cluster_findings,
    only_finding,
    plan_with,
    with_partitions,
)
from tests.checks.plans import KNOWN


@pytest.mark.parametrize(
    ("queue", "refusal", "key", "fix"),
    [
        (
            {"account": "reserch"},
            "Invalid account or account/partition combination specified",
            "cluster.account",
            "did you mean 'research'?",
        ),
        (
            {"account": None},
            "Invalid account or account/partition combination specified",
            "cluster.account",
            "valid: research, vision",
        ),
        (
            {},
            "Job's account not permitted to use this partition (theirs allows vision not research)",
            "cluster.account",
            "valid: research, vision",
        ),
        ({"qos": "debgu"}, "Invalid qos specification", "cluster.qos", "did you mean 'debug'?"),
        ({"reservation": "x"}, "Requested reservation is invalid", "cluster.reservation", None),
        ({"licenses": "x"}, "Invalid license specification", "cluster.licenses", None),
        ({}, "Requested time limit is invalid", None, None),
    ],
)
def test_refusal_of_slurm_names_the_key_that_it_is_about(
    queue: dict[str, Any], refusal: str, key: str | None, fix: str | None
) -> None:
    answer = SubmissionFacts(is_refused=True, refusal=f"Slurm would refuse this job: {refusal}")
    facts = replace(KNOWN, cluster=CLUSTER, submission=answer)
    (finding,) = [each for each in run_checks(plan_with(queue), facts) if each.id == "scheduler"]
    assert (finding.severity, finding.key, finding.fix) == (Severity.ERROR, key, fix)
    value = f"{key}={literal(next(iter(queue.values()), None))}: " if key is not None else ""
    assert finding.message == f"{value}Slurm would refuse this job: {refusal}"


def test_findings_that_plugins_of_the_site_may_mend_are_warnings() -> None:
    """Plugins pick the partition, and complete accounts and QOS: none of these is a reason to refuse."""
    filtered = replace(CLUSTER, settings=ENFORCED._replace(has_filters=True))
    without_default = replace(filtered, partitions=(Partition("a"),))
    for plan, cluster in (
        (plan_with(), without_default),
        (plan_with({"partition": "gup"}), filtered),
        (plan_with(nodes=16), filtered),
        (plan_with(cpus_per_task=16), filtered),
    ):
        findings = cluster_findings(plan, cluster)
        assert findings
        assert {finding.severity for finding in findings} == {Severity.WARNING}
        assert all(
            finding.message.endswith("plugins of this Slurm may change the job's request")
            for finding in findings
        )
    error = only_finding(plan_with({"partition": "gpu"}, nodes=16), filtered)
    assert error.severity is Severity.ERROR


def test_names_of_accounts_and_qos_are_case_insensitive() -> None:
    partition = Partition("gpu", True, total_nodes=4, accounts=("Research",), qos=("Normal",))
    assert (
        cluster_findings(plan_with({"account": "RESEARCH", "qos": "Normal"}), with_partitions(partition))
        == []
    )
    assert cluster_findings(plan_with(gpus_per_node=None, gres="gpu:A100:8"), CLUSTER) == []


def test_first_limit_that_is_set_holds() -> None:
    (mine, other) = CLUSTER.associations or ()
    short = mine._replace(limits=Limits(max_seconds=600, per_job={"node": 1, "cpu": 1}))
    high = Qos("normal", Limits(max_seconds=86400, per_job={"node": 8, "cpu": 1000}))
    cluster = replace(CLUSTER, associations=(short, other), qos=(high,))
    assert cluster_findings(plan_with(time_limit="1:00:00"), cluster) == []
    low = Qos("normal", Limits(per_job={"node": 1}))
    own = Qos("part", Limits(per_job={"node": 8, "cpu": 1000}))
    first = (Partition("gpu", True, total_nodes=4, own_qos="part"),)
    cluster = replace(CLUSTER, partitions=first, qos=(low, own))
    assert cluster_findings(plan_with(), cluster) == []
    over = low._replace(flags=frozenset({"overpartqos"}))
    assert only_finding(plan_with(), replace(cluster, qos=(over, own))).id == "cluster.qos"


def test_the_qos_of_the_account_may_overrule_its_partition() -> None:
    flags = frozenset({"partitiontimelimit", "partitionmaxnodes", "partitionminnodes"})
    small = Partition("gpu", True, total_nodes=4, max_seconds=60, max_nodes=1)
    cluster = replace(CLUSTER, partitions=(small,), qos=(Qos("normal", flags=flags),))
    assert cluster_findings(plan_with(time_limit="1:00:00"), cluster) == []
    assert (
        cluster_findings(
            plan_with(), replace(cluster, partitions=(Partition("gpu", True, total_nodes=4, min_nodes=3),))
        )
        == []
    )


def test_limits_hold_where_slurm_enforces_them() -> None:
    (mine, other) = CLUSTER.associations or ()
    limited = replace(CLUSTER, associations=(mine._replace(limits=Limits(per_job={"node": 1})), other))
    assert only_finding(plan_with(), limited).id == "cluster.account"
    lax = replace(limited, settings=ENFORCED._replace(enforced=frozenset()))
    assert cluster_findings(plan_with(), lax) == []
    no_accounting = replace(lax, settings=Settings(1001, 10_000), associations=(), qos=())
    assert cluster_findings(plan_with({"account": "any", "qos": "any"}), no_accounting) == []


def test_limits_of_an_account_hold() -> None:
    (mine, _) = CLUSTER.associations or ()
    limits = Limits(per_job={"gres/gpu": 8}, per_group={"cpu": 4}, max_submitted=2)
    cluster = replace(CLUSTER, associations=(mine._replace(limits=limits),))
    chain = Chain(links=3, from_job=False)
    messages = [finding.message for finding in cluster_findings(plan_with(chain=chain), cluster)]
    assert messages == [
        "cluster.account=null: 3 jobs at once, and account research lets a user submit 2",
        f"{NODES}=2: 16 CPUs in all, but account research limits all of its jobs together to 4",
        f"{NODES}=2: 16 GPUs in all, but account research limits a job to 8",
    ]


def test_limits_of_a_qos_hold() -> None:
    plan = plan_with({"qos": "debug"}, time_limit="1:00:00", chain=Chain(links=9, from_job=False))
    findings = cluster_findings(plan, CLUSTER)
    assert {finding.id for finding in findings} == {"cluster.qos"}
    assert [finding.message for finding in findings] == [
        f"{LIMIT}='1:00:00': QOS debug limits a job to 00:30:00",
        "cluster.qos='debug': 9 jobs at once, and QOS debug lets a user submit 4",
        f"{NODES}=2: 2 nodes in all, but QOS debug limits a job to 1",
    ]
    assert cluster_findings(plan_with({"qos": "debug"}, nodes=1, time_limit="30"), CLUSTER) == []


def test_the_qos_of_a_partition_holds_too() -> None:
    least = (*(CLUSTER.qos or ()), Qos("whole", Limits(least={"node": 3}, per_user={"mem": 1024})))
    cluster = replace(with_partitions(Partition("gpu", True, own_qos="whole")), qos=least)
    assert [finding.message for finding in cluster_findings(plan_with(memory="4G"), cluster)] == [
        f"{NODES}=2: 2 nodes in all, but QOS whole requires at least 3",
        f"{NODES}=2: 8192M of memory in all, but QOS whole limits a user to 1024",
    ]
    assert cluster_findings(plan_with(nodes=3), cluster) == []


def test_a_partition_may_be_for_other_accounts() -> None:
    for closed in (
        Partition("gpu", True, accounts=("a", "b")),
        Partition("gpu", True, denied_accounts=("research",)),
    ):
        finding = only_finding(plan_with(), with_partitions(closed))
        # Since 23.02 the account may be one below those that the partition takes.
        severity = Severity.WARNING if closed.accounts else Severity.ERROR
        assert (finding.id, finding.severity) == ("cluster.account", severity)
        assert "partition gpu takes no jobs of account research" in finding.message
        assert finding.fix == ("its accounts: a, b" if closed.accounts else None)


def test_a_partition_may_be_for_other_qos() -> None:
    for closed in (Partition("gpu", True, qos=("debug",)), Partition("gpu", True, denied_qos=("normal",))):
        finding = only_finding(plan_with(), with_partitions(closed))
        assert finding.id == "cluster.qos"
        assert finding.message == "cluster.qos=null: partition gpu takes no jobs of QOS normal"
