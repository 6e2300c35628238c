"""A controller that is busy or dead is asked again for a while, then left alone, and reported."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from launcher.slurm.commands import Answer, Retry, SchedulerSilent, run, says_no_slurm, says_unanswered

BUSY = Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
DONE = Answer(0, "told", "")


@dataclass
class Controller:
    """A controller that gives the set answers; each try takes so many seconds of a clock of its own."""

    answers: list[Answer | None]
    seconds: float = 0.0
    now: float = 1000.0
    commands: list[Sequence[str]] = field(default_factory=list)

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Answer:
        self.commands.append(command)
        self.now += min(self.seconds, timeout)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise TimeoutError
        return answer

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def retry(self, jitter: float = 0.5) -> Retry:
        return Retry(run=self.run, clock=lambda: self.now, sleep=self.sleep, jitter=lambda: jitter)


def test_a_busy_controller_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller([BUSY, BUSY, DONE])
    with caplog.at_level(logging.WARNING, logger="launcher.slurm.commands"):
        assert controller.retry().ask(["squeue"], {}) is DONE
    assert [record.getMessage() for record in caplog.records] == [
        "Slurm does not answer squeue (Unable to contact slurm controller (connect failure)); asking again"
    ] * 2


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_a_busy_controller_is_asked_for_ten_seconds(jitter: float) -> None:
    controller = Controller([BUSY])
    with pytest.raises(SchedulerSilent, match="Slurm does not answer: Unable to contact") as raised:
        controller.retry(jitter).ask(["squeue"], {})
    assert 4 <= len(controller.commands) <= 5
    assert controller.now - 1000 <= 10
    assert f"(squeue, asked {len(controller.commands)} times, " in raised.value.message
    assert raised.value.exit_code == 3


def test_slurms_own_patience_counts() -> None:
    """Slurm's commands try for 9 s themselves if nobody listens, and for 10 s if nobody answers."""
    for seconds, tries in ((9.0, 2), (10.0, 1), (100.0, 1)):
        controller = Controller([None if seconds > 30 else BUSY], seconds)
        with pytest.raises(
            SchedulerSilent, match="no answer within 150 s" if seconds > 30 else "Unable to contact"
        ):
            controller.retry(0.0).ask(["squeue"], {})
        assert len(controller.commands) == tries


def test_silent_daemon_is_not_asked_for_a_while() -> None:
    """A verb asks several questions, and `--watch` every two seconds."""
    controller = Controller([BUSY])
    retry = controller.retry()
    with pytest.raises(SchedulerSilent) as first:
        retry.ask(["squeue"], {})
    tries = len(controller.commands)
    with pytest.raises(SchedulerSilent) as second:
        retry.ask(["scontrol"], {})
    assert (second.value.message, len(controller.commands)) == (first.value.message, tries)
    controller.answers = [DONE]
    # Another Slurm, and another daemon of it.
    assert retry.ask(["squeue"], {"SLURM_CONF": "/other"}) is DONE
    assert retry.ask(["sacct"], {}, who="Slurm's accounting") is DONE
    controller.now += 11
    assert retry.ask(["squeue"], {}) is DONE
    assert retry.ask(["squeue"], {}) is DONE


def test_an_answer_that_refuses_is_an_answer() -> None:
    refused = Answer(1, "", "scancel: error: Kill job error on job id 1: Access/permission denied\n")
    controller = Controller([refused])
    assert controller.retry().ask(["scancel"], {}) is refused
    assert len(controller.commands) == 1


def test_a_command_is_asked_once_where_once_is_enough() -> None:
    controller = Controller([None], 45.0)
    with pytest.raises(SchedulerSilent, match="asked once, 10 s in all"):
        controller.retry().ask(["sacct"], {}, timeout=10, again=False)


# As Slurm 22.05 printed them: with its controller stopped, killed, and its database's daemon stopped.
@pytest.mark.parametrize(
    "message",
    [
        "Socket timed out on send/recv operation",
        "Unable to contact slurm controller (connect failure)",
        "Kill job error on job id 5: Unable to contact slurm controller (connect failure)",
        "Unexpected message received for job 5; slurm_suspend error: Unexpected message received",
        "slurm_persist_conn_open: No response to persist_init",
        "Problem talking to the database: Connection refused",
        "Zero Bytes were transmitted or received",
        "Transport endpoint is not connected",
        "Slurm backup controller in standby mode",
    ],
)
def test_messages_that_nobody_answers(message: str) -> None:
    assert says_unanswered(message)


@pytest.mark.parametrize(
    "message",
    [
        "Invalid job id specified",
        "Access/permission denied",
        "Job can not be altered now, try again later",
        "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        "invalid partition specified: nope",
        "Slurm accounting storage is disabled",
        "",
    ],
)
def test_messages_that_are_answers(message: str) -> None:
    assert not says_unanswered(message)


def test_no_slurm_at_all_is_not_a_busy_one() -> None:
    message = "squeue: error: fetch_config: DNS SRV lookup failed"
    assert says_no_slurm(message)
    assert not says_unanswered(message)


def test_a_command_that_hangs_is_ended_and_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.slurm.commands._NOTICE_SECONDS", 0.05)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="launcher.slurm.commands"), pytest.raises(TimeoutError):
        run([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.3)
    assert time.monotonic() - start < 30
    assert "has not answered for" in caplog.text


def test_the_output_of_a_command_is_returned() -> None:
    text = "import sys; sys.stdout.buffer.write('h\\xe9'.encode() + bytes([255])); sys.exit(3)"
    answer = run([sys.executable, "-c", text], {}, 30.0)
    assert (answer.code, answer.stdout) == (3, "hé\udcff")
