"""Facts about a cluster, read from Slurm's answers as several versions of it write them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks.findings import Severity
from launcher.checks.gate import gather
from launcher.checks.gathering.host import cluster_facts
from launcher.drafting import Request, draft
from launcher.plan import Plan
from launcher.slurm import cluster
from launcher.slurm.cluster import Association, ClusterFacts, Limits, Partition, Qos, Settings
from launcher.slurm.questions import Reply, facts_of
from tests.checks.plans import GPT, draft_of, findings_of, plan_of

PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=1 Nodes=n[1-2] State=UP TotalCPUs=128 \
TotalNodes=2 JobDefaults=(null) TRES=cpu=128,mem=1000000M,node=2,billing=128,gres/gpu=16
PartitionName=debug AllowGroups=ALL AllowAccounts=a,b AllowQos=short Default=NO QoS=short MaxNodes=4 \
MaxTime=UNLIMITED MinNodes=0 State=DRAIN TotalNodes=4
PartitionName=low DenyAccounts=c DenyQos=x,y AllowAccounts=ALL AllowQos=ALL State=UP
"""

CONFIG = """\
Configuration data as of 2026-01-01T00:00:00
AccountingStorageEnforce = associations,limits,qos,safe
AccountingStorageHost   = 127.0.0.1
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = tuna
MaxArraySize            = 1001
MaxJobCount             = 10000

Slurmctld(primary) at controller is UP
"""

# partition, name, state, CPUs, memory, GRES, features
NODES = """\
gpu*|n1|idle|64|500000|gpu:8|(null)
gpu*|n2|mixed|128|1031000|gpu:a100:4(S:0-1),gpu:h100:2(S:2),nvme:1|ib,a100
low|n2|down*|128|1031000|gpu:nvidia_h100_80gb_hbm3:8|ib
low|n3|idle~|1|1|(null)|
low|n4|drained|1|1|shard:gpu:9|
low|n5|idle*|1|1|mps:100|
low|n6|draining@|1|1|gpu:tesla:0|
low|n7|allocated|1|1|gpu:1|
low|n8|completing|1|1|gpu:1|
low|n9|maint$|1|1|gpu:1|
low|n10|planned-|1|1|gpu:1|
"""


def test_partitions_are_parsed() -> None:
    gpu, debug, low = cluster.parse_partitions(PARTITIONS)
    assert gpu == Partition("gpu", True, "UP", 2, 2 * 86400, 1, node_names="n[1-2]")
    assert debug == Partition(
        "debug", False, "DRAIN", 4, None, 0, 4, accounts=("a", "b"), qos=("short",), own_qos="short"
    )
    assert low == Partition("low", denied_accounts=("c",), denied_qos=("x", "y"))


def test_nodes_are_parsed() -> None:
    nodes = cluster.parse_nodes(NODES)
    assert list(nodes) == ["gpu", "low"]
    first, second = nodes["gpu"]
    assert (first.cpus, first.memory, first.gpus, first.features) == (64, 500000, (("", 8),), frozenset())
    assert second.gpus == (("a100", 4), ("h100", 2))
    assert second.features == {"ib", "a100"}
    usable = {node.name for node in nodes["low"] if node.is_usable}
    assert usable == {"n3", "n7", "n8", "n10"}
    assert [node.gpus for node in nodes["low"]][:4] == [(("nvidia_h100_80gb_hbm3", 8),), (), (), ()]
    assert list(cluster.parse_nodes(NODES, of_default=True)) == ["gpu"]


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2080ti:4", (("2080ti", 4),)),
        ("gpu:3090:2(S:0-1)", (("3090", 2),)),
        ("gpu:1g.5gb:7(S:0),gpu:a100:1", (("1g.5gb", 7), ("a100", 1))),
        ("shard:a100:32,gpu:a100:8(IDX:0-7)", (("a100", 8),)),
        ("gpu:no_consume:4", (("", 4),)),
        ("gpu:a100:no_consume:4", (("a100", 4),)),
        (f"gpu:{'9' * 5000}", ()),
    ],
)
def test_gpus_of_a_node_are_read_from_its_gres(gres: str, gpus: tuple[tuple[str, int], ...]) -> None:
    assert cluster.gpus_in_gres(gres) == gpus


