"""Launch a draft: reserve a number, ask the scheduler, write the launch, submit it."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from launcher.checks.facts import Facts
from launcher.checks.gate import CheckReport, check_launch, require_passed, show_to_scheduler
from launcher.drafting import Draft, Request
from launcher.errors import UserError, escape, explain_os_error
from launcher.jobs.launches import Launch
from launcher.launching.granted import granted
from launcher.launching.recovery import reconcile_unconfirmed
from launcher.launching.submission import describe_ignored, submit, validate
from launcher.launching.writing import record_job, write_draft
from launcher.runs.known_trees import remember_trees
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import LAUNCHES, LaunchPaths, display_path
from launcher.runs.write import (
    discard_launch,
    list_missing_directories,
    make_directories,
    release_number,
    remove_empty,
    reserve_number,
)
from launcher.schedulers import scheduler_for
from launcher.schedulers.base import NoAnswer, Scheduler
from launcher.schedulers.local import turn_holder
from launcher.slurm.sbatch_options import combine_dependency
from launcher.stages.image import STAGE as IMAGE
from slipway.common.files import is_job_id, write_atomic
from slipway.common.node.excluded import ExcludedNode, read_excluded
from slipway.common.node.marks import GIVEN_UP, claim, claimant
from slipway.supervisor.dependent_stages import NAME as STAGES_FILE
from slipway.supervisor.dependent_stages import Repeated, Stage, Stages, to_json

__all__ = ["launch", "launch_stages", "nodes_to_avoid"]


@dataclass(slots=True)
class _PreparedLaunch:
    """An accepted draft with its own launch number, and its manifest once that is written."""

    draft: Draft
    facts: Facts
    scheduler: Scheduler
    warnings: list[str]
    manifest: Manifest = field(init=False)

    @property
    def launch(self) -> Launch:
        return Launch(self.paths, self.manifest, warnings=tuple(self.warnings))

    @property
    def paths(self) -> LaunchPaths:
        return self.draft.plan.paths

    @property
    def stage(self) -> str:
        """The stage, with its part if it is several jobs."""
        return self.draft.stage_name

    @property
    def dependency(self) -> str | None:
        return self.draft.plan.job.queue.dependency

    @property
    def is_chain(self) -> bool:
        return self.draft.plan.job.chain.links > 1

    def needs_success_of(self, stage: str) -> bool:
        """Return True if this stage is to run after the success of the previous one alone."""
        config = self.draft.composition.config
        # It always needs its image, and the part before it.
        is_part = config.data_preparation is not None and config.data_preparation.phase not in (None, "fetch")
        return stage == IMAGE or is_part or config.resilience.after_stage == "afterok"

    def format_dependency(self, before: _PreparedLaunch, jobs: Sequence[str]) -> str:
        """Return the dependency of this stage on the previous stage's jobs.

        The last link of a chain is unknown: the job waits for the known links, their supervisors add the
        others, and it judges their end by itself (`slipway.supervisor.dependent_stages`).
        """
        is_judged_later = before.is_chain or not self.needs_success_of(before.stage)
        condition = "afterany" if is_judged_later else "afterok"
        key = f"{self.draft.plan.job.stage}.run.dependency"
        return combine_dependency(self.dependency, f"{condition}:{':'.join(jobs)}", key)


def launch(draft: Draft, request: Request, *, report: CheckReport | None = None) -> Launch:
    """Launch a draft: see `launch_stages`."""
    (launched,) = launch_stages([draft], request, reports=[report] if report is not None else None)
    return launched


def launch_stages(
    drafts: Sequence[Draft], request: Request, *, reports: Sequence[CheckReport] | None = None
) -> list[Launch]:
    """Launch stages one after the other, each waiting for the one before.

    The scheduler judges all of them, and all are written, before the first is submitted. `reports` are those
    of checked drafts (`launcher.checks.gate.check_launch`). Raise UserError if an earlier launch turns out to
    be an unknown job of the user, or the scheduler refuses; a launch that it refuses beforehand is not
    written. Raise NoAnswer if it is unknown whether a written launch became a job.
    """
    reports = check_launch(drafts) if reports is None else reports
    require_passed(reports)
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as reservations:
        ready = [_prepare(report, undo, reservations) for report in reports]
        for earlier, later in pairwise(ready):
            # A stage that cannot wait for another is refused before anything is written.
            later.format_dependency(earlier, ["0"])
        # From here on a launcher may die at any moment. The manifest is the intent; its job is found by its
        # tag (`Scheduler.find`) or by the job's own marks.
        several = len(ready) > 1
        for stage in ready:
            _write(stage, replace(request, stage=stage.stage) if several else request, undo)
        _link_stages(ready)
        undo.pop_all()  # all of it is written
    _submit_stages(ready)
    return [stage.launch for stage in ready]


def _link_stages(ready: Sequence[_PreparedLaunch]) -> None:
    """Write the stages around each one: those after a training, and the chain before a stage."""
    around = {stage.paths.directory: Stages() for stage in ready}
    for chain, stage in pairwise(ready):
        if not chain.is_chain:
            continue
        needs_success = stage.needs_success_of(chain.stage)
        before = _stage_of(chain, needs_success=needs_success)
        after = _stage_of(stage, needs_success=needs_success)._replace(dependency=stage.dependency or "")
        around[chain.paths.directory] = around[chain.paths.directory]._replace(after=(after,))
        around[stage.paths.directory] = around[stage.paths.directory]._replace(before=before)
    training: _PreparedLaunch | None = None
    for stage in ready:
        if stage.stage == "training":
            training = stage
        elif training is not None and stage.draft.plan.job.every is not None:
            stages = around[training.paths.directory]
            repeated = Repeated(*_stage_of(stage)[:3], str(stage.paths.script), stage.draft.plan.job.every)
            around[training.paths.directory] = stages._replace(repeated=(*stages.repeated, repeated))
    for stage in ready:
        stages, directory = around[stage.paths.directory], stage.paths.directory
        try:
            if stages != Stages():
                write_atomic(directory / STAGES_FILE, to_json(stages))
        except OSError as error:
            raise explain_os_error(error, directory, stage.draft.results_key) from error


def _stage_of(stage: _PreparedLaunch, *, needs_success: bool = True) -> Stage:
    """Return a stage as the supervisors of others know it."""
    paths = stage.paths
    return Stage(paths.run_name, str(paths.directory), stage.draft.plan.tag, needs_success=needs_success)


def _prepare(
    report: CheckReport, undo: contextlib.ExitStack, reservations: contextlib.ExitStack
) -> _PreparedLaunch:
    """Check everything that can refuse a launch, and reserve its number."""
    draft, plan = report.draft, report.draft.plan
    scheduler = scheduler_for(plan.scheduler, plan.slurm_conf)
    run_dir = plan.paths.run_dir
    reconcile_unconfirmed(run_dir)
    undo.callback(remove_empty, list_missing_directories(run_dir / LAUNCHES))
    with draft.composition.annotated():
        number = reserve_number(run_dir, draft.results_key)
    reservations.callback(release_number, run_dir, number)
    draft = draft.numbered(number)
    if report.facts.submission is None:  # a launch with a smoke was shown before it
        report = show_to_scheduler(replace(report, draft=draft), partial(validate, scheduler))
        require_passed([report])
    waits = report.facts.submission.waits if report.facts.submission is not None else None
    if plan.scheduler == "local" and "singleton" in (plan.job.queue.dependency or ""):
        holder = turn_holder(run_dir)
        waits = f"it waits for the end of {escape(holder)}, of the same run" if holder else None
    warnings = describe_ignored(scheduler.ignored_environment(), plan.job.stage)
    return _PreparedLaunch(draft, report.facts, scheduler, warnings + ([waits] if waits else []))


def nodes_to_avoid(draft: Draft, facts: Facts | None = None) -> tuple[ExcludedNode, ...]:
    """Return the nodes that the next job avoids: those that failed under earlier ones, and the team's.

    `facts` have the team's file.
    """
    plan, now = draft.plan, time.time()
    if plan.scheduler != "slurm":
        return ()
    avoided: tuple[ExcludedNode, ...] = ()
    if draft.composition.config.resilience.exclude_hours > 0:
        avoided = read_excluded(plan.paths.run_dir, now)
    shared = facts.shared_exclusions if facts is not None else ()
    names = {excluded.node for excluded in avoided}
    return (*avoided, *(excluded for excluded in shared if excluded.node not in names))


def _write(stage: _PreparedLaunch, request: Request, undo: contextlib.ExitStack) -> None:
    """Write a launch, and make the directories that its job writes to."""
    draft, directories = stage.draft, stage.draft.plan.job.directories
    with draft.composition.annotated():
        stage.manifest = write_draft(draft, request, nodes_to_avoid(draft, stage.facts))
        undo.callback(discard_launch, stage.paths, directories)
        for directory in directories:
            make_directories((directory,), draft.directory_key(directory))


def _submit_stages(ready: Sequence[_PreparedLaunch]) -> None:
    for number, stage in enumerate(ready):
        before = ready[number - 1] if number else None
        try:
            _submit_stage(stage, before)
        except (UserError, KeyboardInterrupt) as error:
            for later in ready[number + 1 :]:
                _save_if_possible(
                    later, later.manifest.set_error(f"the stage before it, {stage.stage}, has no job")
                )
            if before is not None and isinstance(error, UserError):
                raise _explain_partial_submit(before, stage, error) from error
            raise


def _submit_stage(stage: _PreparedLaunch, before: _PreparedLaunch | None) -> None:
    paths = stage.paths
    if before is not None:
        after = stage.format_dependency(before, list(before.launch.links.values()))
        stage.manifest = replace(stage.manifest, after=after, waits_for=before.manifest.run)
    _submit(stage)
    assert stage.manifest.job_id is not None
    changed = granted(stage.draft.plan, stage.facts, stage.manifest.job_id)
    manifest = stage.manifest = replace(stage.manifest, granted=changed)
    try:
        record_job(paths, manifest)
    except OSError as error:
        # The job is there, and is found by its tag: that its id is not on record must not hide it.
        directory = display_path(paths.directory)
        stage.warnings.append(f"the job's id could not be written into {directory}: {error.strerror}")
    assert manifest.job_id is not None
    remember_trees([paths.run_dir.parent])
    if manifest.links > 1 and not manifest.from_job:
        stage.warnings += _submit_links(stage, manifest.job_id)


def _submit(stage: _PreparedLaunch) -> None:
    """Submit a stage, and record its job's id, why there is no job, or why that is unknown.

    Warn of failed nodes that could not be avoided.
    """
    paths, manifest = stage.paths, stage.manifest
    submission = replace(stage.launch.submission, after=manifest.after, exclude=_format_excluded(stage))
    try:
        try:
            stage.manifest = manifest.set_job(submit(stage.scheduler, submission))
        except NoAnswer:
            raise
        except UserError as error:
            if not manifest.excluded or claimant(paths.directory) == GIVEN_UP:
                raise
            # A node that has left the cluster since is no node to Slurm; nor must the others be too few.
            job_id = submit(stage.scheduler, replace(submission, exclude=None))
            stage.warnings.append(_describe_not_avoided(manifest, error))
            stage.manifest = replace(manifest, excluded=[]).set_job(job_id)
    except NoAnswer as error:
        _save_if_possible(stage, manifest.set_unanswered(error.message))
        where = shlex.quote(display_path(paths.run_dir))
        raise NoAnswer(
            error.message,
            hint=f"it is not known whether launch {paths.number} became a job: slipway status {where}\n"
            "the next launch of this run looks for it first",
        ) from error
    except KeyboardInterrupt:
        _save_if_possible(stage, manifest.set_unanswered("its launcher was interrupted"))
        raise
    except UserError as error:
        write_manifest(paths.directory, manifest.set_error(str(error)))
        raise


def _submit_links(stage: _PreparedLaunch, first: str) -> list[str]:
    """Submit the later links of a chain, each to wait for the one before: for nodes without sbatch.

    Return why the chain is shorter than it should be, if it is: the first link does not need the others.
    """
    # They have the first one's dependency too: if it never comes true, the first is cancelled, and the next
    # one must not begin in its place.
    manifest, before = stage.manifest, first
    own, key = manifest.after or stage.dependency, f"{manifest.stage}.run.dependency"
    submission = replace(stage.launch.submission, exclude=_format_excluded(stage))
    for link in range(2, manifest.links + 1):
        after = combine_dependency(own, f"afterany:{before}", key)
        which = f"link {link} of {manifest.links}"
        try:
            before = submit(stage.scheduler, replace(submission, link=link, after=after))
        except NoAnswer as error:
            # Later links cannot depend on an unknown job id, so the chain ends here.
            return [f"it is not known whether {which} became a job; no further one was submitted: {error}"]
        except UserError as error:
            jobs = f"{link - 1} job{'s' * (link > 2)}"
            return [f"the chain is {jobs} long: {which} was refused: {error}"]
        claim(stage.paths.directory, before, link)
    return []


def _format_excluded(stage: _PreparedLaunch) -> str | None:
    """Return the value of ``sbatch --exclude``, which replaces the header's; None if no node is avoided."""
    excluded = stage.manifest.excluded
    if not excluded:
        return None
    own = (stage.draft.plan.job.queue.exclude or "").split(",")
    return ",".join(dict.fromkeys(filter(None, [*own, *(node["node"] for node in excluded)])))


