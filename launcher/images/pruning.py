"""Pruning the store: the images that no run needs, and the files that imports left."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from launcher.errors import UserError, one_line
from launcher.images.importing import PARTIAL_PREFIX, REPLACED_PREFIX
from launcher.images.references import SQUASHFS_SUFFIXES
from launcher.images.scratch import is_locked, locked
from launcher.images.store import Stored, sidecar_path, stored
from launcher.jobs.launches import Launch, adopt, read_launch
from launcher.jobs.locator import RunLocator
from launcher.jobs.status import poll
from launcher.slurm.states import State

_DAY_SECONDS = 86400
_UNITS = {"m": 60, "h": 3600, "d": _DAY_SECONDS, "w": 7 * _DAY_SECONDS}


@dataclass(frozen=True, slots=True)
class ImageUse:
    """A launch in an image.

    Attributes
    ----------
    run
        Its name, for messages.
    is_live
        True if its job waits or runs, or may.
    launched
        Seconds since 1970.
    """

    run: str
    is_live: bool
    launched: float


def images_in_use(base_results_dir: Path, directory: Path) -> dict[Path, list[ImageUse]]:
    """Return the launches in images of a directory, by the image with links resolved.

    All known launches count: this user's and, in directories that were seen, others'. A job counts as live
    unless it is known to have ended.

    Raises
    ------
    UserError
        If the runs that were seen before cannot be looked up.
    """
    pairs = list(_launches_in(directory.resolve(), base_results_dir))
    launches = adopt([launch for launch, _ in pairs])
    jobs = [launch for launch in launches if not launch.is_without_job]
    states = {launch.paths.directory: status.state for launch, status in zip(jobs, poll(jobs), strict=True)}
    uses: dict[Path, list[ImageUse]] = defaultdict(list)
    for launch, (_, image) in zip(launches, pairs, strict=True):
        state = states.get(launch.paths.directory)
        if state is not None:  # it became a job
            is_live = state.is_live or state is State.UNKNOWN
            launched = datetime.fromisoformat(launch.manifest.created).timestamp()
            uses[image].append(ImageUse(launch.manifest.run, is_live, launched))
    return uses


def _launches_in(directory: Path, base_results_dir: Path) -> Iterator[tuple[Launch, Path]]:
    known = RunLocator(base_results_dir)
    entries = known.originals(known.launches())
    if known.index.trouble:
        raise UserError(f"the known runs cannot be listed: {known.index.trouble}")
    for entry in entries:
        try:
            launch = read_launch(entry.run_dir, entry.number)
        except UserError:  # removed, or broken, since it was listed
            continue
        image = Path(launch.manifest.image or "")
        if image.is_absolute() and image.resolve().parent == directory:
            yield launch, image.resolve()


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """Tells if an image is removed, and why."""

    entry: Stored
    remove: bool
    why: str


@dataclass(frozen=True, slots=True)
class PruneRules:
    """The user's limits.

    Attributes
    ----------
    keep
        The number of unneeded images that stay: those made or launched last.
    older_than
        Seconds; an image made or launched later stays.
    ended
        Remove images of runs that have ended, too.
    """

    keep: int = 0
    older_than: float = 0.0
    ended: bool = False


def parse_age(text: str) -> float:
    """Return an age such as ``30d``, ``12h`` or ``2w`` in seconds.

    Raises
    ------
    UserError
        If it is none.
    """
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdecimal():
        raise UserError(
            f"--older-than {one_line(text)}: this is no age", hint="an age is such as 30d, 12h or 2w"
        )
    return float(int(number) * _UNITS[unit])


def decide(
    entries: Sequence[Stored], uses: Mapping[Path, Sequence[ImageUse]], rules: PruneRules, now: float
) -> list[PruneDecision]:
    """Decide about each image, in their order.

    Parameters
    ----------
    uses
        The known launches, by their image with links resolved.
    now
        Seconds since 1970.
    """
    kept = {entry.path: why for entry in entries if (why := _reason_to_keep(entry, uses, rules, now))}
    unneeded = [entry for entry in entries if entry.path not in kept]
    unneeded.sort(key=lambda entry: _last_use(entry, uses), reverse=True)
    for entry in unneeded[: rules.keep]:
        kept[entry.path] = f"one of the newest {rules.keep} that nobody needs"
    decisions = []
    for entry in entries:
        runs = [use.run for use in uses.get(entry.path.resolve(), ())]
        unused = f"{_name(runs)} ran in it, and has ended" if runs else "no known run needs it"
        decisions.append(PruneDecision(entry, entry.path not in kept, kept.get(entry.path, unused)))
    return decisions


def decide_leftovers(directory: Path, uses: Mapping[Path, Sequence[ImageUse]]) -> list[PruneDecision]:
    """Decide about the hidden files of imports.

    These are files that an import replaced while jobs on other machines may have had them open, and partial
    files of imports that were killed.
    """
    decisions: list[PruneDecision] = []
    for path in sorted(directory.glob(".*")):
        image, entry = _image_of(path), stored(path)
        if image is None or entry is None:
            continue
        if path.name[1:].startswith(f"{image.name}{PARTIAL_PREFIX}"):
            keep = is_locked(image)
            why = "being imported just now" if keep else f"a part of {image.name}, whose import was ended"
        else:
            runs = [use.run for use in uses.get(image.resolve(), ()) if use.is_live]
            keep = bool(runs)
            why = f"{_name(runs)} may have it open" if runs else f"an older {image.name}"
        decisions.append(PruneDecision(entry, not keep, why))
    return decisions


def _image_of(hidden: Path) -> Path | None:
    """Return the image that a hidden file belongs to; ``None`` if it belongs to none."""
    for mark in (REPLACED_PREFIX, PARTIAL_PREFIX):
        name, separator, _ = hidden.name[1:].rpartition(mark)
        if separator and name.endswith(SQUASHFS_SUFFIXES):
            return hidden.with_name(name)
    return None


def _reason_to_keep(
    entry: Stored, uses: Mapping[Path, Sequence[ImageUse]], rules: PruneRules, now: float
) -> str | None:
    """Return why an image stays, whatever else there is; ``None`` if there is no reason."""
    launches = uses.get(entry.path.resolve(), ())
    live = [use.run for use in launches if use.is_live]
    if live:
        return f"{_name(live)} waits or runs, or may"
    if entry.path.is_symlink():
        return "a link, not an image"
    if _owner(entry.path) != os.getuid():
        return "another user's"
    if entry.sidecar is None:
        return "not made by slipway: it has no record"
    if launches and not rules.ended:
        return f"{_name([use.run for use in launches])} ran in it"
    age = now - _last_use(entry, uses)
    if age < rules.older_than:
        return f"needed {max(age, 0.0) / _DAY_SECONDS:.0f} days ago"
    return None


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


def _last_use(entry: Stored, uses: Mapping[Path, Sequence[ImageUse]]) -> float:
    return max([entry.modified, *(use.launched for use in uses.get(entry.path.resolve(), ()))])


def _name(runs: Sequence[str]) -> str:
    names = list(dict.fromkeys(runs))
    return names[-1] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def remove(entry: Stored) -> None:
    """Remove an image and its record, unless somebody imports it just now.

    Raises
    ------
    UserError
        If somebody does.
    OSError
        If it may not be removed.
    """

    def refuse(holder: str) -> None:
        raise UserError(f"{one_line(str(entry.path))}: {holder} imports it just now; it stays")

    with locked(_image_of(entry.path) or entry.path, refuse):
        # A record without an image is harmless; an image without a record would never be removed.
        entry.path.unlink()
        sidecar_path(entry.path).unlink(missing_ok=True)