def test_malformed_answers_raise_nothing() -> None:
    """A wrapper may print anything; numbers may be longer than Python likes to read."""
    long = "9" * 5000
    for text in ("\0\x1b[31m\udcff|||", "|" * 99, f"a*|n|idle|{long}|{long}|gpu:{long}|x\n", f"{long}|" * 8):
        facts = facts_of(dict.fromkeys(("partitions", "nodes", "associations", "qos", "pyxis"), Reply(text)))
        assert facts.missing["partitions"] == "Slurm shows no partitions"
    cluster.parse_settings(f"MaxJobCount = {long}\nSLURM_VERSION = {long}.1\n")
    cluster.parse_partitions(f"PartitionName=a MaxNodes={long} MaxTime={long} TotalNodes=x\nPartitionName=\n")


def test_nodes_that_slurm_does_not_show_skip_their_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {"partitions": Reply("PartitionName=gpu Default=YES TotalNodes=4\n"), "nodes": Reply("\n")}
    monkeypatch.setattr("launcher.slurm.questions.ask_at_once", lambda questions, conf: replies)
    plan = plan_of(GPT)
    facts = cluster_facts(draft_of(plan))
    assert facts is not None
    assert (facts.nodes, facts.missing["nodes"]) == (None, "Slurm does not show the nodes of the partition")
    unknown = replace(plan, job=replace(plan.job, queue=replace(plan.job.queue, partition="no")))
    facts = cluster_facts(draft_of(unknown))
    assert facts is not None
    assert facts.missing == {}


def test_hidden_partitions_and_those_of_groups_are_not_open() -> None:
    lines = "PartitionName=a Hidden=YES", "PartitionName=b AllowGroups=x", "PartitionName=c AllowGroups=ALL"
    text = "\n".join(lines)
    assert [partition.is_open for partition in cluster.parse_partitions(text)] == [False, False, True]


def test_plugins_are_read_from_the_settings() -> None:
    text = "JobSubmitPlugins = lua\nCliFilterPlugins = (null)\nSLURM_VERSION = 23.11.10\n"
    assert cluster.parse_settings(text).has_filters
    assert not cluster.parse_settings(text.replace("lua", "(null)")).has_filters


def test_default_account_may_belong_to_another_cluster() -> None:
    row = "me|{}|{}|{}|||||||\n"
    text = row.format("b", "tuna", "a") + row.format("b", "bass", "b")
    assert [association.is_default for association in cluster.parse_associations(text, "tuna")] == [False]
    assert [association.is_default for association in cluster.parse_associations(text, "bass")] == [True]


def test_settings_are_parsed() -> None:
    assert cluster.parse_settings(CONFIG)._replace(values={}) == Settings(
        1001, 10_000, True, frozenset({"associations", "limits", "qos", "safe"}), name="tuna"
    )
    no_accounting = "AccountingStorageEnforce = none\nAccountingStorageType   = (null)\n"
    assert cluster.parse_settings(no_accounting)._replace(values={}) == Settings()


def test_associations_of_other_clusters_are_left_out() -> None:
    text = (
        "me|research|tuna|research||debug,normal|normal|1-00:00:00|node=4,gres/gpu=32|cpu=100,mem=2T|50\n"
        "me|research|tuna|vision|big|||||| \n"
        "me|research|bass|other||||||||\n"
        "me|research|bass|other|||||||\n"
    )
    research, vision = cluster.parse_associations(text, "tuna")
    limits = Limits(86400, {}, {"node": 4, "gres/gpu": 32}, {}, {"cpu": 100, "mem": 2 * 1024**2}, 50)
    assert research == Association("research", None, ("debug", "normal"), "normal", True, limits)
    assert vision == Association("vision", "big")
    accounts = [association.account for association in cluster.parse_associations(text, None)]
    assert accounts == ["research", "vision", "other"]


