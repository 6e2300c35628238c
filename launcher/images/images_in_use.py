"""Which images launches were given, and which of these launches have not ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from launcher.errors import UserError
from launcher.images.pruning import ImageUse
from launcher.jobs.launches import Launch, adopt, read_launch
from launcher.jobs.locator import RunLocator
from launcher.jobs.status import poll
from launcher.slurm.states import State


def images_in_use(base_results_dir: Path, directory: Path) -> dict[Path, list[ImageUse]]:
    """The launches that were given a file of a directory, by that file without links.

    All that are known count: those of this user and, in directories that were seen, of others. Where nobody
    can tell whether a job has ended, it has not.

    Raises
    ------
    UserError
        If the runs that were seen before cannot be looked up.
    """
    given = _given(base_results_dir, directory.resolve())
    launches = adopt([launch for launch, _ in given])
    submitted = [launch for launch in launches if not launch.is_without_job]
    statuses = zip(submitted, poll(submitted), strict=True)
    states = {launch.paths.directory: item.status.state for launch, item in statuses}
    uses: dict[Path, list[ImageUse]] = defaultdict(list)
    for launch, (_, image) in zip(launches, given, strict=True):
        state = states.get(launch.paths.directory)
        if state is None:  # it never became a job
            continue
        is_live = state.is_live or state is State.UNKNOWN
        launched = datetime.fromisoformat(launch.manifest.created).timestamp()
        uses[image].append(ImageUse(launch.manifest.run, is_live, launched))
    return uses


def _given(base_results_dir: Path, directory: Path) -> Sequence[tuple[Launch, Path]]:
    known = RunLocator(base_results_dir)
    entries = known.originals(known.launches())
    if known.index.trouble:
        raise UserError(f"which runs there are is not known: {known.index.trouble}")
    found: list[tuple[Launch, Path]] = []
    for entry in entries:
        try:
            launch = read_launch(entry.run_dir, entry.number)
        except UserError:  # gone, or broken, since it was listed
            continue
        image = Path(launch.manifest.image or "")
        if image.is_absolute() and image.resolve().parent == directory:
            found.append((launch, image.resolve()))
    return found
