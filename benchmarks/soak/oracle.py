"""The conditions that hold after a fault, as the trainer, Slurm, the kernel and `slipway` report them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.soak.cluster import PREFIX
from benchmarks.soak.trial import STEPS, Trial
from slipway.watch.alerts import Alert

Losses = dict[int, tuple[Any, ...]]
_FIELDS = ("loss", "grad_norm", "lr", "consumed_samples")
# Longer than Slurm gives a job to end.
_PATIENCE_SECONDS = 20
_LIVE = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")


def losses(trial: Trial) -> Losses:
    """Return the numbers of each step of a run that nothing disturbed."""
    return {event["step"]: _numbers(event) for event in trial.events() if event["kind"] == "train"}


def judge(trial: Trial, undisturbed: Losses, mounts: list[str]) -> list[str]:
    """Return the violations of a run that is over.

    Parameters
    ----------
    undisturbed
        The numbers of the same training without a fault.
    mounts
        What was mounted before.
    """
    return [
        *trial.violations,
        *report_violations(trial, undisturbed),
        *overlapping_trainings(trial),
        *_unknown_trainings(trial),
        *_leftovers(trial, mounts),
    ]


def report_violations(trial: Trial, undisturbed: Losses) -> list[str]:
    """Return the violations in the trainer's reports: other numbers, and lost steps."""
    events = trial.events()
    return [*_wrong_losses(events, undisturbed), *_lost_steps(events, trial.torn)]


def wrong_alerts(alerts: Sequence[Alert], right: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the violations in the alerts of a run that is done: not the right ones, or not resolved."""
    detectors = tuple(sorted(alert.first.detector for alert in alerts))
    names = " or ".join(", ".join(each) or "none" for each in right)
    violations = [f"{alert.first.alert} is open after the end" for alert in alerts if alert.is_open]
    if detectors not in right:
        found = "; ".join(f"{alert.first.alert}: {alert.first.why}" for alert in alerts) or "none"
        violations.append(f"alerts: {found}; right: {names}")
    return violations


def unknown_jobs(trial: Trial) -> list[str]:
    """Return the live jobs of a run that `slipway` does not know, however often it is asked."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        before = {job.id for job in trial.live_jobs(fresh=2)}
        known, row = known_jobs(trial.history()), trial.status()
        live = before & {job.id for job in trial.live_jobs(fresh=2)}
        missing = sorted(live - known)
        if not live or not (missing or row.get("state") not in _LIVE):
            return []
        if time.monotonic() > deadline:
            reported = {name: row.get(name) for name in ("job_id", "state", "reason")}
            return [f"jobs {sorted(live)} live, unknown to history: {missing}; status says {reported}"]


def known_jobs(rows: list[dict[str, Any]]) -> set[str]:
    """Return the jobs that `slipway history` lists."""
    known = {row["job_id"] for row in rows} | {
        attempt["job_id"] for row in rows for attempt in row["attempts"]
    }
    return known | {link["job_id"] for row in rows for link in row["links"]}


def _numbers(event: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(event[name] for name in _FIELDS)


def _wrong_losses(events: list[dict[str, Any]], undisturbed: Losses) -> list[str]:
    violations, steps = [], set()
    for event in events:
        if event["kind"] == "train":
            steps.add(event["step"])
            if _numbers(event) != undisturbed[event["step"]]:
                violations.append(
                    f"step {event['step']}: {_numbers(event)}, undisturbed {undisturbed[event['step']]}"
                )
    missing = sorted(set(range(1, STEPS + 1)) - steps)
    return violations + ([f"steps {missing} were never told of"] if missing else [])


def _lost_steps(events: list[dict[str, Any]], torn: set[int]) -> list[str]:
    """Return the starts before a checkpoint that was whole."""
    violations: list[str] = []
    complete_steps: set[int] = {0}
    torn = set(torn)
    for event in events:
        if event["kind"] == "checkpoint":
            complete_steps.add(event["step"])
        elif event["kind"] == "start":
            newest = max(complete_steps - torn)
            if event["step"] < newest:
                violations.append(
                    f"a link began at step {event['step']}: the checkpoint of step {newest} was whole"
                )
            if torn and torn <= complete_steps:
                complete_steps = {step for step in complete_steps if step <= event["step"]}
                torn.clear()
    return violations


def overlapping_trainings(trial: Trial) -> list[str]:
    """Return the trainings of the run that began before the one before it had ended."""
    violations: list[str] = []
    running: dict[int, str] = {}
    for line in trial.journal():
        if line["rank"] != "0":
            continue
        if line["event"] == "end":
            running.pop(line["pid"], None)
        else:
            violations += [f"job {line['job']} trains beside job {other}" for other in running.values()]
            running[line["pid"]] = line["job"]
    return violations


def _unknown_trainings(trial: Trial) -> list[str]:
    """Return the jobs that trained and that no launch on record had."""
    trained = {line["job"] for line in trial.journal()}
    rows = trial.history()
    violations = [
        f"job {job} trained and is unknown to history" for job in sorted(trained - known_jobs(rows))
    ]
    if not trial.is_forgotten:
        violations += [
            f"launch {row['launch']} is {row['state']}" for row in rows if row["state"] == "UNKNOWN"
        ]
    return violations


def _leftovers(trial: Trial, mounts: list[str]) -> list[str]:
    """Return processes and mounts that are left."""
    jobs = {job for name, job in trial.cluster.all_jobs if name == PREFIX + trial.run}
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (processes := trial.cluster.leftover_processes(jobs)) and time.monotonic() < deadline:
        time.sleep(0.5)
    new = sorted(set(trial.cluster.mounts()) - set(mounts))
    return [f"left: {process}" for process in processes] + [f"mounted: {mount}" for mount in new]
