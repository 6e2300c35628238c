"""Each check, with configurations that it lets pass and that it does not."""

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
    more = dict(case.plan)
    ranks, links, queue = more.pop("ranks", None), more.pop("links", 1), more.pop("queue", {})
    container, environment = more.pop("container", None), more.pop("environment", {})
    stage_config = more.pop("stage_config", None)
    plan = plan_of(changed(case.base, case.changes), **more)
    asked = replace(plan.job.queue, **queue)
    told = {"queue": asked, "container": container, "environment": environment, "stage_config": stage_config}
    plan = replace(plan, job=replace(plan.job, chain=Chain(links=links), **told))
    if ranks is not None:
        plan = replace(plan, job=replace(plan.job, profile=Profile(ranks, ("cuda",), "/profiles")))
    return [finding for finding in run_checks(plan, case.facts) if finding.id == case.id]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}-{ascii(str(case.changes))[:40]}")
def test_a_check_finds_what_it_is_for(case: Case) -> None:
    found = findings_of(case)
    if not case.words:
        assert found == []
        return
    told = "\n".join(f"{finding.message}\n{finding.fix}" for finding in found)
    for word in case.words:
        assert word in told
    assert found[0].severity is case.severity


def test_every_check_has_cases_of_both_kinds() -> None:
    ids = {check.id for check in CHECKS}
    assert {case.id for case in CASES if case.words} == ids
    assert {case.id for case in CASES if not case.words} == ids
