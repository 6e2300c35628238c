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
    cluster_findings,
    node,
    only_finding,
    plan_with,
    with_nodes,
    with_partitions,
)
from tests.checks.plans import KNOWN


def test_requests_that_fit_have_no_findings() -> None:
    for plan in (
        plan_with(),
        plan_with(nodes=4),
        plan_with(
            {"partition": "gpu", "account": "research", "qos": "normal"}, cpus_per_task=8, memory="500G"
        ),
        plan_with({"constraint": "ib&a100", "nodelist": "n[1-2]", "exclude": "n4"}),
        plan_with(gpus_per_node=None, gres="gpu:a100:8"),
        plan_with(memory="0", gpu="a100-80gb"),
    ):
        assert cluster_findings(plan, CLUSTER) == []


@pytest.mark.parametrize(
    ("plan", "cluster", "message", "fix"),
    [
        (
            plan_with({"partition": "gup"}),
            CLUSTER,
            "cluster.partition='gup': this Slurm has no partition gup",
            "did you mean 'gpu'?",
        ),
        (
            plan_with(),
            with_partitions(Partition("a"), Partition("b")),
            "cluster.partition=null: this Slurm has no default partition",
            "one of: a, b",
        ),
        (
            plan_with({"partition": "b"}),
            with_partitions(Partition("a", total_nodes=4), Partition("b", state="DRAIN")),
            "cluster.partition='b': partition b takes no new jobs: its state is DRAIN",
            "partitions that would take the job: a (cluster.partition)",
        ),
    ],
)
def test_unusable_partition_is_an_error(plan: Plan, cluster: ClusterFacts, message: str, fix: str) -> None:
    finding = only_finding(plan, replace(cluster, nodes={"gpu": GPU, "b": GPU}))
    assert (finding.id, finding.severity, finding.fix) == ("cluster.partition", Severity.ERROR, fix)
    assert finding.message.startswith(message)


def alike(*partitions: Partition) -> ClusterFacts:
    """Return a cluster whose partitions have the same four nodes."""
    same = [each._replace(total_nodes=4, node_names="n[1-4]") for each in partitions]
    return replace(with_partitions(*same), nodes={each.name: GPU for each in partitions[:2]})


@pytest.mark.parametrize(
    ("plan", "fix"),
    [
        (plan_with({"partition": "a"}), "partitions that would take the job: d (cluster.partition)"),
        (plan_with({"partition": "a", "exclude": "n[1-4]"}), None),
        (plan_with({"partition": "a", "account": "none"}), None),
        (
            plan_with({"partition": "a"}, nodes=5),
            "training.trainer.num_nodes=4 is the largest that could run",
        ),
    ],
)
def test_a_partition_is_proposed_that_takes_the_job_in_every_respect(plan: Plan, fix: str | None) -> None:
    cluster = alike(
        Partition("a", state="DRAIN"),
        Partition("b", accounts=("other",)),
        Partition("c", max_nodes=1),
        Partition("d"),
        Partition("e", max_seconds=60),
        Partition("f", qos=("debug",)),
    )
    findings = {finding.id: finding for finding in cluster_findings(plan, cluster)}
    finding = findings.get("cluster.nodes") or findings["cluster.partition"]
    assert finding.fix == fix


def test_several_partitions_of_which_none_takes_the_job_are_an_error() -> None:
    cluster = alike(Partition("a", max_nodes=1), Partition("b", qos=("debug",)), Partition("c"))
    finding = only_finding(plan_with({"partition": "a,b"}), cluster)
    assert (finding.id, finding.severity) == ("cluster.partitions", Severity.ERROR)
    assert finding.message == (
        "cluster.partition='a,b': all of them refuse the job: "
        "partition a limits a job to 1 node; partition b takes no jobs of QOS normal"
    )
    assert cluster_findings(plan_with({"partition": "a,b,c"}), cluster) == []


