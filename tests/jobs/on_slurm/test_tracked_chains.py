"""Chains on a real Slurm, as a user sees them: one run, one line, one log, one history."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from slipway.common.node.marks import chain_end, link_jobs
from tests.jobs.on_slurm.sandbox_runs import HEADER, PATIENCE_SECONDS, PREFIX, Row, SandboxRuns, open_runs
from tests.jobs.on_slurm.scenarios import REQUEUE, begin_again

pytestmark = pytest.mark.slurm

TRAINING = ["training=gpt3/tiny", "training.model.data.data_impl=mock", "cluster=sandbox"]
SIZE = [
    "training.trainer.num_nodes=1",
    "training.trainer.devices=1",
    "training.model.tensor_model_parallel_size=1",
]
# Each link records its job, so that the payload knows the number of the link.
COUNTS = """
echo "$SLURM_JOB_ID" >>"$0.links"
link=$(wc -l <"$0.links")
echo "link $link lives"
echo "attempt ${SLURM_RESTART_COUNT:-0}"
"""


@dataclass
class Chains:
    """Chains of a sandbox; `wait` asks until a chain is as it should be."""

    runs: SandboxRuns

    def launch(self, run: str, body: str, *overrides: str) -> None:
        payload = self.runs.directory / f"{run}.sh"
        payload.write_text(HEADER + COUNTS + body)
        payload.chmod(0o755)
        name_overrides = [
            f"training.run.name={run}",
            f"cluster.job_name_prefix={PREFIX}",
            f"cluster.python={payload}",
        ]
        done = self.runs.slipway("launch", *TRAINING, *SIZE, *name_overrides, *overrides, "--json")
        assert done.returncode == 0, done.stderr
        self.runs.jobs[run] = json.loads(done.stdout)["job_id"]

    def row(self, run: str) -> Row:
        done = self.runs.slipway("status", run, "--json")
        (row,) = json.loads(done.stdout)
        return dict(row)

    def wait(self, run: str, condition: Callable[[Row], object]) -> Row:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(row := self.row(run)):
            assert time.monotonic() < deadline, f"it stayed {row}\n{self.log(run)}"
            time.sleep(0.5)
        return row

    def log(self, run: str) -> str:
        return "".join(path.read_text() for path in sorted(self.directory(run).glob("log-*.out")))

    def directory(self, run: str) -> Path:
        return self.runs.launch_directory(run)

    def history(self, run: str) -> dict[str, Any]:
        (row,) = json.loads(self.runs.slipway("history", run, "--json").stdout)
        return dict(row)

    def cancel_all(self) -> None:
        for run in self.runs.jobs:
            self.runs.slipway("cancel", run)


@pytest.fixture(scope="module")
def chains(plain_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chains]:
    """Chains that were launched side by side, on a Slurm without accounting."""
    chains = Chains(open_runs(tmp_path_factory.mktemp("chains"), plain_sandbox))
    try:
        chains.launch("goes_on", "((link == 3)) || exit 75\necho done\n", "resilience.links=4")
        chains.launch("crashes", "exit 1\n", "resilience.links=9", "resilience.max_failures=2")
        chains.launch("short", "exit 75\n", "resilience.links=2")
        chains.launch("runs", "((link == 2)) || exit 75\necho here; exec sleep 3600\n", "resilience.links=5")
        chains.launch("requeued", "((link == 1)) || exit 0\nexec sleep 3600\n", REQUEUE, "resilience.links=1")
        yield chains
    finally:
        chains.cancel_all()


def _is_over(row: Row) -> bool:
    return row["state"] not in ("PENDING", "RUNNING", "COMPLETING")


def test_a_chain_that_comes_to_its_end_is_completed(chains: Chains) -> None:
    row = chains.wait("goes_on", _is_over)
    assert (row["state"], row["reason"], row["exit_code"]) == ("COMPLETED", None, 0)
    assert (row["link"], row["max_links"]) == (3, 4)
    jobs = link_jobs(chains.directory("goes_on"))
    assert row["job_id"] == jobs[2] and [link["job_id"] for link in row["links"]] == jobs
    assert [link["state"] for link in row["links"][:3]] == ["INTERRUPTED", "INTERRUPTED", "COMPLETED"]
    assert chains.runs.slipway("status", "goes_on", "--exit-code").returncode == 0


def test_the_log_of_a_chain_goes_from_link_to_link(chains: Chains) -> None:
    chains.wait("goes_on", _is_over)
    done = chains.runs.slipway("logs", "goes_on")
    lines = [line for line in done.stdout.splitlines() if line.startswith("link ") and line.endswith("lives")]
    assert lines == ["link 1 lives", "link 2 lives", "link 3 lives"]
    followed = chains.runs.slipway("logs", "goes_on", "-f")
    assert followed.stdout == done.stdout and followed.returncode == 0
    job = link_jobs(chains.directory("goes_on"))[1]
    for words in ((job,), ("goes_on", "--link", "2")):
        output = chains.runs.slipway("logs", *words).stdout
        assert "link 2 lives" in output and "link 1 lives" not in output and "link 3 lives" not in output
    assert chains.runs.slipway("logs", "goes_on", "--link", "7").returncode == 2


def test_the_history_of_a_chain_has_a_line_for_each_link(chains: Chains) -> None:
    chains.wait("goes_on", _is_over)
    attempts = chains.history("goes_on")["attempts"]
    assert [(attempt["link"], attempt["state"], attempt["exit_code"]) for attempt in attempts] == [
        (1, "INTERRUPTED", 75), (2, "INTERRUPTED", 75), (3, "COMPLETED", 0),
    ]  # fmt: skip
    assert [attempt["reading"] and attempt["reading"]["verdict"] for attempt in attempts] == [
        "continue",
        "continue",
        None,
    ]
    output = chains.runs.slipway("history", "goes_on").stdout
    assert "link 2" in output
    assert "it left, as it was asked to, and had saved nothing new" in output  # as its program does


def test_a_job_that_is_requeued_goes_on(chains: Chains) -> None:
    chains.wait("requeued", lambda row: row["state"] == "RUNNING" and chains.runs.has_begun("requeued"))
    chains.runs.slurm("scontrol", "requeue", chains.runs.jobs["requeued"])
    row = chains.wait("requeued", lambda row: row["state"] == "PENDING")
    assert row["restarts"] == 1
    begin_again(chains.runs, "requeued")
    row = chains.wait("requeued", _is_over)
    assert (row["state"], row["restarts"]) == ("COMPLETED", 1)
    attempts = chains.history("requeued")["attempts"]
    assert [attempt["state"] for attempt in attempts] == ["REQUEUED", "COMPLETED"]


def test_a_crash_loop_says_why_it_stopped(chains: Chains) -> None:
    row = chains.wait("crashes", _is_over)
    assert (row["state"], row["exit_code"], row["link"]) == ("FAILED", 1, 2)
    assert "2 links in a row" in row["reason"] and row["reason"].startswith("exit code 1; ")
    assert chains.log("crashes").count(" lives") == 2
    attempts = chains.history("crashes")["attempts"]
    assert [attempt["reading"]["verdict"] for attempt in attempts] == ["continue", "stop"]
    assert chains.runs.slipway("follow", "crashes").returncode == 1


def test_the_last_link_says_that_it_was_the_last(chains: Chains) -> None:
    row = chains.wait("short", _is_over)
    assert row["state"] == "INTERRUPTED" and row["reason"].endswith("the last of 2 links")
    assert chains.runs.slipway("status", "short", "--exit-code").returncode == 75


def test_the_waiting_link_is_held_and_the_chain_is_cancelled(chains: Chains) -> None:
    """The order matters: what is held waits, what is cancelled is gone."""
    row = chains.wait("runs", lambda row: row["state"] == "RUNNING" and "here" in chains.log("runs"))
    first, second, third = link_jobs(chains.directory("runs"))
    assert (row["job_id"], row["link"], row["node_list"]) == (second, 2, row["links"][1]["node_list"])
    assert [link["state"] for link in row["links"]] == ["INTERRUPTED", "RUNNING", "PENDING"]
    runs = chains.runs
    held = runs.slipway("hold", "runs")
    assert held.stdout.startswith(
        f"held job {third}, the next link of job {second} of runs (launch 1, link 2/5)"
    )
    assert chains.row("runs")["links"][2]["reason"].startswith("JobHeldUser")
    assert runs.slipway("hold", "runs").stdout.count("it is held already") == 1
    assert runs.slipway("release", "runs").stdout.startswith(f"released job {third}, the next link of")
    printed = runs.slipway("attach", "runs", "--print").stdout
    assert f"--jobid={second} " in printed and f"--nodelist={row['node_list']} " in printed
    cancelled = runs.slipway("cancel", "runs", "--wait")
    assert cancelled.returncode == 0, cancelled.stderr
    assert cancelled.stdout.startswith(f"cancelled job {second} of runs (launch 1, link 2/5): it was RUNNING")
    assert runs.slurm("squeue", "--noheader", f"--jobs={first},{second},{third}").strip() == ""
    row = chains.row("runs")
    assert (row["state"], row["link"]) == ("CANCELLED", 2)
    end = chain_end(chains.directory("runs"))
    assert end and end.why.startswith("cancelled by")
    assert len(link_jobs(chains.directory("runs"))) == 3, "nothing came after it"
    assert runs.slipway("cancel", "runs").stdout.count("it is over") == 1
