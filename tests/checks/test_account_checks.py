"""Checks of accounts, QOS and their limits, against facts made of literals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.checks.findings import Severity
from launcher.plan import Chain
from launcher.slurm.cluster import (
    Association,
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


@pytest.mark.parametrize(
    ("queue", "message", "fix"),
    [
        (
            {"account": "reserch"},
            "you have no such account; yours: research, vision",
            "did you mean 'research'?",
        ),
        (
            {"account": "vision"},
            "you may use it only in other partitions: big",
            "partitions that would take the job: big (cluster.partition)",
        ),
    ],
)
def test_unusable_account_is_an_error(queue: dict[str, Any], message: str, fix: str | None) -> None:
    finding = only_finding(plan_with(queue), CLUSTER)
    assert (finding.id, finding.severity, finding.fix) == ("cluster.account", Severity.ERROR, fix)
    assert finding.message == f"cluster.account='{queue['account']}': {message}"


def test_findings_that_plugins_of_the_site_may_mend_are_warnings() -> None:
    """Plugins pick the partition, and complete accounts and QOS: none of these is a reason to refuse."""
    filtered = replace(CLUSTER, settings=ENFORCED._replace(has_filters=True))
    without_default = replace(filtered, partitions=(Partition("a"),))
    for plan, cluster in (
        (plan_with(), without_default),
        (plan_with({"partition": "gup"}), filtered),
        (plan_with(nodes=16), filtered),
        (plan_with(cpus_per_task=16), filtered),
        (plan_with({"account": "reserch"}), filtered),
        (plan_with({"qos": "debgu"}), filtered),
    ):
        findings = cluster_findings(plan, cluster)
        assert findings
        assert {finding.severity for finding in findings} == {Severity.WARNING}
        assert all(
            finding.message.endswith("plugins of this Slurm may change what a job asks for")
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


def test_newer_slurm_may_allow_accounts_below_those_of_a_partition() -> None:
    closed = with_partitions(Partition("gpu", True, accounts=("parent",)))
    for release, severity in (((22, 5), Severity.ERROR), ((24, 5), Severity.WARNING)):
        finding = only_finding(plan_with(), replace(closed, settings=ENFORCED._replace(release=release)))
        assert finding.severity is severity


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


def test_an_account_of_another_cluster_may_be_the_default() -> None:
    mine = (Association("a", is_default=None), Association("b", is_default=None))
    assert cluster_findings(plan_with(), replace(CLUSTER, associations=mine)) == []


def test_user_without_an_account_must_name_one() -> None:
    no_default = replace(CLUSTER, associations=(Association("a"), Association("b")))
    finding = only_finding(plan_with(), no_default)
    assert finding.message.startswith("cluster.account=null: you have no default account")
    assert finding.fix == "one of yours: a, b"
    # Slurm's names are in small letters.
    assert cluster_findings(plan_with({"account": "B"}), no_default) == []
    assert only_finding(plan_with(), replace(CLUSTER, associations=())).id == "cluster.account"


def test_limits_that_are_not_enforced_are_at_most_a_warning() -> None:
    (mine, other) = CLUSTER.associations or ()
    limited = (mine._replace(limits=Limits(per_job={"node": 1})), other)
    half = replace(CLUSTER, settings=ENFORCED._replace(enforced=frozenset({"associations"})))
    assert cluster_findings(plan_with(), replace(half, associations=limited)) == []
    lax = replace(CLUSTER, settings=ENFORCED._replace(enforced=frozenset()))
    finding = only_finding(plan_with({"account": "reserch"}), lax)
    assert (finding.id, finding.severity) == ("cluster.account", Severity.WARNING)
    assert cluster_findings(plan_with({"qos": "debug"}), lax) == []
    assert cluster_findings(plan_with(), replace(lax, associations=())) == []
    no_accounting = replace(lax, settings=Settings(1001, 10_000), associations=(), qos=())
    assert cluster_findings(plan_with({"account": "any", "qos": "any"}), no_accounting) == []


def test_a_partition_may_be_for_other_accounts() -> None:
    for closed in (
        Partition("gpu", True, accounts=("a", "b")),
        Partition("gpu", True, denied_accounts=("research",)),
    ):
        finding = only_finding(plan_with(), with_partitions(closed))
        assert (finding.id, finding.severity) == ("cluster.account", Severity.ERROR)
        assert finding.message.endswith("partition gpu takes no jobs of account research")
        assert finding.fix == ("its accounts: a, b" if closed.accounts else None)


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


@pytest.mark.parametrize(
    ("queue", "message", "fix"),
    [
        ({"qos": "debgu"}, "cluster.qos='debgu': this Slurm has no such QOS", "did you mean 'debug'?"),
        ({"qos": "idle"}, "cluster.qos='idle': account research may not use it", "it may use: debug, normal"),
    ],
)
def test_unusable_qos_is_an_error(queue: dict[str, Any], message: str, fix: str | None) -> None:
    finding = only_finding(plan_with(queue), CLUSTER)
    assert (finding.id, finding.severity) == ("cluster.qos", Severity.ERROR)
    assert (finding.message, finding.fix) == (message, fix)


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


def test_a_partition_may_be_for_other_qos() -> None:
    for closed in (Partition("gpu", True, qos=("debug",)), Partition("gpu", True, denied_qos=("normal",))):
        finding = only_finding(plan_with(), with_partitions(closed))
        assert finding.id == "cluster.qos"
        assert finding.message == "cluster.qos=null: partition gpu takes no jobs of QOS normal"
