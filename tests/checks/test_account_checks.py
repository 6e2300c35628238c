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
from tests.checks.clusters import CLUSTER, ENFORCED, LIMIT, NODES, asked, only, told, with_partitions


@pytest.mark.parametrize(
    ("queue", "message", "fix"),
    [
        (
            {"account": "reserch"},
            "you have no such account; yours: research, vision",
            "did you mean 'research'?",
        ),
        ({"account": "vision"}, "it is yours in other partitions alone: big", None),
    ],
)
def test_the_account(queue: dict[str, Any], message: str, fix: str | None) -> None:
    found = only(asked(queue), CLUSTER)
    assert (found.id, found.severity, found.fix) == ("cluster.account", Severity.ERROR, fix)
    assert found.message == f"cluster.account='{queue['account']}': {message}"


def test_plugins_of_the_site_may_put_right_what_seems_wrong() -> None:
    """They pick the partition, and complete accounts and QOS: none of these is a reason to refuse."""
    filtered = replace(CLUSTER, settings=ENFORCED._replace(has_filters=True))
    without_default = replace(filtered, partitions=(Partition("a"),))
    for plan, cluster in (
        (asked(), without_default),
        (asked({"partition": "gup"}), filtered),
        (asked(nodes=16), filtered),
        (asked(cpus_per_task=16), filtered),
        (asked({"account": "reserch"}), filtered),
        (asked({"qos": "debgu"}), filtered),
    ):
        found = told(plan, cluster)
        assert found
        assert {one.severity for one in found} == {Severity.WARNING}
        assert all(
            one.message.endswith("plugins of this Slurm may change what a job asks for") for one in found
        )
    named = only(asked({"partition": "gpu"}, nodes=16), filtered)
    assert named.severity is Severity.ERROR


def test_names_of_accounts_and_qos_in_letters_of_any_size() -> None:
    partition = Partition("gpu", True, total_nodes=4, accounts=("Research",), qos=("Normal",))
    assert told(asked({"account": "RESEARCH", "qos": "Normal"}), with_partitions(partition)) == []
    assert told(asked(gpus_per_node=None, gres="gpu:A100:8"), CLUSTER) == []


def test_accounts_below_those_that_a_partition_takes() -> None:
    closed = with_partitions(Partition("gpu", True, accounts=("parent",)))
    for release, severity in (((22, 5), Severity.ERROR), ((24, 5), Severity.WARNING)):
        found = only(asked(), replace(closed, settings=ENFORCED._replace(release=release)))
        assert found.severity is severity


def test_first_limit_that_is_set_holds() -> None:
    (mine, other) = CLUSTER.associations or ()
    short = mine._replace(limits=Limits(max_seconds=600, per_job={"node": 1, "cpu": 1}))
    high = Qos("normal", Limits(max_seconds=86400, per_job={"node": 8, "cpu": 1000}))
    cluster = replace(CLUSTER, associations=(short, other), qos=(high,))
    assert told(asked(time_limit="1:00:00"), cluster) == []
    low = Qos("normal", Limits(per_job={"node": 1}))
    own = Qos("part", Limits(per_job={"node": 8, "cpu": 1000}))
    first = (Partition("gpu", True, total_nodes=4, own_qos="part"),)
    cluster = replace(CLUSTER, partitions=first, qos=(low, own))
    assert told(asked(), cluster) == []
    over = low._replace(flags=frozenset({"overpartqos"}))
    assert only(asked(), replace(cluster, qos=(over, own))).id == "cluster.qos"


def test_the_qos_of_the_account_may_overrule_its_partition() -> None:
    flags = frozenset({"partitiontimelimit", "partitionmaxnodes", "partitionminnodes"})
    small = Partition("gpu", True, total_nodes=4, max_seconds=60, max_nodes=1)
    cluster = replace(CLUSTER, partitions=(small,), qos=(Qos("normal", flags=flags),))
    assert told(asked(time_limit="1:00:00"), cluster) == []
    assert (
        told(asked(), replace(cluster, partitions=(Partition("gpu", True, total_nodes=4, min_nodes=3),)))
        == []
    )


def test_an_account_of_another_cluster_may_be_the_default() -> None:
    mine = (Association("a", is_default=None), Association("b", is_default=None))
    assert told(asked(), replace(CLUSTER, associations=mine)) == []


def test_user_without_an_account_must_name_one() -> None:
    others = replace(CLUSTER, associations=(Association("a"), Association("b")))
    found = only(asked(), others)
    assert found.message.startswith("cluster.account=null: you have no account of your own")
    assert found.fix == "one of yours: a, b"
    assert told(asked({"account": "B"}), others) == []  # Slurm's names are in small letters
    assert only(asked(), replace(CLUSTER, associations=())).id == "cluster.account"


