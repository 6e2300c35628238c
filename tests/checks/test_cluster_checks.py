"""Checks of what a job asks of the cluster's nodes, against facts made of literals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.checks.findings import Severity
from launcher.checks.registry import CHECKS
from launcher.plan import Chain, Container, Plan
from launcher.slurm.cluster import (
    Association,
    ClusterFacts,
    Partition,
)
from launcher.slurm.notations import expand_hostlist, feature_names, has_features, is_plain
from tests.checks.clusters import (
    CLUSTER,
    DOWN,
    ENFORCED,
    GPU,
    LIMIT,
    NODES,
    asked,
    node,
    only,
    told,
    with_nodes,
    with_partitions,
)
from tests.checks.plans import KNOWN


def test_nothing_is_found_where_all_fits() -> None:
    for plan in (
        asked(),
        asked(nodes=4),
        asked({"partition": "gpu", "account": "research", "qos": "normal"}, cpus_per_task=8, memory="500G"),
        asked({"constraint": "ib&a100", "nodelist": "n[1-2]", "exclude": "n4"}),
        asked(gpus_per_node=None, gres="gpu:a100:8"),
        asked(memory="0", gpu="a100-80gb"),
    ):
        assert told(plan, CLUSTER) == []


@pytest.mark.parametrize(
    ("plan", "cluster", "message", "fix"),
    [
        (
            asked({"partition": "gup"}),
            CLUSTER,
            "cluster.partition='gup': this Slurm has no partition gup",
            "did you mean 'gpu'?",
        ),
        (
            asked(),
            with_partitions(Partition("a"), Partition("b")),
            "cluster.partition=null: this Slurm has no default partition",
            "one of: a, b",
        ),
        (
            asked({"partition": "b"}),
            with_partitions(Partition("a"), Partition("b", state="DRAIN")),
            "cluster.partition='b': partition b takes no new jobs: its state is DRAIN",
            "partitions that are up: a",
        ),
    ],
)
def test_the_partition(plan: Plan, cluster: ClusterFacts, message: str, fix: str) -> None:
    found = only(plan, replace(cluster, nodes={"gpu": GPU, "b": GPU}))
    assert (found.id, found.severity, found.fix) == ("cluster.partition", Severity.ERROR, fix)
    assert found.message.startswith(message)


def test_a_partition_that_is_down_is_a_warning() -> None:
    """Its jobs wait, and one that is up among several will do."""
    both = (Partition("a", state="DOWN"), Partition("b"))
    cluster = replace(CLUSTER, partitions=both, nodes={"a": GPU, "b": GPU})
    found = only(asked({"partition": "a"}), cluster)
    assert (found.id, found.severity) == ("cluster.partition", Severity.WARNING)
    assert told(asked({"partition": "a,b"}), cluster) == []


def test_a_time_limit_beyond_the_partitions() -> None:
    found = only(asked(time_limit="2-00:00:00"), CLUSTER)
    assert (found.id, found.severity) == ("cluster.time_limit", Severity.ERROR)
    assert found.message == f"{LIMIT}='2-00:00:00': partition gpu gives a job 1-00:00:00 at most"
    assert found.fix == f"{LIMIT}=1-00:00:00\npartitions that give as much time: big (cluster.partition)"
    assert only(asked(time_limit="UNLIMITED"), CLUSTER).id == "cluster.time_limit"


def test_time_limits_that_will_do() -> None:
    """One of several partitions is enough; a QOS may overrule them; without a limit there is the default."""
    for plan in (asked(time_limit=None), asked(time_limit="no limit")):
        assert not any(found.id == "cluster.time_limit" for found in told(plan, CLUSTER))
    long = asked({"qos": "long"}, time_limit="9-00:00:00")
    mine = replace(CLUSTER, associations=(Association("research", None, ("long",), None, True),))
    assert told(long, mine) == []
    both = replace(CLUSTER, nodes={"gpu": GPU, "big": GPU})
    assert told(asked({"partition": "gpu,big"}, time_limit="9-00:00:00"), both) == []


@pytest.mark.parametrize(
    ("plan", "cluster", "message", "fix"),
    [
        (
            asked(nodes=16),
            CLUSTER,
            f"{NODES}=16: partition gpu has 4 nodes",
            f"{NODES}=4 is the largest that could run\n"
            "partitions with as many nodes: big (cluster.partition)",
        ),
        (
            asked(nodes=4),
            with_partitions(Partition("gpu", is_default=True, max_nodes=3)),
            f"{NODES}=4: partition gpu gives a job 3 nodes at most",
            f"{NODES}=3 is the largest that could run",
        ),
        (
            asked(nodes=2),
            with_partitions(Partition("gpu", is_default=True, min_nodes=4)),
            f"{NODES}=2: partition gpu gives a job 4 nodes at least",
            f"{NODES}=4",
        ),
        (
            asked({"constraint": "h100|new"}, nodes=2),
            with_nodes(node("n1", features=frozenset({"h100"})), node("n2", features=frozenset({"new"}))),
            None,
            None,
        ),
        (
            asked({"constraint": "ib&a100", "exclude": "n[1,9]"}, nodes=2),
            with_nodes(node("n1"), node("n2"), node("n3", features=frozenset({"ib"}))),
            f"{NODES}=2: partition gpu has 1 node (with ib&a100, without n[1,9])",
            f"{NODES}=1 is the largest that could run\n"
            "partitions with as many nodes: big (cluster.partition)",
        ),
        (
            asked({"constraint": "a10"}),
            CLUSTER,
            "cluster.constraint='a10': no node of partition gpu has the feature a10",
            "did you mean 'a100'?",
        ),
        (
            asked({"nodelist": "n[3-5]"}),
            CLUSTER,
            "cluster.nodelist='n[3-5]': partition gpu has no node n5",
            "its nodes: n1, n2, n3, n4",
        ),
    ],
)
def test_the_number_of_nodes(plan: Plan, cluster: ClusterFacts, message: str | None, fix: str | None) -> None:
    found = told(plan, cluster)
    if message is None:
        assert found == []
        return
    assert [(one.id, one.severity, one.message, one.fix) for one in found] == [
        ("cluster.nodes", Severity.ERROR, message, fix)
    ]


def test_nodes_that_cannot_be_used_now_keep_a_job_waiting() -> None:
    cluster = with_nodes(node("n1"), node("n2", **DOWN), node("n3", **DOWN), node("n4"))
    found = only(asked(nodes=3), cluster)
    assert (found.id, found.severity) == ("cluster.nodes", Severity.WARNING)
    assert found.message == (
        f"{NODES}=3: partition gpu has 4 nodes, of which 2 cannot be used now (down*):"
        " the job would wait for them"
    )
    assert found.fix == f"{NODES}=2 is the largest that could start now"
    assert told(asked(nodes=2), cluster) == []
    assert told(asked({"reservation": "mine"}, nodes=3), cluster) == []


def test_a_range_of_nodes_needs_its_least() -> None:
    assert told(asked(nodes=2, max_nodes=16), CLUSTER) == []
    found = only(asked(nodes=6, max_nodes=8), CLUSTER)
    assert found.message == "resilience.nodes='6-8': partition gpu has 4 nodes"
    assert found.fix is not None and found.fix.startswith("resilience.nodes.min=4 ")


@pytest.mark.parametrize(
    ("plan", "check", "message", "fix"),
    [
        (
            asked(gpus_per_node=16),
            "cluster.gpus",
            "cluster.gpus_per_node=16: no node of partition gpu can give 16 GPUs, and the job wants 2",
            "there: 4 with 8 × a100",
        ),
        (
            asked(gpus_per_node=None, gres="gpu:h100:8"),
            "cluster.gpus",
            "cluster.gres='gpu:h100:8': no node of partition gpu can give 8 × h100, and the job wants 2",
            "there: 4 with 8 × a100",
        ),
        (
            asked(gpus_per_node=None, gpus_per_task=2),
            "cluster.gpus",
            "cluster.gpus_per_task=2: no node of partition gpu can give 16 GPUs, and the job wants 2",
            "there: 4 with 8 × a100",
        ),
        (
            asked(cpus_per_task=16),
            "cluster.cpus",
            "cluster.cpus_per_task=16: no node of partition gpu can give 128 CPUs for 8 tasks,"
            " and the job wants 2",
            "there: 4 with 64 CPUs",
        ),
        (
            asked(memory="1T"),
            "cluster.memory",
            "cluster.mem='1T': no node of partition gpu can give 1048576M of memory, and the job wants 2",
            "there: 4 with 512000M",
        ),
    ],
)
def test_requests_beyond_every_node_are_errors(plan: Plan, check: str, message: str, fix: str) -> None:
    found = [one for one in told(plan, CLUSTER) if one.id == check]
    assert [(one.severity, one.message, one.fix) for one in found] == [(Severity.ERROR, message, fix)]


def test_some_nodes_have_it_and_too_few() -> None:
    few = with_nodes(node("n1"), node("n2", gpus=()), node("n3", gpus=(("a100", 4),)))
    found = only(asked(nodes=2), few)
    assert found.message == (
        "cluster.gpus_per_node=8: 1 of the 3 nodes of partition gpu can give 8 GPUs, and the job wants 2"
    )
    assert found.fix == "there: 1 with 4 × a100, 1 with 8 × a100, 1 with no GPU"


def test_no_node_has_all_of_it() -> None:
    """Each of the wishes has enough nodes, and both together have none."""
    mixed = with_nodes(
        node("n1"), node("n2"), node("n3", gpus=(), memory=2**21), node("n4", gpus=(), memory=2**21)
    )
    found = only(asked(memory="1T"), mixed)
    assert found.message == (
        f"{NODES}=2: partition gpu has 4 nodes, and 0 of them with all that the job asks for"
    )


def test_another_gpu_than_estimates_count_with() -> None:
    found = only(asked(gpu="h100-80gb"), replace(CLUSTER, gpu_types=("a100-sxm4-40gb",)))
    assert (found.id, found.severity) == ("cluster.gpus", Severity.WARNING)
    assert found.message.endswith("the GPUs of partition gpu are a100-40gb")
    assert told(asked(gpu="h100-80gb"), replace(CLUSTER, gpu_types=("a100", "h100"))) == []


def test_nodes_that_slurm_keeps_to_itself_may_have_all() -> None:
    """Those of a cloud that are powered down are shown to nobody with PrivateData=cloud."""
    cloud = replace(with_nodes(node("n1", gpus=())), partitions=(Partition("gpu", True, total_nodes=64),))
    assert told(asked({"constraint": "new", "nodelist": "n[7-8]"}, nodes=16), cloud) == []
    assert told(asked(nodes=63, cpus_per_task=8), cloud) == []
    assert only(asked(nodes=65), cloud).message.endswith("partition gpu has 64 nodes")


def test_flags_of_sbatch_that_ask_for_less() -> None:
    plan = asked(cpus_per_task=16, time_limit="2-00:00:00")
    further = {"overcommit": True, "time-min": "1:00:00"}
    lenient = replace(plan, job=replace(plan.job, queue=replace(plan.job.queue, further=further)))
    assert {one.id for one in told(plan, CLUSTER)} == {"cluster.cpus", "cluster.time_limit"}
    assert told(lenient, CLUSTER) == []


def test_memory_that_nobody_told_slurm() -> None:
    assert told(asked(memory="1T"), with_nodes(*(each._replace(memory=1) for each in GPU))) == []


def test_more_jobs_at_once_than_there_is_room_for() -> None:
    small = replace(CLUSTER, settings=ENFORCED._replace(max_jobs=4, max_array=0))
    found = only(asked(chain=Chain(links=9, from_job=False)), small)
    assert (found.id, found.severity) == ("cluster.array", Severity.ERROR)
    assert found.message.startswith("resilience.links=9: 9 jobs at once, and this Slurm has room for 4")
    assert told(asked(chain=Chain(links=9)), small) == []  # each submits the next
    assert [one.id for one in told(asked(), small, array_tasks=9)] == ["cluster.array"] * 2
    assert told(asked(), CLUSTER, array_tasks=9) == []


def test_an_array_of_a_preparation_fits_into_the_cluster() -> None:
    small = replace(CLUSTER, settings=ENFORCED._replace(max_jobs=100, max_array=8))
    plan = asked()

    def of_tasks(number: int) -> Plan:
        queue = replace(plan.job.queue, further={"array": f"0-{number - 1}"})
        payload = replace(plan.job.payload, array_key="--task")
        return replace(plan, job=replace(plan.job, queue=queue, payload=payload))

    assert told(of_tasks(8), small) == []
    found = only(of_tasks(9), small)
    assert (found.id, found.fix) == ("cluster.array", "data_preparation.tasks=8: the result is the same")
    assert found.message.startswith("data_preparation.tasks=9: an array of this Slurm has 8 tasks at most")
    fewer = replace(CLUSTER, settings=ENFORCED._replace(max_jobs=4, max_array=8))
    assert "has 4 tasks at most" in only(of_tasks(8), fewer).message


def test_pyxis_is_needed_where_there_is_a_container() -> None:
    plan = asked()
    plan = replace(plan, job=replace(plan.job, container=Container("nvcr.io#nvidia/nemo:24.07", ())))
    assert told(plan, CLUSTER) == []
    found = only(plan, replace(CLUSTER, pyxis=False))
    assert (found.id, found.severity) == ("cluster.pyxis", Severity.WARNING)
    assert "container-image" in found.message


def test_a_part_that_could_not_be_had_skips_its_checks_and_says_why() -> None:
    blind = replace(CLUSTER, nodes=None, missing={"nodes": "Slurm did not answer within 5 s"})
    found = told(asked(), blind)
    assert [one.id for one in found] == ["cluster.nodes", "cluster.gpus", "cluster.cpus", "cluster.memory"]
    assert {(one.severity, one.why) for one in found} == {
        (Severity.SKIPPED, "Slurm did not answer within 5 s")
    }
    assert found[1].message == (
        "not checked: the nodes have as many GPUs, of the type that is asked for"
        " (Slurm did not answer within 5 s)"
    )


def test_facts_that_were_not_gathered_are_not_reported() -> None:
    """A dry run does not look, and without a container nobody asks for Pyxis."""
    assert told(asked(), ClusterFacts()) == []
    assert told(asked(), None) == []
    ours = [check for check in CHECKS if check.id.startswith("cluster.")]
    assert not any(check.is_applicable(KNOWN) for check in ours)
    blind = replace(KNOWN, cluster=ClusterFacts(missing={"partitions": "it is gone"}))
    assert [check.id for check in ours if check.is_applicable(blind)] == [
        "cluster.partition",
        "cluster.time_limit",
    ]


@pytest.mark.parametrize(
    ("hostlist", "names"),
    [
        ("n1", {"n1"}),
        ("n[1-3,7],m01", {"n1", "n2", "n3", "n7", "m01"}),
        ("r[1-2]n[08-10]", {f"r{row}n{number}" for row in (1, 2) for number in ("08", "09", "10")}),
        ("", set()),
        ("n1, n2", {"n1", "n2"}),
        ("/home/me/nodes", None),
        ("n[1-", None),
        ("n[3-1]", None),
        ("n[1-9999999]", None),
        ("r[0-999]n[0-999]", None),
    ],
)
def test_lists_of_nodes(hostlist: str, names: set[str] | None) -> None:
    assert expand_hostlist(hostlist) == names


def test_constraints() -> None:
    both = frozenset({"a", "b"})
    assert has_features("a&b", both)
    assert not has_features("a&c", both)
    assert has_features("c|a", both)
    assert has_features("c&a|b", both)
    assert not has_features("a|b&c", both)  # from left to right
    assert is_plain("a&b|c")
    assert not any(map(is_plain, ("[a|b]", "a*2&b*2", "(a|b)&c", "a,b")))
    assert list(feature_names("[rack1*2&rack2*4]|(a,b)")) == ["rack1", "rack2", "a", "b"]
