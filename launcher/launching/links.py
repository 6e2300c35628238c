"""The later links of a chain, submitted with the first: for sites whose nodes have no sbatch."""

from __future__ import annotations

from launcher.errors import UserError
from launcher.launching.submitting import Patience, Tell, submit
from launcher.runs.manifest import Manifest
from launcher.runs.paths import LaunchPaths
from launcher.schedulers.base import NoAnswer, PendingSubmission, Scheduler
from launcher.slurm.sbatch_options import combined_dependency
from supervisor.marks import claim


def submit_links(
    scheduler: Scheduler,
    paths: LaunchPaths,
    manifest: Manifest,
    dependency: str | None,
    exclude: str | None,
    tell: Tell,
    patience: Patience,
) -> list[str]:
    """Submit the links after the first, each to wait for the one before it.

    Parameters
    ----------
    dependency
        What the script's header says that its job waits for.
    exclude
        The nodes that the first link was submitted to avoid.

    Returns
    -------
    What cut the chain short, if something did: the first link is there, and does not need the others.
    """
    # What the first waits for they wait for as well: where that never comes true, it is cancelled, and the
    # next one must not begin in its place.
    own, key = manifest.after or dependency, f"{manifest.stage}.run.dependency"
    before = manifest.job_id
    assert before is not None
    for link in range(2, manifest.links + 1):
        after = combined_dependency(own, f"afterany:{before}", key)
        submission = PendingSubmission(
            manifest.tag, paths.script, manifest.user, manifest.created, link, after, exclude
        )
        which = f"link {link} of {manifest.links}"
        try:
            before = submit(scheduler, submission, tell, patience)
        except NoAnswer as error:
            # None could be told to wait for it; should it be there, it does its work as the last one.
            return [f"whether {which} became a job is not known, and no further one was submitted: {error}"]
        except UserError as error:
            return [f"the chain is {_jobs(link - 1)} long: {which} was refused: {error}"]
        claim(paths.directory, before, link)
    return []


def _jobs(count: int) -> str:
    return f"{count} job{'s' * (count != 1)}"