def test_limits_that_are_not_enforced_are_at_most_a_warning() -> None:
    (mine, other) = CLUSTER.associations or ()
    limited = (mine._replace(limits=Limits(per_job={"node": 1})), other)
    half = replace(CLUSTER, settings=ENFORCED._replace(enforced=frozenset({"associations"})))
    assert told(asked(), replace(half, associations=limited)) == []
    lax = replace(CLUSTER, settings=ENFORCED._replace(enforced=frozenset()))
    found = only(asked({"account": "reserch"}), lax)
    assert (found.id, found.severity) == ("cluster.account", Severity.WARNING)
    assert told(asked({"qos": "debug"}), lax) == []
    assert told(asked(), replace(lax, associations=())) == []
    none = replace(lax, settings=Settings(1001, 10_000), associations=(), qos=())
    assert told(asked({"account": "any", "qos": "any"}), none) == []


def test_a_partition_may_be_for_other_accounts() -> None:
    for closed in (
        Partition("gpu", True, accounts=("a", "b")),
        Partition("gpu", True, denied_accounts=("research",)),
    ):
        found = only(asked(), with_partitions(closed))
        assert (found.id, found.severity) == ("cluster.account", Severity.ERROR)
        assert found.message.endswith("partition gpu takes no jobs of account research")
        assert found.fix == ("its accounts: a, b" if closed.accounts else None)


def test_limits_of_an_account() -> None:
    (mine, _) = CLUSTER.associations or ()
    limits = Limits(per_job={"gres/gpu": 8}, per_group={"cpu": 4}, max_submitted=2)
    cluster = replace(CLUSTER, associations=(mine._replace(limits=limits),))
    chain = Chain(links=3, from_job=False)
    messages = [found.message for found in told(asked(chain=chain), cluster)]
    assert messages == [
        "cluster.account=null: 3 jobs at once, and account research lets a user submit 2",
        f"{NODES}=2: 16 CPUs in all, and account research gives all of its jobs together 4 at most",
        f"{NODES}=2: 16 GPUs in all, and account research gives a job 8 at most",
    ]


@pytest.mark.parametrize(
    ("queue", "message", "fix"),
    [
        ({"qos": "debgu"}, "cluster.qos='debgu': this Slurm has no such QOS", "did you mean 'debug'?"),
        ({"qos": "idle"}, "cluster.qos='idle': account research may not use it", "it may use: debug, normal"),
    ],
)
def test_the_qos(queue: dict[str, Any], message: str, fix: str | None) -> None:
    found = only(asked(queue), CLUSTER)
    assert (found.id, found.severity) == ("cluster.qos", Severity.ERROR)
    assert (found.message, found.fix) == (message, fix)


def test_limits_of_a_qos() -> None:
    plan = asked({"qos": "debug"}, time_limit="1:00:00", chain=Chain(links=9, from_job=False))
    found = told(plan, CLUSTER)
    assert {one.id for one in found} == {"cluster.qos"}
    assert [one.message for one in found] == [
        f"{LIMIT}='1:00:00': QOS debug gives a job 00:30:00 at most",
        "cluster.qos='debug': 9 jobs at once, and QOS debug lets a user submit 4",
        f"{NODES}=2: 2 nodes in all, and QOS debug gives a job 1 at most",
    ]
    assert told(asked({"qos": "debug"}, nodes=1, time_limit="30"), CLUSTER) == []


def test_the_qos_of_a_partition_holds_too() -> None:
    least = (*(CLUSTER.qos or ()), Qos("whole", Limits(least={"node": 3}, per_user={"mem": 1024})))
    cluster = replace(with_partitions(Partition("gpu", True, own_qos="whole")), qos=least)
    assert [found.message for found in told(asked(memory="4G"), cluster)] == [
        f"{NODES}=2: 2 nodes in all, and QOS whole is for jobs with 3 at least",
        f"{NODES}=2: 8192M of memory in all, and QOS whole gives a user 1024 at most",
    ]
    assert told(asked(nodes=3), cluster) == []


def test_a_partition_may_be_for_other_qos() -> None:
    for closed in (Partition("gpu", True, qos=("debug",)), Partition("gpu", True, denied_qos=("normal",))):
        found = only(asked(), with_partitions(closed))
        assert found.id == "cluster.qos"
        assert found.message == "cluster.qos=null: partition gpu takes no jobs of QOS normal"
