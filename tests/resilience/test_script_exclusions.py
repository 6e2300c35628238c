"""The script of a chain keeps later links off nodes that failed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.plan import Queue
from slipway.common.node.marks import claim, link_jobs, read_attempts
from tests.resilience.scripted_chain import TAG, write_chain

FAR = 99999999999


def test_node_is_excluded_for_job_that_it_failed(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    chain.run(job="16", ANSWER="17")
    (chain.plan.paths.marks / "16.0.ended.json").unlink()
    chain.run("2", TAG, BEFORE="NODE_FAIL", DOWN="down*")
    (line,) = (chain.plan.paths.run_dir / "excluded_nodes.tsv").read_text().splitlines()
    assert line.split("\t")[0::2] == ["n2", "16"]


def test_failed_node_is_excluded_where_others_suffice(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, "cluster.exclude=n9")
    chain.tasks("exit 1")
    chain.run(STATE="JobState=COMPLETING Reason=NodeDown PreemptTime=None", DOWN="down*")
    assert (chain.end_mark()["verdict"], chain.end_mark()["excluded"]) == ("exclude", "n2")
    assert chain.calls_of("sbatch")[-1].startswith("sbatch --test-only --exclude=n9,n2 ")
    assert chain.calls_of("scontrol")[-1] == "scontrol update JobId=18 ExcNodeList=n9,n2"
    (line,) = (chain.plan.paths.run_dir / "excluded_nodes.tsv").read_text().splitlines()
    assert line.split("\t")[0::2] == ["n2", "17"]
    chain.run("2", TAG, job="18", ANSWER="19")
    assert "--exclude=n9,n2 " in chain.submissions()[0]
    assert read_attempts(chain.directory)[-1].avoids == "n9,n2"


def test_needed_node_is_not_excluded(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 1")
    _, output = chain.run(
        STATE="JobState=COMPLETING Reason=NodeDown PreemptTime=None", DOWN="down*", REFUSES="1"
    )
    assert "does not exclude n2" in output
    assert not (chain.plan.paths.run_dir / "excluded_nodes.tsv").exists()
    assert not [command for command in chain.commands if "ExcNodeList" in command]


def test_links_submitted_at_launch_all_exclude_node(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, "resilience.submit=launch")
    for link, job in enumerate(("17", "18", "19"), start=1):
        claim(chain.directory, job, link)
    chain.tasks("exit 1")
    chain.run(STATE="JobState=COMPLETING Reason=NodeDown PreemptTime=None", DOWN="down*")
    assert chain.calls_of("scontrol")[-1] == "scontrol update JobId=18,19 ExcNodeList=n2"


def test_node_that_left_cluster_does_not_end_chain(tmp_path: Path) -> None:
    """The node is unknown to Slurm then, which refuses a job that is to avoid it."""
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    (chain.plan.paths.run_dir / "excluded_nodes.tsv").write_text("n2\t99999999999\t9\tit failed\n")
    _, output = chain.run(GONE="--exclude=n2")
    assert "Invalid node name" in output
    assert link_jobs(chain.directory) == ["17", "18"], output
    assert "--exclude" not in chain.submissions()[-1]


def test_expired_and_malformed_exclusions_are_ignored(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    lines: Sequence[str] = (
        "n1\t1\t9\tlong ago",
        "n2\t99999999999\t9\tstill",
        "n2\t99999999999\t9\ttwice",
        "$(touch x)\t99999999999\t9\tx",
        "torn",
    )
    (chain.plan.paths.run_dir / "excluded_nodes.tsv").write_text("\n".join(lines) + "\n")
    chain.run()
    assert "--exclude=n2 " in chain.submissions()[0]


def test_links_avoid_the_nodes_of_the_teams_file(tmp_path: Path) -> None:
    file = tmp_path / "bad nodes.tsv"
    chain = write_chain(tmp_path, "cluster.exclude=n9", f"resilience.exclude_file='{file}'")
    chain.tasks("exit 75")
    _, output = chain.run()
    assert "resilience.exclude_file cannot be read: " in output
    assert "--exclude=n9 " in chain.submissions()[0]
    lines = [("n1", FAR), ("gone", FAR), ("n2", FAR), ("n2", 1), ("$(touch x)", FAR), ("--all", FAR)]
    file.write_text("".join(f"{node}\t{until}\tada\tXid 79\n" for node, until in lines))
    (chain.plan.paths.run_dir / "excluded_nodes.tsv").write_text(f"n1\t{FAR}\t9\tstill\n")
    _, output = chain.run("2", TAG, job="18", ANSWER="19")
    assert f"{file}: gone passed over, as this cluster has no such node" in output
    assert "--exclude=n9,n1 " in chain.submissions()[0]
    assert chain.calls_of("sinfo") == ["sinfo --all --noheader --Node --format=%N --nodes=n1,gone"]


def test_a_file_server_that_does_not_answer_holds_no_link(tmp_path: Path) -> None:
    file = tmp_path / "bad_nodes.tsv"
    chain = write_chain(tmp_path, f"resilience.exclude_file='{file}'")
    os.mkfifo(file)
    chain.tasks("exit 75")
    _, output = chain.run()
    assert output.count("resilience.exclude_file cannot be read: head: no answer within 10") == 1
    assert "--exclude" not in chain.submissions()[0]


def test_begin_of_header_is_for_first_link_alone(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, queue=Queue(begin="now+1hour"))
    chain.tasks("exit 75")
    chain.run()
    assert " --begin=now " in chain.submissions()[0]
    assert "--exclude" not in chain.submissions()[0]


def test_text_of_log_neither_excludes_foreign_nodes_nor_runs(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    hostile = "NVRM: Xid (PCI:0000:3b:00): 79, $(touch canary) `touch canary` n7 n22 fallen off the bus"
    chain.tasks(f"echo {shlex.quote(hostile)}; echo '\"}}, {{\"'; exit 1")
    chain.run()
    end_mark = chain.end_mark()
    assert end_mark["rule"] == "gpu_lost" and end_mark["verdict"] == "continue" and "excluded" not in end_mark
    assert not list(tmp_path.rglob("canary")) and not Path("canary").exists()