def test_what_an_explicit_partition_cannot_hold_stays_an_error_beside_filters() -> None:
    cluster = replace(CLUSTER, settings=ENFORCED._replace(has_filters=True))
    for queue, severity in (({"partition": "gpu"}, Severity.ERROR), ({}, Severity.WARNING)):
        assert only_finding(plan_with(queue, nodes=5), cluster).severity is severity


def test_a_partition_that_is_down_is_a_warning() -> None:
    """Jobs of a partition that is down wait, and one that is up among several is enough."""
    partitions = (Partition("a", state="DOWN"), Partition("b"))
    cluster = replace(CLUSTER, partitions=partitions, nodes={"a": GPU, "b": GPU})
    finding = only_finding(plan_with({"partition": "a"}), cluster)
    assert (finding.id, finding.severity) == ("cluster.partition", Severity.WARNING)
    assert cluster_findings(plan_with({"partition": "a,b"}), cluster) == []


def test_time_limit_beyond_the_partitions_is_an_error() -> None:
    finding = only_finding(plan_with(time_limit="2-00:00:00"), CLUSTER)
    assert (finding.id, finding.severity) == ("cluster.time_limit", Severity.ERROR)
    assert finding.message == f"{LIMIT}='2-00:00:00': partition gpu limits a job to 1-00:00:00"
    assert finding.fix == f"{LIMIT}=1-00:00:00\npartitions that would take the job: big (cluster.partition)"
    assert only_finding(plan_with(time_limit="UNLIMITED"), CLUSTER).id == "cluster.time_limit"


def test_time_limits_within_those_of_slurm_pass() -> None:
    """One of several partitions is enough; a QOS may overrule them; without a limit there is the default."""
    for plan in (plan_with(time_limit=None), plan_with(time_limit="no limit")):
        assert not any(finding.id == "cluster.time_limit" for finding in cluster_findings(plan, CLUSTER))
    long = plan_with({"qos": "long"}, time_limit="9-00:00:00")
    mine = replace(CLUSTER, associations=(Association("research", None, ("long",), None, True),))
    assert cluster_findings(long, mine) == []
    two_partitions = replace(CLUSTER, nodes={"gpu": GPU, "big": GPU})
    assert (
        cluster_findings(plan_with({"partition": "gpu,big"}, time_limit="9-00:00:00"), two_partitions) == []
    )


@pytest.mark.parametrize(
    ("plan", "cluster", "message", "fix"),
    [
        (
            plan_with(nodes=16),
            CLUSTER,
            f"{NODES}=16: partition gpu has 4 nodes",
            f"{NODES}=4 is the largest that could run\n"
            "partitions that would take the job: big (cluster.partition)",
        ),
        (
            plan_with(nodes=4),
            with_partitions(Partition("gpu", is_default=True, max_nodes=3)),
            f"{NODES}=4: partition gpu limits a job to 3 nodes",
            f"{NODES}=3 is the largest that could run",
        ),
        (
            plan_with(nodes=2),
            with_partitions(Partition("gpu", is_default=True, min_nodes=4)),
            f"{NODES}=2: partition gpu requires at least 4 nodes per job",
            f"{NODES}=4",
        ),
        (
            plan_with({"constraint": "h100|new"}, nodes=2),
            with_nodes(node("n1", features=frozenset({"h100"})), node("n2", features=frozenset({"new"}))),
            None,
            None,
        ),
        (
            plan_with({"constraint": "ib&a100", "exclude": "n[1,9]"}, nodes=2),
            with_nodes(node("n1"), node("n2"), node("n3", features=frozenset({"ib"}))),
            f"{NODES}=2: partition gpu has 1 node (with ib&a100, without n[1,9])",
            f"{NODES}=1 is the largest that could run\n"
            "partitions that would take the job: big (cluster.partition)",
        ),
        (
            plan_with({"constraint": "a10"}),
            CLUSTER,
            "cluster.constraint='a10': no node of partition gpu has the feature a10",
            "did you mean 'a100'?",
        ),
        (
            plan_with({"nodelist": "n[3-5]"}),
            CLUSTER,
            "cluster.nodelist='n[3-5]': partition gpu has no node n5",
            "its nodes: n1, n2, n3, n4",
        ),
    ],
)
def test_node_counts_that_slurm_cannot_give_are_errors(
    plan: Plan, cluster: ClusterFacts, message: str | None, fix: str | None
) -> None:
    findings = cluster_findings(plan, cluster)
    if message is None:
        assert findings == []
        return
    assert [(finding.id, finding.severity, finding.message, finding.fix) for finding in findings] == [
        ("cluster.nodes", Severity.ERROR, message, fix)
    ]


