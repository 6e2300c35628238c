"""Gather facts, apply the checks, and report findings that may stop a launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from launcher.checks.facts import Facts, SubmissionFacts
from launcher.checks.findings import Finding, Severity
from launcher.checks.gathering import configuration, host, images
from launcher.checks.registry import CHECKS, require_known, run_checks, sort_by_severity
from launcher.checks.rules.launch import MACHINE, SCHEDULER
from launcher.checks.site_rules import site_findings
from launcher.config.overrides import WORKSPACE
from launcher.drafting import Draft
from launcher.errors import Mistakes, UserError
from launcher.rendering.slurm_flags import empty_script
from launcher.stages.stage import stage_changes

if TYPE_CHECKING:
    from launcher.schedulers.base import Acceptance

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings about a draft, the worst first, with the facts that they rest on.

    `skipped` are the ids of checks that were not to be applied.
    """

    draft: Draft
    facts: Facts
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...] = ()
    # The ids of the site's checks that apply.
    of_site: Sequence[str] = ()

    def select(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is severity]

    def mistakes(self, severity: Severity) -> list[UserError]:
        """Return the findings of one severity as mistakes, with the sources of their keys."""
        return convert_to_mistakes(self.draft, self.select(severity))


def check_launch(
    drafts: Sequence[Draft], skipped: Sequence[str] = (), *, look: bool = True
) -> list[CheckReport]:
    """Check drafts before anything is written: log warnings, raise all errors together.

    Without `look` only the plan is examined, as in a dry run: no file, this machine or the cluster.
    """
    require_skippable(skipped)
    reports = check_drafts(drafts, skipped, look=look)
    if look and not any(report.select(Severity.ERROR) for report in reports):
        _require_schedulers(reports)
    for warning in (mistake for report in reports for mistake in report.mistakes(Severity.WARNING)):
        _logger.warning("warning: %s", warning)
    require_passed(reports)
    return reports


def _require_schedulers(reports: Sequence[CheckReport]) -> None:
    """Raise Unreachable without a scheduler: no warning matters then."""
    from launcher.slurm.commands import NO_SLURM

    for report in reports:
        if report.draft.plan.job.stage == WORKSPACE:
            continue  # salloc is asked
        why = report.facts.cluster.missing.get("settings", "") if report.facts.cluster is not None else ""
        if why == NO_SLURM or "there is no " in why:  # one that is silent is asked again by the launch
            show_to_scheduler(report)


def require_skippable(skipped: Sequence[str]) -> None:
    """Refuse unknown ids, and those that a launch may not skip, though `slipway check` may."""
    require_known(skipped)
    for name in (MACHINE, SCHEDULER):
        if name in skipped:
            text = f"--no-check={name}: a launch always applies this check"
            dry = f"launch --dry-run applies neither {MACHINE} nor {SCHEDULER}"
            raise UserError(text, hint=f"slipway check --no-check={name} skips it; {dry}")


def check_drafts(
    drafts: Sequence[Draft], skipped: Sequence[str] = (), *, look: bool = True, **known: Any
) -> list[CheckReport]:
    """Check drafts against their facts; those that are known already are not gathered."""
    reports = []
    for draft, facts in zip(drafts, gather(drafts, look=look, **known), strict=True):
        of_site, found = site_findings(draft, skipped)
        findings = sort_by_severity([*_apply_checks(draft, facts, skipped), *found])
        reports.append(CheckReport(draft, facts, tuple(findings), tuple(skipped), of_site))
    return reports


def _apply_checks(draft: Draft, facts: Facts, skipped: Sequence[str]) -> tuple[Finding, ...]:
    """Apply the checks; name the stage's own key where that replaces a value of the cluster."""
    config, stage = draft.composition.config, draft.plan.job.stage

    def rename_key(finding: Finding) -> Finding:
        group, _, name = (finding.key or "").partition(".")
        if group == "cluster" and name in stage_changes(config, stage):
            key = f"stage_cluster.{stage}.{name}"
        elif group == "cluster" and getattr(getattr(config, stage, None), name, None) is not None:
            key = f"{stage}.{name}"
        else:
            return finding
        return replace(finding, key=key, message=finding.message.replace(f"{finding.key}=", f"{key}=", 1))

    return tuple(map(rename_key, run_checks(draft.plan, facts, skipped)))


def gather(drafts: Sequence[Draft], *, look: bool = True, **known: Any) -> list[Facts]:
    """Gather the facts that the checks need of each draft and that are not yet `known`, by reading alone.

    Without `look` files, this machine and the cluster are not examined.
    """
    gatherers = {**GATHERERS, **(looking_gatherers() if look else {})}
    answers = {field: ask(drafts) for field, ask in gatherers.items() if field not in known}
    facts = [dict(zip(answers, values, strict=True)) for values in zip(*answers.values(), strict=True)]
    return [Facts(**known, **fields) for fields in facts]


