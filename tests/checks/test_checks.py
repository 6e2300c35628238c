"""Each check, with configurations that pass it and configurations that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.checks.findings import Finding
from launcher.checks.registry import CHECKS, run_checks
from launcher.plan import Chain, Profile
from tests.checks.cases import Case
from tests.checks.job_cases import JOB_CASES
from tests.checks.model_cases import MODEL_CASES
from tests.checks.plans import changed, plan_of

CASES = [*MODEL_CASES, *JOB_CASES]


def findings_of(case: Case) -> list[Finding]:
    options = dict(case.plan)
    ranks, links, queue = options.pop("ranks", None), options.pop("links", 1), options.pop("queue", {})
    container, environment = options.pop("container", None), options.pop("environment", {})
    stage_config = options.pop("stage_config", None)
    plan = plan_of(changed(case.base, case.changes), **options)
    job_queue = replace(plan.job.queue, **queue)
    fields = {
        "queue": job_queue,
        "container": container,
        "environment": environment,
        "stage_config": stage_config,
    }
    plan = replace(plan, job=replace(plan.job, chain=Chain(links=links), **fields))
    if ranks is not None:
        plan = replace(plan, job=replace(plan.job, profile=Profile(ranks, ("cuda",), "/profiles")))
    return [finding for finding in run_checks(plan, case.facts) if finding.id == case.id]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}-{ascii(str(case.changes))[:40]}")
def test_each_case_has_the_expected_finding(case: Case) -> None:
    findings = findings_of(case)
    if not case.words:
        assert findings == []
        return
    text = "\n".join(f"{finding.message}\n{finding.fix}" for finding in findings)
    for word in case.words:
        assert word in text
    assert findings[0].severity is case.severity


def test_every_check_has_cases_of_both_kinds() -> None:
    ids = {check.id for check in CHECKS}
    failing, passing = (
        {case.id for case in CASES if case.words},
        {case.id for case in CASES if not case.words},
    )
    assert ids ^ failing == set(), "no case that fails, or no such check"
    assert ids ^ passing == set(), "no case that passes, or no such check"