def test_nodes_that_cannot_be_used_now_keep_a_job_waiting() -> None:
    cluster = with_nodes(node("n1"), node("n2", **DOWN), node("n3", **DOWN), node("n4"))
    finding = only_finding(plan_with(nodes=3), cluster)
    assert (finding.id, finding.severity) == ("cluster.nodes", Severity.WARNING)
    assert finding.message == (
        f"{NODES}=3: partition gpu has 4 nodes; 2 of them cannot be used now (down*): the job would wait"
    )
    assert finding.fix == f"{NODES}=2 is the largest that could start now"
    assert cluster_findings(plan_with(nodes=2), cluster) == []
    assert cluster_findings(plan_with({"reservation": "mine"}, nodes=3), cluster) == []


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (CLUSTER, "partition gpu has 4 nodes: it never gets more than 4"),
        (
            replace(CLUSTER, partitions=(Partition("gpu", is_default=True, total_nodes=4, max_nodes=3),)),
            "partition gpu has 4 nodes: it never gets more than 3",
        ),
    ],
)
def test_range_above_what_the_partition_gives_is_a_warning(cluster: ClusterFacts, message: str) -> None:
    finding = only_finding(plan_with(nodes=2, max_nodes=8), cluster)
    assert (finding.id, finding.severity) == ("cluster.nodes", Severity.WARNING)
    assert finding.message == f"resilience.nodes='2-8': {message}"
    assert finding.fix == f"resilience.nodes.max={message[-1]}"


def test_spare_nodes_count() -> None:
    assert cluster_findings(plan_with(nodes=3, spares=1), CLUSTER) == []
    finding = only_finding(plan_with(nodes=3, spares=2), CLUSTER)
    assert finding.message == "resilience.spares=2: partition gpu has 4 nodes"
    assert (finding.fix or "").startswith("resilience.spares=1 is the largest that could run")
    assert "spares" not in (only_finding(plan_with(nodes=5, spares=2), CLUSTER).fix or "")


def test_node_range_needs_its_minimum() -> None:
    assert cluster_findings(plan_with(nodes=2, max_nodes=4), CLUSTER) == []
    finding = only_finding(plan_with(nodes=6, max_nodes=8), CLUSTER)
    assert finding.message == "resilience.nodes='6-8': partition gpu has 4 nodes"
    assert finding.fix is not None and finding.fix.startswith("resilience.nodes.min=4 ")


