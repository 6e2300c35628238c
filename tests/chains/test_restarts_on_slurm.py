"""Tasks that start again inside their allocation, on a real Slurm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipway.common.node.marks import read_attempts
from slipway.watch.alerts import read_alerts
from tests.chains.chain_training import EVERY, Training
from tests.chains.restart_scenarios import CRASHED, NODES, RESTARTS, STEADY, STEPS

pytestmark = [pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(2400)]


def test_a_training_survives_each_crash_inside_its_job(chains: Any) -> None:
    runs = chains.wait_for(CRASHED)
    training, report = Training(runs, CRASHED), runs.report(CRASHED)
    starts = read_attempts(runs.launch_directory(CRASHED), each_start=True)
    assert {start.job_id for start in starts} == {runs.jobs.get(CRASHED) or starts[0].job_id}, report
    assert [start.rule for start in starts] == ["killed", "failed", "out_of_memory", "failed", "done"], report
    assert "it was ordered to crash" in (starts[3].why or "")
    assert {start.nodes for start in starts} == {NODES}
    values, expected = training.values_by_step(), Training(runs, STEADY).values_by_step()
    assert values == expected and len(values) == STEPS, report
    begun, saved = [event["step"] for event in training.events("start")], training.saved_steps()
    assert begun[1:] == saved[:RESTARTS] and all(step % EVERY == 0 for step in begun), report


def test_each_start_is_on_record(chains: Any) -> None:
    runs = chains.wait_for(CRASHED)
    (row,) = json.loads(runs.answers[CRASHED].stdout)
    assert (row["state"], row["restarts"], row["task_restarts"]) == ("RUNNING", 0, RESTARTS)
    (launch,) = runs.ask_json("history", CRASHED)
    states = [attempt["state"] for attempt in launch["attempts"]]
    assert states == ["RESTARTED"] * RESTARTS + ["COMPLETED"]
    assert [attempt["restart"] for attempt in launch["attempts"]] == list(range(RESTARTS + 1))
    first, *_, last = launch["attempts"]
    assert first["reading"]["why"] == "a task was killed, often for want of memory"
    assert (first["first_step"], last["step"]) == (0, STEPS)
    alerts = read_alerts(runs.launch_directory(CRASHED).parent.parent)
    assert {alert.first.detector for alert in alerts} == {"restarted"}
    assert not any(alert.is_open for alert in alerts)
