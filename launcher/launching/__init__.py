"""The rest of the way: a draft is judged by the scheduler, written to its own directory, and submitted."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass

from launcher import readiness
from launcher.drafting import Draft, Request, results_key
from launcher.errors import UserError
from launcher.launching.directory import record_job, write
from launcher.launching.settling import settle
from launcher.launching.submitting import Patience, Tell, submit, validate
from launcher.runs.index import Index, entry_of
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import LaunchPaths, short
from launcher.runs.write import make_directories
from launcher.schedulers.base import Intent, NoAnswer, Scheduler
from launcher.schedulers.registry import scheduler_for

__all__ = ["Launched", "Patience", "launch"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that became a job; `warnings` tell what was left out, and what may keep it waiting."""

    paths: LaunchPaths
    manifest: Manifest
    warnings: list[str]


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
    scheduler = scheduler_for(made.plan.scheduler, made.plan.slurm_conf)
    warnings = [*readiness.check(made), *scheduler.ignored_environment()]
    settle(made.plan.paths.run_dir, tell)
    patience = patience or Patience()
    told = validate(scheduler, made.rendered.script, tell, patience)
    # From here on a launcher may die at any moment. The manifest is the intent; what became of it is found by
    # its tag (`Scheduler.find`) or by the job's own marks.
    with made.composition.naming_sources():
        made, manifest = write(made, request)
        make_directories(made.plan.job.directories, results_key(made))
    paths = made.plan.paths
    manifest = manifest.submitted_as(_submit(scheduler, paths, manifest, tell, patience))
    warnings += [told] if told else []
    try:
        record_job(paths, manifest)
    except OSError as error:
        # The job is there, and is found by its tag: that its id is not on record must not hide it.
        directory = short(paths.directory)
        warnings.append(f"the job's id could not be written into {directory}: {error.strerror}")
    Index().remember([entry_of(paths.run_dir, paths.number, manifest, manifest.job_id)])
    return Launched(paths, manifest, warnings)


def _submit(
    scheduler: Scheduler, paths: LaunchPaths, manifest: Manifest, tell: Tell, patience: Patience
) -> str:
    """Submit, and keep on record why there is no job, or why nobody knows."""
    intent = Intent(manifest.tag, paths.script, manifest.user, manifest.created)
    try:
        return submit(scheduler, intent, tell, patience)
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


def _keep(paths: LaunchPaths, manifest: Manifest) -> None:
    # Without it the launch is settled as that of a launcher that died.
    with contextlib.suppress(OSError):
        write_manifest(paths.directory, manifest)
