"""The rest of the way: drafts are judged by the scheduler, written to directories, and submitted."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from launcher.checks.gathering.host import check_host
from launcher.drafting import Draft, Request, results_key
from launcher.errors import UserError
from launcher.launching.directory import record_job, write
from launcher.launching.links import submit_links
from launcher.launching.settling import settle
from launcher.launching.submitting import Patience, Tell, submit, validate
from launcher.runs.index import Index, entry_of
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import LaunchPaths, short
from launcher.runs.write import discard_launch, make_directories, missing_directories, remove_empty
from launcher.schedulers import scheduler_for
from launcher.schedulers.base import NoAnswer, PendingSubmission, Scheduler
from launcher.slurm.sbatch_options import combined_dependency
from launcher.stages.image import STAGE as IMAGE
from supervisor.excluded import ExcludedNode, read_excluded
from supervisor.marks import GIVEN_UP, claimant

__all__ = ["Launched", "Patience", "launch", "launch_stages", "nodes_to_avoid"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that became a job; `warnings` tell what was left out, and what may keep it waiting."""

    paths: LaunchPaths
    manifest: Manifest
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A draft that nothing refuses."""

    made: Draft
    scheduler: Scheduler
    warnings: list[str]

    @property
    def paths(self) -> LaunchPaths:
        return self.made.plan.paths

    @property
    def stage(self) -> str:
        return self.made.plan.job.stage

    @property
    def dependency(self) -> str | None:
        """What the header of its script says that it waits for."""
        return self.made.plan.job.queue.dependency

    def depending_on(self, job_id: str, stage: str) -> str:
        """What it waits for that is the stage after a job of another one."""
        # Without its image it cannot run, whatever is asked of other stages.
        after_stage = self.made.composition.config.resilience.after_stage
        condition = "afterok" if stage == IMAGE else after_stage
        return combined_dependency(self.dependency, f"{condition}:{job_id}", f"{self.stage}.run.dependency")


def _silently(_: str) -> None:
    pass


def launch(
    made: Draft, request: Request, *, tell: Tell = _silently, patience: Patience | None = None
) -> Launched:
    """Let the scheduler judge a draft, write it and submit it.

    Parameters
    ----------
    tell
        Is told what goes on while the scheduler does not answer.
    patience
        For how long a job whose answer was lost is looked for; by default a minute.

    Raises
    ------
    NoAnswer
        If the launch is written, and it is not known whether it became a job.
    UserError
        If the request has a mistake, or the scheduler refuses; what it refuses beforehand is not written.
        Also if an earlier launch of the run turns out to be a job that its user does not know of.
    """
    (launched,) = launch_stages([made], request, tell=tell, patience=patience)
    return launched


def launch_stages(
    made: Sequence[Draft], request: Request, *, tell: Tell = _silently, patience: Patience | None = None
) -> list[Launched]:
    """Launch stages one after the other, each waiting for the one before; see `launch`.

    All of them are judged and written before the first is submitted.
    """
    patience = patience or Patience()
    several = len(made) > 1
    ready = [_prepare(one, request, tell, patience) for one in made]
    for earlier, later in pairwise(ready):
        # What cannot wait for another one is told before anything is written.
        later.depending_on("0", earlier.stage)
    # From here on a launcher may die at any moment. The manifest is the intent; what became of it is found by
    # its tag (`Scheduler.find`) or by the job's own marks.
    written = _write_all(ready, request, several=several)
    launched: list[Launched] = []
    for one, manifest in written:
        before = launched[-1] if launched else None
        try:
            launched.append(_submitted(one, manifest, before, tell, patience))
        except (UserError, KeyboardInterrupt) as error:
            for last, submission in written[len(launched) + 1 :]:
                _keep(last.paths, submission.refused(f"the stage before it, {one.stage}, has no job"))
            if before is not None and isinstance(error, UserError):
                raise _after(before, one, error) from error
            raise
    return launched


def _prepare(made: Draft, request: Request, tell: Tell, patience: Patience) -> _Ready:
    """Look at everything that can refuse a launch, and at what became of the one before it."""
    scheduler = scheduler_for(made.plan.scheduler, made.plan.slurm_conf)
    warnings = [*check_host(made), *scheduler.ignored_environment()]
    settle(made.plan.paths.run_dir, tell)
    waits = validate(scheduler, made.rendered.script, tell, patience)
    return _Ready(made, scheduler, [*warnings, *([waits] if waits is not None else [])])


def nodes_to_avoid(draft: Draft) -> tuple[ExcludedNode, ...]:
    """Return the nodes that failed under earlier jobs of the run and that its next job keeps off."""
    if draft.composition.config.resilience.exclude_hours == 0 or draft.plan.scheduler != "slurm":
        return ()
    return read_excluded(draft.plan.paths.run_dir, time.time())


def _write_all(ready: Sequence[_Ready], request: Request, *, several: bool) -> list[tuple[_Ready, Manifest]]:
    """Write all launches, or none: one that cannot be written leaves nothing of the others."""
    written: list[tuple[_Ready, Manifest]] = []
    new = [path for one in ready for path in missing_directories(one.paths.run_dir)]
    try:
        for one in ready:
            with one.made.composition.naming_sources():
                of_stage = replace(request, stage=one.stage) if several else request
                made, manifest = write(one.made, of_stage, nodes_to_avoid(one.made))
                written.append((replace(one, made=made), manifest))
                make_directories(made.plan.job.directories, results_key(made))
    except BaseException:
        for one, _ in written:
            discard_launch(one.paths, one.made.plan.job.directories)
        remove_empty(new)
        raise
    return written


def _submitted(
    one: _Ready, manifest: Manifest, before: Launched | None, tell: Tell, patience: Patience
) -> Launched:
    paths, warnings = one.paths, list(one.warnings)
    if before is not None:
        assert before.manifest.job_id is not None
        manifest = replace(manifest, after=one.depending_on(before.manifest.job_id, before.manifest.stage))
    manifest, refused = _submit(one, manifest, tell, patience)
    warnings += refused
    assert manifest.job_id is not None
    try:
        record_job(paths, manifest)
    except OSError as error:
        # The job is there, and is found by its tag: that its id is not on record must not hide it.
        directory = short(paths.directory)
        warnings.append(f"the job's id could not be written into {directory}: {error.strerror}")
    Index().remember([entry_of(paths.run_dir, paths.number, manifest, manifest.job_id)])
    if manifest.links > 1 and not manifest.from_job:
        exclude = _exclude(one, manifest)
        warnings += submit_links(one.scheduler, paths, manifest, one.dependency, exclude, tell, patience)
    return Launched(paths, manifest, warnings)


def _exclude(one: _Ready, manifest: Manifest) -> str | None:
    """Return what ``sbatch --exclude`` is given in place of the header's; None where no node is avoided."""
    if not manifest.excluded:
        return None
    own = (one.made.plan.job.queue.exclude or "").split(",")
    return ",".join(dict.fromkeys(filter(None, [*own, *(node["node"] for node in manifest.excluded)])))