@pytest.mark.parametrize(
    ("plan", "check", "message", "fix"),
    [
        (
            plan_with(gpus_per_node=16),
            "cluster.gpus",
            "cluster.gpus_per_node=16: no node of partition gpu can give 16 GPUs; the job needs 2 such nodes",
            "available: 4 with 8 × a100",
        ),
        (
            plan_with(gpus_per_node=None, gres="gpu:h100:8"),
            "cluster.gpus",
            "cluster.gres='gpu:h100:8': no node of partition gpu can give 8 × h100;"
            " the job needs 2 such nodes",
            "available: 4 with 8 × a100",
        ),
        (
            plan_with(gpus_per_node=None, gpus_per_task=2),
            "cluster.gpus",
            "cluster.gpus_per_task=2: no node of partition gpu can give 16 GPUs; the job needs 2 such nodes",
            "available: 4 with 8 × a100",
        ),
        (
            plan_with(cpus_per_task=16),
            "cluster.cpus",
            "cluster.cpus_per_task=16: no node of partition gpu can give 128 CPUs for 8 tasks;"
            " the job needs 2 such nodes",
            "available: 4 with 64 CPUs",
        ),
        (
            plan_with(memory="1T"),
            "cluster.memory",
            "cluster.mem='1T': no node of partition gpu can give 1048576M of memory;"
            " the job needs 2 such nodes",
            "available: 4 with 512000M",
        ),
    ],
)
def test_requests_beyond_every_node_are_errors(plan: Plan, check: str, message: str, fix: str) -> None:
    findings = [finding for finding in cluster_findings(plan, CLUSTER) if finding.id == check]
    assert [(finding.severity, finding.message, finding.fix) for finding in findings] == [
        (Severity.ERROR, message, fix)
    ]


def test_too_few_nodes_with_the_gpus_is_an_error() -> None:
    few = with_nodes(node("n1"), node("n2", gpus=()), node("n3", gpus=(("a100", 4),)))
    finding = only_finding(plan_with(nodes=2), few)
    assert finding.message == (
        "cluster.gpus_per_node=8: only 1 of the 3 nodes of partition gpu can give 8 GPUs;"
        " the job needs 2 such nodes"
    )
    assert finding.fix == "available: 1 with 4 × a100, 1 with 8 × a100, 1 with no GPU"


def test_no_node_with_all_of_the_requests_is_an_error() -> None:
    """Each of the requests has enough nodes, and both together have none."""
    mixed = with_nodes(
        node("n1"), node("n2"), node("n3", gpus=(), memory=2**21), node("n4", gpus=(), memory=2**21)
    )
    finding = only_finding(plan_with(memory="1T"), mixed)
    assert finding.message == (f"{NODES}=2: partition gpu has 4 nodes; only 0 can run the job")


def test_gpu_other_than_that_of_the_estimates_is_a_warning() -> None:
    finding = only_finding(plan_with(gpu="h100-80gb"), replace(CLUSTER, gpu_types=("a100-sxm4-40gb",)))
    assert (finding.id, finding.severity) == ("cluster.gpus", Severity.WARNING)
    assert finding.message.endswith("the GPUs of partition gpu are a100-40gb")
    assert cluster_findings(plan_with(gpu="h100-80gb"), replace(CLUSTER, gpu_types=("a100", "h100"))) == []


def test_hidden_cloud_nodes_may_have_all_that_is_requested() -> None:
    """Slurm with PrivateData=cloud shows nobody the cloud's nodes that are powered down."""
    cloud = replace(with_nodes(node("n1", gpus=())), partitions=(Partition("gpu", True, total_nodes=64),))
    assert cluster_findings(plan_with({"constraint": "new", "nodelist": "n[7-8]"}, nodes=16), cloud) == []
    assert cluster_findings(plan_with(nodes=63, cpus_per_task=8), cloud) == []
    assert only_finding(plan_with(nodes=65), cloud).message.endswith("partition gpu has 64 nodes")


def test_sbatch_flags_may_request_less() -> None:
    plan = plan_with(cpus_per_task=16, time_limit="2-00:00:00")
    further = {"overcommit": True, "time-min": "1:00:00"}
    lenient = replace(plan, job=replace(plan.job, queue=replace(plan.job.queue, further=further)))
    assert {finding.id for finding in cluster_findings(plan, CLUSTER)} == {
        "cluster.cpus",
        "cluster.time_limit",
    }
    assert cluster_findings(lenient, CLUSTER) == []


def test_unconfigured_memory_of_nodes_is_not_checked() -> None:
    assert (
        cluster_findings(
            plan_with(memory="1T"), with_nodes(*(gpu_node._replace(memory=1) for gpu_node in GPU))
        )
        == []
    )


