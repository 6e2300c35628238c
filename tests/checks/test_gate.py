"""The gate: errors for which a launch is refused, whoever starts it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from launcher.checks.findings import Severity
from launcher.checks.gate import check_drafts, check_launch, require_passed, show_to_scheduler
from launcher.checks.registry import CHECKS
from launcher.drafting import Draft, Request, draft
from launcher.errors import Mistakes, UserError
from launcher.launching import launch
from tests.launching.fake_slurm import FakeSlurm, install, overrides

SCHEDULER = next(check for check in CHECKS if check.id == "scheduler")
ODD_BATCH = "training.model.global_batch_size=7"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path, monkeypatch)


def draft_and_request(tmp_path: Path, *more: str) -> tuple[Draft, Request]:
    request = Request(overrides(tmp_path, *more), ["slipway", "launch"])
    return draft(request), request


def test_a_launch_by_the_library_is_refused_for_its_errors(tmp_path: Path, slurm: FakeSlurm) -> None:
    with pytest.raises(Mistakes, match=r"\[batch.global\]"):
        launch(*draft_and_request(tmp_path, ODD_BATCH))
    assert not (tmp_path / "results").exists()
    assert slurm.calls() == []


def test_a_launch_takes_the_report_that_its_caller_made(tmp_path: Path, slurm: FakeSlurm) -> None:
    launch_draft, request = draft_and_request(tmp_path, ODD_BATCH)
    (report,) = check_launch([launch_draft], ["batch.global", "engine.megatron"])
    assert launch(launch_draft, request, report=report).manifest.job_id == "101"


def test_report_with_errors_refuses_the_launch(tmp_path: Path, slurm: FakeSlurm) -> None:
    launch_draft, request = draft_and_request(tmp_path, ODD_BATCH)
    (report,) = check_drafts([launch_draft])
    with pytest.raises(Mistakes, match=r"\[batch.global\]"):
        launch(launch_draft, request, report=report)


def test_a_script_that_the_scheduler_judged_is_not_shown_again(tmp_path: Path, slurm: FakeSlurm) -> None:
    launch_draft, request = draft_and_request(tmp_path)
    (report,) = check_launch([launch_draft])
    launch(launch_draft, request, report=show_to_scheduler(report))
    assert len([call for call in slurm.calls() if call.startswith("judged ")]) == 1


def test_the_refusal_of_the_scheduler_is_an_error_of_its_own(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.judge(gpt3_tiny="Invalid account")
    (report,) = check_drafts([draft_and_request(tmp_path)[0]])
    assert not SCHEDULER.is_applicable(report.facts)
    report = show_to_scheduler(report)
    assert SCHEDULER.is_applicable(report.facts)
    (error,) = report.select(Severity.ERROR)
    assert (error.id, "Invalid account" in error.message) == ("scheduler", True)
    with pytest.raises(Mistakes, match=r"Invalid account.*\[scheduler\]"):
        require_passed([report])


def test_job_that_would_wait_is_a_warning(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.judge(gpt3_tiny="Requested nodes are busy")
    (report,) = check_drafts([draft_and_request(tmp_path)[0]])
    (warning,) = [finding for finding in show_to_scheduler(report).findings if finding.id == "scheduler"]
    assert warning.severity is Severity.WARNING
    assert "the job would wait" in warning.message


def test_schedulers_other_than_slurm_are_reported_as_skipped(tmp_path: Path) -> None:
    (report,) = check_drafts([draft_and_request(tmp_path, "cluster.scheduler=local")[0]])
    (skipped,) = [finding for finding in show_to_scheduler(report).findings if finding.id == "scheduler"]
    assert (skipped.severity, skipped.why) == (Severity.SKIPPED, "cluster.scheduler=local")


@pytest.mark.parametrize("name", ["machine", "scheduler"])
def test_launch_cannot_skip_the_machine_and_scheduler_checks(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"--no-check={name}: a launch always applies this check"):
        check_launch([draft_and_request(tmp_path)[0]], [name])


def test_warnings_are_logged_and_errors_of_all_stages_raised_together(
    tmp_path: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = [
        draft_and_request(tmp_path, word)[0] for word in (ODD_BATCH, "training.model.micro_batch_size=3")
    ]
    with caplog.at_level(logging.WARNING, "launcher"), pytest.raises(Mistakes) as raised:
        check_launch(drafts)
    assert len(raised.value.mistakes) >= 2