_Gatherer = Callable[[Sequence[Draft]], Sequence[object]]


def _gather_each(find: Callable[[Draft], object], same: Callable[[Draft], object] = id) -> _Gatherer:
    """Return the gatherer that asks for each draft; drafts with the `same` share an answer."""

    @wraps(find)
    def gather(drafts: Sequence[Draft]) -> list[object]:
        answers: dict[object, object] = {}
        for draft in drafts:
            if same(draft) not in answers:
                answers[same(draft)] = find(draft)
        return [answers[same(draft)] for draft in drafts]

    return gather


# By the field of `Facts` that it finds out: a function of all drafts that are checked together.
GATHERERS: Mapping[str, _Gatherer] = {
    "node_gpus": _gather_each(configuration.node_gpus),
    "unexpanded": _gather_each(configuration.find_unexpanded),
    "added_keys": _gather_each(configuration.find_added_keys),
    "shipped_keys": _gather_each(configuration.read_known_keys),
    "image": _gather_each(partial(images.image_facts, look=False)),
    "trainer_verdict": lambda drafts: host.trainer_verdicts([draft.plan for draft in drafts]),
}


def looking_gatherers() -> Mapping[str, _Gatherer]:
    """Return those that look at files, at this machine or at the cluster, which a dry run does not."""
    from launcher.checks.gathering import earlier, paths

    return {
        "same_job_name": _gather_each(earlier.find_same_job_name),
        "open_secrets": _gather_each(paths.find_open_secrets),
        "paths": _gather_each(paths.path_facts),
        "image": _gather_each(partial(images.image_facts, look=True)),
        "earlier": _gather_each(earlier.compare_earlier_training),
        "cluster": _gather_each(host.cluster_facts, host.cluster_question),
        "exclude_file": _gather_each(
            host.read_excluded_nodes, lambda draft: draft.plan.job.chain.exclude_file
        ),
        "lacks_gpus": _gather_each(host.lacks_gpus),
        "host": _gather_each(host.host_facts, host.host_question),
        "supervisor_python": _gather_each(lambda _: host.supervisor_python_problem(), lambda _: None),
    }


def show_to_scheduler(
    report: CheckReport, validate: Callable[[str], Acceptance] | None = None, *, must_answer: bool = True
) -> CheckReport:
    """Return a report with the scheduler's answer to the script, the last of the facts.

    If no scheduler can be asked, raise `Unreachable`, as a launch does, or skip the check unless it
    `must_answer`. `validate` is a more patient `Scheduler.validate`, for any scheduler; by default only Slurm
    is asked.
    """
    from launcher.schedulers import scheduler_for
    from launcher.slurm.commands import Unreachable

    plan = report.draft.plan
    if SCHEDULER in report.skipped:
        return report
    if plan.scheduler != "slurm" and validate is None:
        answer = SubmissionFacts(None, missing={"is_refused": f"cluster.scheduler={plan.scheduler}"})
    else:
        # salloc has no --test-only: test the same request with sbatch.
        script = empty_script(plan) if plan.job.stage == WORKSPACE else report.draft.script
        validate = validate or scheduler_for(plan.scheduler, plan.slurm_conf).validate
        try:
            answer = SubmissionFacts(is_refused=False, **validate(script)._asdict())
        except Unreachable as error:
            if must_answer:
                raise
            answer = SubmissionFacts(None, missing={"is_refused": error.message})
        except UserError as error:
            answer = SubmissionFacts(is_refused=True, refusal=error.message, fix=error.hint)
    facts = replace(report.facts, submission=answer)
    others = [check.id for check in CHECKS if check.id != SCHEDULER]
    findings = [*report.findings, *_apply_checks(report.draft, facts, others)]
    return replace(report, facts=facts, findings=tuple(sort_by_severity(findings)))


def require_passed(reports: Sequence[CheckReport]) -> None:
    """Raise all errors of reports together, each with the sources of its values."""
    errors = [mistake for report in reports for mistake in report.mistakes(Severity.ERROR)]
    if errors:
        raise Mistakes(errors)


def refuse(draft: Draft, findings: Sequence[Finding]) -> None:
    """Raise all errors among the findings about a draft together."""
    require_passed([CheckReport(draft, Facts(), tuple(findings))])


def convert_to_mistakes(draft: Draft, findings: Sequence[Finding]) -> list[UserError]:
    """Return findings as mistakes, with the sources of their keys."""
    mistakes = [
        UserError(f"{finding.message} [{finding.id}]", key=finding.key, also=finding.also, hint=finding.fix)
        for finding in findings
    ]
    if mistakes:
        draft.composition.annotate(Mistakes(mistakes))
    return mistakes
