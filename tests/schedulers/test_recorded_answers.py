"""Answers of each Slurm, as scripts/record_slurm.py recorded them, are read alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.schedulers import slurm
from launcher.schedulers.job_status import status_of
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm import cluster
from launcher.slurm.commands import Answer
from launcher.slurm.records import Record, parse_sacct, parse_squeue, script_of
from launcher.slurm.states import State

RECORDED = Path(__file__).parent / "recorded"
RELEASES = ("22.05", "24.11", "26.05")

# State, exit code and requeues in the queue, by the launch's tag.
QUEUE = {
    "t-completed": (State.COMPLETED, 0, 0),
    "t-failed": (State.FAILED, 3, 0),
    "t-saved": (State.INTERRUPTED, 75, 0),
    "t-killed": (State.FAILED, 137, 0),
    "t-cancelled": (State.CANCELLED, 143, 0),
    "t-cancelled-waiting": (State.CANCELLED, None, 0),
    "t-running": (State.RUNNING, None, 0),
    "t-pending": (State.PENDING, None, 0),
    "t-held": (State.PENDING, None, 0),
    "t-begin": (State.PENDING, None, 0),
    "t-never": (State.PENDING, None, 0),
    "t-requeued": (State.COMPLETED, 0, 1),
    "t-requeue-held": (State.PENDING, None, 1),
    "t-timeout": (State.TIMEOUT, 143, 0),
    "t-launch-failed": (State.FAILED, None, 0),
}
REASONS = {
    "t-held": "JobHeldUser: held",
    "t-begin": "BeginTime: its time to begin has not come",
    "t-never": "DependencyNeverSatisfied: ",
    "t-requeue-held": "job requeued in held state: held",
    "t-pending": "PartitionDown: ",
    "t-failed": "exit code 3",
    "t-killed": "exit code 137 (SIGKILL)",
    "t-launch-failed": "JobLaunchFailure: Slurm could not start the script",
    "t-timeout": "TimeLimit",
}


def text(release: str, name: str) -> str:
    return (RECORDED / release / name).read_text()


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def records_of_tag(records: list[Record], tag: str) -> list[Record]:
    return [record for record in records if record.tag == tag]


def test_the_recorded_queue_is_read(release: str) -> None:
    records = parse_squeue(text(release, "squeue.txt"))
    assert len(records) == len(text(release, "squeue.txt").splitlines())
    for tag, expected in QUEUE.items():
        (record,) = records_of_tag(records, tag)
        status = status_of(record)
        assert (status.state, status.exit_code, status.restarts) == expected, tag
        assert (status.reason or "").startswith(REASONS.get(tag, "")), (tag, status.reason)
        assert script_of(record) == Path(
            f"/tmp/slipway-recording/{tag}/launches/1/submitted/{tag}.1_submission.sh"
        )
    (failed,) = records_of_tag(records, "t-node-failed")
    assert status_of(failed).state is State.NODE_FAIL


def test_recorded_links_and_tasks_are_distinguished(release: str) -> None:
    for parse, name in ((parse_squeue, "squeue.txt"), (parse_sacct, "sacct.txt")):
        records = parse(text(release, name))
        links = sorted(records_of_tag(records, "t-chain"), key=lambda record: int(record.parent_id))
        assert [record.link for record in links] == [1, 2, 3]
        tasks = {record.task: status_of(record).exit_code for record in records_of_tag(records, "t-array")}
        assert tasks == {"0": 0, "1": 1, "2": 2}
        (waiting,) = records_of_tag(records, "t-array-waiting")
        assert waiting.task == "0-4"


def test_the_recorded_accounting_is_read(release: str) -> None:
    records = parse_sacct(text(release, "sacct.txt"))
    assert State.UNKNOWN not in {record.state for record in records}
    for tag, (state, _, restarts) in QUEUE.items():
        attempts = records_of_tag(records, tag)
        assert (status_of(attempts[-1]).state, len(attempts)) == (state, restarts + 1), tag
    assert [record.word for record in records_of_tag(records, "t-requeued")] == ["REQUEUED", "COMPLETED"]
    (failed,) = records_of_tag(records, "t-launch-failed")
    assert (status_of(failed).reason or "").startswith(REASONS["t-launch-failed"])


def test_the_recorded_cluster_is_read(release: str) -> None:
    settings = cluster.parse_settings(text(release, "settings.txt"))
    assert (settings.has_accounting, settings.max_array) == (True, 1001)
    assert {"associations", "limits", "qos"} <= settings.enforced
    partitions = {
        partition.name: partition for partition in cluster.parse_partitions(text(release, "partitions.txt"))
    }
    assert set(partitions) == {"gpu", "low", "high", "cloud"}
    assert partitions["gpu"].is_default and partitions["gpu"].total_nodes == 4
    assert partitions["cloud"].state == "DOWN"
    nodes = cluster.parse_nodes(text(release, "nodes.txt"))["gpu"]
    assert [(node.name, node.gpus) for node in nodes] == [(f"n{n}", (("a100", 8),)) for n in range(1, 5)]
    assert {node.name for node in nodes if not node.is_usable} <= {"n4"}
    assert "team" in {
        association.account
        for association in cluster.parse_associations(text(release, "associations.txt"), "sandbox")
    }
    assert {qos.name for qos in cluster.parse_qos(text(release, "qos.txt"))} == {"long", "normal"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("fine", None),
        ("more nodes than there are", "would wait"),
        ("more GPUs than a node has", "would wait"),
        ("drained nodes", "would wait"),
        ("no such partition", UserError),
        ("no such node", UserError),
        ("no such option", UserError),
    ],
)
def test_recorded_answers_to_scripts_are_understood(
    release: str, case: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = json.loads(text(release, "test_only.json"))[case]
    monkeypatch.setattr(
        slurm.commands, "ask", lambda *_, **__: Answer(recorded["code"], "", recorded["stderr"])
    )
    if expected is UserError:
        with pytest.raises(UserError, match="Slurm would refuse this job: "):
            SlurmScheduler().validate("")
    else:
        verdict = SlurmScheduler().validate("")
        assert verdict.notice is None
        assert verdict.waits is None if expected is None else str(expected) in (verdict.waits or "")


def test_json_and_scontrol_have_the_command_of_a_submission(release: str) -> None:
    """The table of docs/versions.md: arguments in 22.05 alone, the line of the submission since 25.11."""
    script = "/tmp/slipway-recording/t-running/launches/1/submitted/t-running.1_submission.sh"
    command = f"{script} t-running" if release == "22.05" else script
    (job,) = json.loads(text(release, "squeue.json"))["jobs"]
    assert job["command"] == command
    assert job.get("submit_line") == (f"sbatch {script} t-running" if release == "26.05" else None)
    job_line = next(
        line for line in text(release, "show_job.txt").splitlines() if " UserId=" in line and command in line
    )
    assert (f" SubmitLine=sbatch {script} t-running" in job_line) == (release == "26.05")
