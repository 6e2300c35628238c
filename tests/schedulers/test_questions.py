"""Questions to Slurm: one squeue and one sacct, however many jobs there are."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from launcher.schedulers.base import JobRef, Submission
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm.commands import Answer, Retry, Unreachable
from launcher.slurm.notations import expand_tasks
from launcher.slurm.records import SEPARATOR, parse_ends
from launcher.slurm.states import State
from slipway.common.node.marks import note_cancelled
from tests.job_marks import leave_marks

EMPTY = Answer(0, "", "")
NO_ACCOUNTING = Answer(1, "", "Slurm accounting storage is disabled\n")


def queue_line(job_id: str, word: str, tag: str) -> str:
    parts = [job_id, job_id, word, "None", "n1", "1:00", "0", "0", "me", f"/x_submission.sh {tag}", "\n"]
    return SEPARATOR.join(parts)


def sacct_line(job_id: str, word: str, tag: str) -> str:
    line = f"sbatch /x_submission.sh {tag}"
    parts = [job_id, job_id, word, "None", "n1", "00:01:00", "0:0", "2026-01-01", "me", "/w", line]
    return SEPARATOR.join(parts) + "\n"


class Slurm:
    """A Slurm that answers squeue and sacct; an answer of `None` does not come."""

    def __init__(self, squeue: Answer | None = EMPTY, sacct: Answer | None = EMPTY) -> None:
        self.answers = {"squeue": squeue, "sacct": sacct}
        self.commands: list[Sequence[str]] = []
        self.timeouts: list[float] = []
        retry = Retry(run=self.run, sleep=lambda _: None)
        self.scheduler = SlurmScheduler(None, retry)

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Answer:
        self.commands.append(command)
        self.timeouts.append(timeout)
        assert environment["SLURM_BITSTR_LEN"] == "0"
        answer = self.answers[command[0]]
        if answer is None:
            raise TimeoutError
        return answer

    @property
    def programs(self) -> list[str]:
        return [command[0] for command in self.commands]


def refs(count: int, directory: Path) -> list[JobRef]:
    return [JobRef({1: str(number)}, directory / str(number), [f"tag-{number}"]) for number in range(count)]


def submission(tag: str, *, user: str | None = None, days: float = 0.0) -> Submission:
    since = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    return Submission(tag, Path("/x_submission.sh"), user or getpass.getuser(), since)


def test_one_question_each_for_any_number_of_jobs(tmp_path: Path) -> None:
    live = "".join(queue_line(str(number), "RUNNING", f"tag-{number}") for number in range(250))
    past = "".join(sacct_line(str(number), "COMPLETED", f"tag-{number}") for number in range(250, 500))
    slurm = Slurm(Answer(0, live, ""), Answer(0, past, ""))
    statuses = slurm.scheduler.statuses(refs(500, tmp_path))
    assert slurm.programs == ["squeue", "sacct"]
    assert [statuses[number].state for number in (0, 249, 250, 499)] == [
        *[State.RUNNING] * 2,
        *[State.COMPLETED] * 2,
    ]
    (jobs,) = [option for option in slurm.commands[1] if option.startswith("--jobs=")]
    assert jobs == "--jobs=" + ",".join(map(str, range(250, 500)))
    slurm.commands.clear()
    assert slurm.scheduler.statuses([]) == []
    slurm.scheduler.statuses(refs(250, tmp_path))
    assert slurm.programs == ["squeue"], "nothing has ended that the accounting could tell of"


def test_a_list_too_long_for_one_argument_is_split(tmp_path: Path) -> None:
    slurm = Slurm()
    slurm.scheduler.statuses(refs(30_000, tmp_path))
    assert slurm.programs == ["squeue", "sacct"]
    squeue, sacct = slurm.commands
    assert not [option for option in squeue if option.startswith("--jobs")]
    parts = [option.removeprefix("--jobs=") for option in sacct if option.startswith("--jobs")]
    assert len(parts) > 1 and max(map(len, parts)) < 131_000
    assert ",".join(parts).split(",") == [str(number) for number in range(30_000)]


def test_an_id_that_the_queue_has_forgotten_is_no_failure(tmp_path: Path) -> None:
    invalid = Answer(1, "", "slurm_load_jobs error: Invalid job id specified\n")
    slurm = Slurm(invalid, Answer(0, sacct_line("0", "TIMEOUT", "tag-0"), ""))
    assert slurm.scheduler.statuses(refs(1, tmp_path))[0].state is State.TIMEOUT
    slurm = Slurm(Answer(1, "", "squeue: error: Something else\n"))
    with pytest.raises(Unreachable, match="squeue failed: Something else"):
        slurm.scheduler.statuses(refs(1, tmp_path))


def test_a_dead_accounting_does_not_hide_the_queue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = queue_line("0", "RUNNING", "tag-0") + queue_line("1", "FAILED", "tag-1")
    slurm = Slurm(Answer(0, live, ""), None)
    statuses = slurm.scheduler.statuses(refs(3, tmp_path))
    states = [statuses[number].state for number in range(3)]
    assert states == [State.RUNNING, State.FAILED, State.UNKNOWN]
    assert slurm.timeouts[1] == 10.0
    reason = statuses[2].reason or ""
    assert reason.startswith("not in the queue; Slurm's accounting does not answer: no answer within 10 s")
    assert "Slurm's accounting does not answer" in caplog.text
    slurm.scheduler.statuses(refs(3, tmp_path))
    assert slurm.programs == ["squeue", "sacct", "squeue"], "left alone for a while"


class SlurmWithEnds(Slurm):
    """A Slurm that knows when jobs ended: 0 in the queue, 1 in the accounting."""

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Answer:
        answer = super().run(command, environment, timeout)
        if not any("EndTime" in option or "=JobID,End" in option for option in command):
            return answer
        assert environment["SLURM_TIME_FORMAT"] == "%s"
        job_id = "0" if command[0] == "squeue" else "1"
        return Answer(0, f"{job_id}{SEPARATOR}{1000 + int(job_id)}{SEPARATOR}\nrubbish\n", "")


def test_the_end_of_a_job_without_marks_is_asked_for_once(tmp_path: Path) -> None:
    lines = [queue_line(str(number), "CANCELLED", f"tag-{number}") for number in range(4)]
    lines = [line.replace("1:00", "0:00") for line in lines]
    slurm = SlurmWithEnds(Answer(0, "".join(lines), ""), NO_ACCOUNTING)
    by_user, began = refs(4, tmp_path)[2:]
    by_user.launch_dir.mkdir()
    note_cancelled(by_user.launch_dir, "2", "me")
    began.launch_dir.mkdir()
    leave_marks(began.launch_dir, "3", started=1.0)
    for _ in range(2):
        statuses = slurm.scheduler.statuses(refs(4, tmp_path))
        assert [statuses[number].ended for number in range(4)] == [1000.0, 1001.0, None, None]
    assert slurm.programs == ["squeue", "sacct", "squeue", "sacct", "squeue", "sacct"]
    options = [option for command in slurm.commands[2:4] for option in command if option.startswith("--jobs")]
    assert options == ["--jobs=0,1", "--jobs=1"]


def test_the_end_of_an_array_is_that_of_its_last_task() -> None:
    rows = {"7_[2-3%1]": 20, "7_0": 30, "7_1": 10, "8": 5, "9": "N/A", "x": 1}
    ends = parse_ends("".join(f"{job}{SEPARATOR}{end}{SEPARATOR}\n" for job, end in rows.items()))
    assert ends == {"7": 30.0, "7_0": 30.0, "7_1": 10.0, "7_2": 20.0, "7_3": 20.0, "8": 5.0}


def test_marks_give_the_end_without_accounting(tmp_path: Path) -> None:
    slurm = Slurm(EMPTY, NO_ACCOUNTING)
    _, ref = refs(2, tmp_path)
    ref.launch_dir.mkdir()
    leave_marks(ref.launch_dir, "1", started=1.0, ended=2.0, code=3)
    assert slurm.scheduler.statuses([ref])[0].exit_code == 3


def test_an_accounting_without_command_lines_is_read(tmp_path: Path) -> None:
    """SubmitLine came with 21.08."""
    line = sacct_line("0", "COMPLETED", "").rpartition(SEPARATOR)[0] + "\n"

    class OldSlurm(Slurm):
        def run(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Answer:
            super().run(command, environment, timeout)
            if command[0] == "sacct" and any("SubmitLine" in option for option in command):
                return Answer(1, "", 'sacct: error: Invalid field requested: "SubmitLine"\n')
            return Answer(0, line, "") if command[0] == "sacct" else EMPTY

    slurm = OldSlurm()
    assert slurm.scheduler.statuses(refs(1, tmp_path))[0].state is State.COMPLETED
    slurm.commands.clear()
    slurm.scheduler.statuses(refs(1, tmp_path))
    assert slurm.programs == ["squeue", "sacct"], "it is known by now"


def test_all_jobs_of_all_submissions_are_found_in_one_question_each() -> None:
    """A tag whose answer was lost may have become two jobs; the first one counts."""
    live = queue_line("12", "PENDING", "two") + queue_line("11", "PENDING", "other")
    past = sacct_line("9", "COMPLETED", "two") + sacct_line("10_[0-4%1]", "CANCELLED", "array")
    slurm = Slurm(Answer(0, live, ""), Answer(0, past, ""))
    submissions = [submission("two"), submission("array", days=2), submission("none"), submission("wo")]
    assert slurm.scheduler.find(submissions) == {"two": {1: ["9", "12"]}, "array": {1: ["10"]}}
    assert slurm.programs == ["squeue", "sacct"]
    squeue, sacct = slurm.commands
    assert {f"--user={getpass.getuser()}", "--all"} <= {*squeue}, "also in partitions that are hidden"
    since = min(option for option in sacct if option.startswith("--starttime="))
    expected = datetime.now(UTC) - timedelta(days=3)
    assert since == f"--starttime={expected:%Y-%m-%d}"


def test_a_user_whom_this_host_does_not_know_does_not_fail_the_question() -> None:
    slurm = Slurm(Answer(0, queue_line("12", "PENDING", "t"), ""))
    assert slurm.scheduler.find([submission("t", user="nobody-of-that-name"), submission("u")]) == {
        "t": {1: ["12"]}
    }
    squeue, sacct = slurm.commands
    assert not [option for option in squeue if option.startswith("--user")]
    assert "--allusers" in sacct


def test_the_accounting_is_not_searched_for_old_submissions() -> None:
    slurm = Slurm(Answer(0, queue_line("12", "PENDING", "t"), ""))
    # What waits for longer is in the queue.
    assert slurm.scheduler.find([submission("t", days=8)]) == {"t": {1: ["12"]}}
    assert slurm.programs == ["squeue"]
    assert slurm.scheduler.find([]) == {}


def test_a_busy_controller_is_reported_while_looking_for_a_job() -> None:
    slurm = Slurm(None)
    with pytest.raises(Unreachable, match="Slurm does not answer"):
        slurm.scheduler.find([submission("t")])


def test_array_that_waits_as_one_record_is_taken_apart_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded: list[str] = []

    def expand(text: str) -> list[int]:
        expanded.append(text)
        return expand_tasks(text)

    monkeypatch.setattr("launcher.schedulers.slurm.expand_tasks", expand)
    slurm = Slurm(Answer(0, queue_line("7_[0-49]", "PENDING", "a-tag"), ""))
    points = [JobRef({1: f"7_{number}"}, tmp_path, ["a-point", "a-tag"]) for number in range(50)]
    assert {status.state for status in slurm.scheduler.statuses(points)} == {State.PENDING}
    assert expanded == ["0-49"]


def test_log_tells_why_a_job_could_leave_no_mark_of_its_end(tmp_path: Path) -> None:
    """Slurm has its state alone; of one that left a mark the log is not read."""
    slurm = Slurm(Answer(0, queue_line("1", "FAILED", "tag-1"), ""))
    _, ref = refs(2, tmp_path)
    ref.launch_dir.mkdir()
    (ref.launch_dir / "x_submission.sh").touch()
    (ref.launch_dir / "log-x_1.err").write_text("OSError: [Errno 28] No space left on device\n")
    assert slurm.scheduler.statuses([ref])[0].why == "a file system was full"
    leave_marks(ref.launch_dir, "1", started=1.0, ended=2.0, code=1)
    assert slurm.scheduler.statuses([ref])[0].why is None