def _submit(one: _Ready, manifest: Manifest, tell: Tell, patience: Patience) -> tuple[Manifest, list[str]]:
    """Submit, and keep on record why there is no job, or why nobody knows.

    Returns
    -------
    The manifest with the job's id, and a warning where the nodes to avoid could not be avoided.
    """
    paths = one.paths
    submission = PendingSubmission(
        manifest.tag,
        paths.script,
        manifest.user,
        manifest.created,
        after=manifest.after,
        exclude=_exclude(one, manifest),
    )
    try:
        try:
            return manifest.submitted_as(submit(one.scheduler, submission, tell, patience)), []
        except NoAnswer:
            raise
        except UserError as error:
            if not manifest.excluded or claimant(paths.directory) == GIVEN_UP:
                raise
            # A node that has left the cluster since is no node to Slurm; nor must the others be too few.
            job_id = submit(one.scheduler, replace(submission, exclude=None), tell, patience)
            warning = _not_avoided(manifest, error)
            return replace(manifest, excluded=[]).submitted_as(job_id), [warning]
    except NoAnswer as error:
        _keep(paths, manifest.lost(error.message))
        where = shlex.quote(short(paths.run_dir))
        raise NoAnswer(
            error.message,
            hint=f"whether launch {paths.number} became a job is not known: slipway status {where}\n"
            "the next launch of this run looks for it first",
        ) from error
    except KeyboardInterrupt:
        _keep(paths, manifest.lost("its launcher was interrupted"))
        raise
    except UserError as error:
        write_manifest(paths.directory, manifest.refused(str(error)))
        raise


def _not_avoided(manifest: Manifest, refusal: UserError) -> str:
    nodes = [f"{node['node']} (job {node['job']} failed there)" for node in manifest.excluded]
    return f"{', '.join(nodes)} not avoided: {refusal.message}"


def _keep(paths: LaunchPaths, manifest: Manifest) -> None:
    # Without it the launch is settled as that of a launcher that died.
    with contextlib.suppress(OSError):
        write_manifest(paths.directory, manifest)


def _after(before: Launched, one: _Ready, error: UserError) -> UserError:
    """What went wrong with a stage, when the one before it is a job already."""
    job_id = str(before.manifest.job_id)
    told = [
        f"{before.manifest.stage} is job {job_id}, and goes on",
        f"once this is mended: the same command with stages=[{one.stage}]"
        f" {one.stage}.run.dependency={shlex.quote(one.depending_on(job_id, before.manifest.stage))}",
    ]
    kind = NoAnswer if isinstance(error, NoAnswer) else UserError
    hint = "\n".join([*([error.hint] if error.hint else []), *told])
    return kind(f"{one.stage}: {error.message}", key=error.key, hint=hint)