def test_more_jobs_at_once_than_slurm_has_room_for_is_an_error() -> None:
    small = replace(CLUSTER, settings=ENFORCED._replace(max_jobs=4, max_array=0))
    error = only_finding(plan_with(chain=Chain(links=9, from_job=False)), small)
    assert (error.id, error.severity) == ("cluster.array", Severity.ERROR)
    assert error.message.startswith("resilience.links=9: 9 jobs at once, and this Slurm has room for 4")
    assert cluster_findings(plan_with(chain=Chain(links=9)), small) == []  # each submits the next
    assert [finding.id for finding in cluster_findings(plan_with(), small, array_tasks=9)] == [
        "cluster.array"
    ] * 2
    assert cluster_findings(plan_with(), CLUSTER, array_tasks=9) == []


def test_an_array_of_a_preparation_fits_into_the_cluster() -> None:
    small = replace(CLUSTER, settings=ENFORCED._replace(max_jobs=100, max_array=8))
    plan = plan_with()

    def array_plan(number: int) -> Plan:
        queue = replace(plan.job.queue, further={"array": f"0-{number - 1}"})
        payload = plan.job.payload._replace(array_key="--task")
        return replace(plan, job=replace(plan.job, queue=queue, payload=payload))

    assert cluster_findings(array_plan(8), small) == []
    finding = only_finding(array_plan(9), small)
    assert (finding.id, finding.fix) == ("cluster.array", "data_preparation.tasks=8: the result is the same")
    assert finding.message.startswith("data_preparation.tasks=9: an array of this Slurm has 8 tasks at most")
    fewer = replace(CLUSTER, settings=ENFORCED._replace(max_jobs=4, max_array=8))
    assert "has 4 tasks at most" in only_finding(array_plan(8), fewer).message


def test_pyxis_is_needed_where_there_is_a_container() -> None:
    plan = plan_with()
    plan = replace(plan, job=replace(plan.job, container=Container("nvcr.io#nvidia/nemo:24.07", ())))
    assert cluster_findings(plan, CLUSTER) == []
    finding = only_finding(plan, replace(CLUSTER, pyxis=False))
    assert (finding.id, finding.severity) == ("cluster.pyxis", Severity.WARNING)
    assert "container-image" in finding.message


def test_checks_without_their_facts_are_skipped_with_the_reason() -> None:
    blind = replace(CLUSTER, nodes=None, missing={"nodes": "Slurm did not answer within 5 s"})
    findings = cluster_findings(plan_with(), blind)
    assert [finding.id for finding in findings] == [
        "cluster.nodes",
        "cluster.gpus",
        "cluster.cpus",
        "cluster.memory",
        "cluster.partitions",
    ]
    assert {(finding.severity, finding.why) for finding in findings} == {
        (Severity.SKIPPED, "Slurm did not answer within 5 s")
    }
    assert findings[1].message == (
        "not checked: the nodes have the requested GPUs (Slurm did not answer within 5 s)"
    )


def test_facts_that_were_not_gathered_are_not_reported() -> None:
    """A dry run does not look, and without a container nobody asks for Pyxis."""
    assert cluster_findings(plan_with(), ClusterFacts()) == []
    assert cluster_findings(plan_with(), None) == []
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
        (f"n[{','.join(['0-99999'] * 3)}]", None),
    ],
)
def test_hostlists_are_expanded(hostlist: str, names: set[str] | None) -> None:
    assert expand_hostlist(hostlist) == names


def test_constraints_are_matched_with_features() -> None:
    features = frozenset({"a", "b"})
    assert has_features("a&b", features)
    assert not has_features("a&c", features)
    assert has_features("c|a", features)
    assert has_features("c&a|b", features)
    assert not has_features("a|b&c", features)  # from left to right
    assert is_plain("a&b|c")
    assert not any(map(is_plain, ("[a|b]", "a*2&b*2", "(a|b)&c", "a,b")))
    assert list(feature_names("[rack1*2&rack2*4]|(a,b)")) == ["rack1", "rack2", "a", "b"]
