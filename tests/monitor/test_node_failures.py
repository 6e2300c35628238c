"""The failures of nodes by their days of use, over the marks of several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import Runs, log

from launcher.cli.app import main
from launcher.jobs.launches import readable_launches
from launcher.monitor.node_failures import (
    _NOT_OF_NODES,
    NodeFailure,
    NodeRecord,
    count_node_failures,
    mark_worse,
    poisson_interval,
)
from slipway.common.node.judging import RULES, UNKNOWN

DAY = 86400
NOON = 1_790_000_000.0


def mark(directory: Path, job: str, *, days: float = 1, nodes: str = "n1,n2", **fields: Any) -> None:
    """Leave the marks of a job that ran for some days from `NOON` on, and judged its end."""
    (directory / "marks").mkdir(exist_ok=True)
    ended = {"job_id": job, "ended": NOON + days * DAY, "exit_code": 1, **fields}
    for name, content in (
        ("started", {"job_id": job, "started": NOON, "nodes": nodes}),
        ("ended", ended),
    ):
        (directory / "marks" / f"{job}.0.{name}.json").write_text(json.dumps(content))


def count(runs: Runs, since: float = 0.0) -> dict[str, NodeRecord]:
    launches = [launch for run_dir in sorted(runs.base.iterdir()) for launch in readable_launches(run_dir)]
    return {record.node: record for record in count_node_failures(launches, since)}


@pytest.mark.parametrize(
    ("failures", "low", "high"),
    # As R has them: poisson.test(k, conf.level=0.9).
    [
        (0, 0, 2.9957),
        (1, 0.05129, 4.7439),
        (3, 0.81769, 7.7537),
        (10, 5.4254, 16.9622),
        (100, 84.139, 118.079),
    ],
)
def test_interval_of_a_count_is_the_exact_one(failures: int, low: float, high: float) -> None:
    assert poisson_interval(failures) == pytest.approx((low, high), rel=1e-3)


@pytest.mark.parametrize(
    ("days", "failures", "worse"),
    [
        ([10, 10, 10, 10], [0, 0, 0, 0], []),
        ([10, 10, 10, 10], [1, 0, 0, 0], []),  # one failure may hit anybody
        ([10] * 10, [5, *[0] * 9], [0]),
        ([10] * 10, [5, *[4] * 9], []),
        ([100, 1], [3, 3], [1]),  # by their use
        ([0, 10], [9, 0], []),  # of unknown use
        ([10], [9], []),  # nobody to compare with
        ([1.0] * 2000, [800, *[1] * 1999], [0]),  # binomials beyond what a float holds
    ],
)
def test_worse_is_a_node_that_fails_more_often_than_chance_allows(
    days: list[float], failures: list[int], worse: list[int]
) -> None:
    failure = NodeFailure("r", "1", NOON, "killed", "")
    records = [
        NodeRecord(f"n{index}", used * DAY, [failure] * number)
        for index, (used, number) in enumerate(zip(days, failures, strict=True))
    ]
    mark_worse(records)
    assert [index for index, record in enumerate(records) if record.is_above] == worse


def test_failures_are_those_of_machines_each_once(runs: Runs) -> None:
    first, second = runs.launch("a"), runs.launch("b")
    mark(first, "11", rule="gpu_lost", verdict="exclude", excluded="n2", host="n1", why="lost")
    mark(second, "11", days=2, nodes="n2,n3", rule="killed", verdict="continue", host="n3", why="killed")
    for number, rule in enumerate(("failed", "mistake", "time_limit", "done"), start=2):
        mark(runs.launch("b", number), str(10 + number), nodes="n3", rule=rule, host="n3", days=1)
    # Of the first job, which its end names already; of a job that found a sick node before its tasks.
    lines = f"n2\t{int(NOON + 2 * DAY)}\t11\tlost\nn9\t{int(NOON + DAY)}\t77\t7 of 8 GPUs\ntorn"
    (runs.base / "a" / "excluded_nodes.tsv").write_text(lines)
    nodes = count(runs)
    assert {name: (round(node.days, 6), dict(node.reasons)) for name, node in nodes.items()} == {
        "n1": (1.0, {}),
        "n2": (3.0, {"gpu_lost": 1}),
        "n3": (6.0, {"killed": 1}),
        "n9": (0.0, {"7 of 8 GPUs": 1}),
    }
    assert next(iter(nodes)) == "n9", "of unknown use, and has failed"
    assert nodes["n2"].rate and nodes["n2"].rate[0] == pytest.approx(1 / 3) and nodes["n2"].last == NOON + DAY


def test_each_start_of_the_tasks_has_its_nodes_and_its_end(runs: Runs) -> None:
    first = runs.launch("a")
    mark(first, "11", days=3, nodes="n1,n2", rule="killed", host="n1", exit_code=1)
    again = {"ended": NOON + DAY, "rule": "gpu_lost", "excluded": "n2", "verdict": "exclude", "exit_code": 1}
    start = {"job_id": "11", "started": NOON + 2 * DAY, "nodes": "n1,n3"}
    (first / "marks" / "11.0.restarted-1.json").write_text(json.dumps({**again, **start}))
    assert {name: (round(node.days, 6), dict(node.reasons)) for name, node in count(runs).items()} == {
        "n1": (2.0, {"killed": 1}),
        "n2": (1.0, {"gpu_lost": 1}),
        "n3": (1.0, {}),
    }


def test_only_what_happened_since_a_time_counts(runs: Runs) -> None:
    mark(runs.launch("a"), "11", days=3, nodes="n1", rule="killed", host="n1")
    assert count(runs, NOON + 2 * DAY)["n1"].days == pytest.approx(1)
    assert len(count(runs, NOON + 2 * DAY)["n1"].failures) == 1
    assert (count(runs, NOON + 4 * DAY)["n1"].days, count(runs, NOON + 4 * DAY)["n1"].failures) == (0, [])


def test_job_without_an_end_counts_until_its_log_changed_last(runs: Runs) -> None:
    import os

    directory = runs.launch("a")
    mark(directory, "11", nodes="n1")
    (directory / "marks" / "11.0.ended.json").unlink()
    assert count(runs)["n1"].seconds == 0
    log(directory).touch()
    os.utime(log(directory), (NOON, NOON + DAY))
    assert count(runs)["n1"].days == pytest.approx(1)


def test_ends_that_no_node_is_blamed_for_are_rules() -> None:
    assert set(_NOT_OF_NODES) <= {rule.name for rule in (*RULES, UNKNOWN)}


def test_names_that_are_no_nodes_are_passed_over(runs: Runs) -> None:
    mark(runs.launch("a"), "11", nodes="n1,$(touch x),\x1b[31m", rule="killed", host="--all")
    mark(runs.launch("b"), "11", nodes=f"m[1-2,{'9' * 5000}]")
    mark(runs.launch("c"), "11", nodes="m[1-2]")  # as earlier versions wrote it
    assert list(count(runs)) == ["n1", "m1", "m2"]


def test_table_and_json_name_the_worst_first(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 6):
        sick = {"rule": "gpu_lost", "excluded": "n2", "why": "a GPU was lost"}
        mark(runs.launch("a", number), str(10 + number), nodes="n1,n2,n3,n4", **sick)
    base = ["--base-results-dir", str(runs.base)]
    main(["nodes", *base])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["NODE", "DAYS", "FAILURES"]
    assert rows[0].split()[:6] == ["n2", "5.00", "5", "1", "0.39-2.1", "worse"]
    assert rows[0].endswith("5 × gpu_lost") and len(rows) == 4
    main(["nodes", "--json", *base, "a"])
    first, *others = json.loads(capsys.readouterr().out)
    assert (first["node"], first["above_others"], len(first["reasons"])) == ("n2", True, 5)
    assert first["reasons"][0]["why"] == "a GPU was lost" and not any(o["above_others"] for o in others)