def test_qualities_of_service_are_parsed() -> None:
    text = "normal|||||||\ndebug|DenyOnLimit,PartitionTimeLimit|00:30:00|gres/gpu=1|node=2|mem=512G|cpu=9|3\n"
    normal, debug = cluster.parse_qos(text)
    assert normal == Qos("normal")
    limits = Limits(1800, {"gres/gpu": 1}, {"node": 2}, {"mem": 512 * 1024}, {"cpu": 9}, 3)
    assert debug == Qos("debug", limits, frozenset({"denyonlimit", "partitiontimelimit"}))


def test_gpu_types_are_known_if_every_node_has_one() -> None:
    # One node has GPUs without a type.
    assert facts_of({"nodes": Reply(NODES)}, of_default=True).gpu_types is None
    typed = (
        "gpu*|n1|idle|1|1|gpu:a100:4|\ngpu*|n2|idle|1|1|gpu:a100:8,gpu:h100:1|\nlow|n3|idle|1|1|gpu:v100:1|\n"
    )
    assert facts_of({"nodes": Reply(typed)}, of_default=True).gpu_types == ("a100", "h100")
    assert facts_of({"nodes": Reply("gpu*|n1|idle|1|1|(null)|\n")}).gpu_types is None


def test_cluster_without_accounting_has_no_accounts() -> None:
    replies = {
        "settings": Reply("MaxJobCount = 5\n"),
        "qos": Reply(why="no"),
        "associations": Reply(why="no"),
    }
    facts = facts_of(replies)
    assert (facts.qos, facts.associations, facts.missing) == ((), (), {})
    facts = facts_of(replies | {"settings": Reply(why="gone")})
    assert (facts.qos, facts.associations) == (None, None)
    assert facts.missing == {"settings": "gone", "qos": "no", "associations": "no"}


def test_other_schedulers_have_no_cluster() -> None:
    for scheduler in ("local", "allocation"):
        assert cluster_facts(draft_of(replace(plan_of(GPT), scheduler=scheduler))) is None


def test_points_of_a_sweep_ask_slurm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = []

    def ask(plan: Plan, parts: Iterable[str]) -> ClusterFacts:
        partitions.append(plan.job.queue.partition)
        return ClusterFacts()

    monkeypatch.setattr("launcher.checks.gathering.host.ask_cluster", ask)
    first, second, other = (
        draft(Request(overrides=["cluster=bcm", "container=null", *words], command=[]))
        for words in ([], ["training.model.seed=2"], ["cluster.partition=low"])
    )
    not_gathered = dict.fromkeys(("paths", "earlier", "host", "trainer_verdict"))
    of_first, of_second, of_other = gather([first, second, other], **not_gathered)
    assert of_first.cluster is of_second.cluster is not of_other.cluster
    assert partitions == [None, "low"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("options", "count"), [("--container-image=[USER@][REGISTRY#]IMAGE", 0), ("", 1)])
def test_pyxis_is_looked_for_if_the_job_has_a_container(programs: Path, options: str, count: int) -> None:
    write_script(programs / "scontrol", ":")
    write_script(programs / "srun", f'echo "{options}"')
    for container, expected in (("nvcr.io#nvidia/nemo:24.07", count), ("null", 0)):
        launch_draft = draft(Request(overrides=["cluster=bcm", f"container={container}"], command=[]))
        findings = [finding for finding in findings_of(launch_draft) if finding.id == "cluster.pyxis"]
        assert len(findings) == expected
        assert all(
            "Pyxis" in finding.message and finding.severity is Severity.WARNING for finding in findings
        )


def test_checks_of_the_cluster_are_skipped_without_slurm(programs: Path) -> None:
    launch_draft = draft(Request(overrides=["cluster=bcm"], command=[]))
    findings = [finding for finding in findings_of(launch_draft) if finding.id.startswith("cluster.")]
    assert len(findings) == 11
    assert {(finding.severity, finding.why) for finding in findings} == {
        (Severity.SKIPPED, "scontrol is not on this machine: there is no Slurm here")
    }
    assert gather([launch_draft], look=False)[0].cluster is None
