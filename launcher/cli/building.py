"""`slipway launch --build`: the image is made first, here or by a job that the launch waits for."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.config.compose import compose
from launcher.drafting import Draft, Request, draft_image, drafts, drafts_of, stages_of
from launcher.errors import UserError
from launcher.launching.images import Needed, needed_image, refuse_a_job
from launcher.stages.image import STAGE

# What says that the image is not there is not asked while it is about to be made.
_CHECK = "path.image"


@dataclass(frozen=True, slots=True)
class Building:
    """The drafts of a launch whose image is made first.

    Attributes
    ----------
    made
        What is launched, the job that makes the image first where there is one.
    skipped
        The checks that are not asked.
    needed
        What is made on this machine before; ``None`` if nothing.
    """

    made: list[Draft]
    request: Request
    skipped: tuple[str, ...]
    needed: Needed | None


def building(request: Request, skipped: Sequence[str], *, as_job: bool) -> Building:
    """Draft a launch and what makes its image; nothing is written or made.

    Raises
    ------
    UserError
        If the request has a mistake, or there is no image to make.
    """
    of_image = request.stage == STAGE  # of two jobs the one that is rendered again
    asked = replace(request, stage=None, number=None, tag=None) if of_image else request
    staged = stages_of(compose(asked.overrides, asked.config_dir), asked.stage)
    if as_job:
        refuse_a_job(staged[0])
    needed = needed_image(staged[0], asked)
    if needed is None:
        return Building(drafts_of(staged, asked), request, tuple(skipped), None)
    # Drafted with the file alone: a plan may refuse what is none.
    made = drafts_of(staged, asked) if needed.request is asked else drafts(needed.request)
    if of_image:
        return Building([draft_image(request, needed.work)], request, tuple(skipped), None)
    if needed.is_there:
        return Building(made, needed.request, tuple(skipped), None)
    without = (*skipped, _CHECK)
    if not as_job:
        return Building(made, needed.request, without, needed)
    if request.stage is None:
        if request.number is not None or request.tag is not None:
            told = f"stages=[{STAGE},{','.join(one.plan.job.stage for one in made)}]"
            raise UserError(f"{told}: --launch-number and --tag are those of one launch", hint="--stage=...")
        made = [draft_image(needed.request, needed.work), *made]
    return Building(made, needed.request, without, None)


def tell_dry(needed: Needed) -> None:
    """Say what a dry run does not do."""
    print(f"slipway: first: slipway {shlex.join(needed.command)}", file=sys.stderr)


def make(needed: Needed, *, quiet: bool) -> None:
    """Make the image on this machine, and show how it goes.

    Raises
    ------
    UserError
        With what to do next.
    """
    from launcher.images.progress import told
    from launcher.launching.images import make_here

    with told(quiet=quiet) as progress:
        done = make_here(needed, progress)
    how = "another one made it meanwhile" if done.reused else "made"
    print(f"slipway: image {done.path}: {how}", file=sys.stderr)