def _describe_not_avoided(manifest: Manifest, refusal: UserError) -> str:
    nodes = [
        f"{node['node']} ({f'job {job} failed there' if is_job_id(job) else f'excluded by {job}'})"
        for node in manifest.excluded
        for job in [str(node["job"])]
    ]
    return f"{', '.join(nodes)} not avoided: {refusal.message}"


def _save_if_possible(stage: _PreparedLaunch, manifest: Manifest) -> None:
    # Otherwise the next launch treats this one as abandoned.
    with contextlib.suppress(OSError):
        write_manifest(stage.paths.directory, manifest)


# Commands that read the checkpoints of a run, by the stages that do so behind a training.
_VERBS = {"conversion": "convert", "evaluation": "evaluate"}


def _explain_partial_submit(before: _PreparedLaunch, stage: _PreparedLaunch, error: UserError) -> UserError:
    """Return the error of a stage with advice, since the previous stage is a job already."""
    job_id, (name, _, phase) = str(before.manifest.job_id), stage.stage.partition(".")
    again = f"the same command with stages=[{name}]{f' {name}.phase={phase}' if phase else ''}"
    if stage.draft.plan.job.every is not None:  # it counts the checkpoints of a training before it
        again += f" {name}.every=null"
    trained = [config.training for config in stage.draft.composition.before if config.training is not None]
    if name in _VERBS and trained:  # the stage alone has no source, and no checkpoint exists yet
        run = trained[-1].run.name
        then = f"once this is fixed, and {run} is done: slipway {_VERBS[name]} {run} --on-cluster"
    elif before.is_chain:  # its later links are not known yet
        then = f"once this is fixed, and {before.manifest.run} is done: {again}"
    else:
        dependency = shlex.quote(stage.format_dependency(before, [job_id]))
        then = f"once this is fixed: {again} {name}.run.dependency={dependency}"
    advice = [f"{before.manifest.stage} is job {job_id}, and goes on", then]
    kind = NoAnswer if isinstance(error, NoAnswer) else UserError
    hint = "\n".join([*([error.hint] if error.hint else []), *advice])
    return kind(f"{stage.stage}: {error.message}", key=error.key, hint=hint)
