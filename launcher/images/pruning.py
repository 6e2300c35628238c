"""Which images of the store nobody needs any more, and removing them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError, one_line
from launcher.images.finishing import REPLACED
from launcher.images.importing import HALF
from launcher.images.locking import is_locked, locked
from launcher.images.references import SQUASHFS_SUFFIXES
from launcher.images.store import Stored, sidecar_path, stored

_DAY_SECONDS = 86400
_UNITS = {"m": 60, "h": 3600, "d": _DAY_SECONDS, "w": 7 * _DAY_SECONDS}


@dataclass(frozen=True, slots=True)
class Use:
    """A launch that was given an image.

    Attributes
    ----------
    run
        For people.
    is_live
        Whether its job waits or runs, or may.
    launched
        When, in seconds since 1970.
    """

    run: str
    is_live: bool
    launched: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of an image, and why."""

    entry: Stored
    remove: bool
    why: str


@dataclass(frozen=True, slots=True)
class Rules:
    """What may go.

    Attributes
    ----------
    keep
        So many of those that nobody needs stay: those made or launched last.
    older_than
        Seconds; what was made or launched later stays.
    ended
        Also images of runs that have ended.
    """

    keep: int = 0
    older_than: float = 0.0
    ended: bool = False


def parse_age(text: str) -> float:
    """An age such as ``30d``, ``12h`` or ``2w`` in seconds.

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


def choose(
    entries: Sequence[Stored], uses: Mapping[Path, Sequence[Use]], rules: Rules, now: float
) -> list[Choice]:
    """What becomes of each image, in their order.

    Parameters
    ----------
    uses
        Of the launches that are known, by the image that they were given, without links.
    now
        Seconds since 1970.
    """
    spared = {entry.path: why for entry in entries if (why := _spared(entry, uses, rules, now)) is not None}
    unneeded = [entry for entry in entries if entry.path not in spared]
    unneeded.sort(key=lambda entry: _last_need(entry, uses), reverse=True)
    for entry in unneeded[: rules.keep]:
        spared[entry.path] = f"one of the newest {rules.keep} that nobody needs"
    return [
        Choice(entry, False, spared[entry.path])
        if entry.path in spared
        else Choice(entry, True, _unneeded(entry, uses))
        for entry in entries
    ]


def left_over(directory: Path, uses: Mapping[Path, Sequence[Use]]) -> list[Choice]:
    """What becomes of the hidden files of imports.

    That is what one replaced while jobs on other machines may have had it open, and what one that was killed
    had written so far.
    """
    found: list[Choice] = []
    for path in sorted(directory.glob(".*")):
        image, entry = _image_of(path), stored(path)
        if image is None or entry is None:
            continue
        if path.name[1:].startswith(f"{image.name}{HALF}"):
            live, why = is_locked(image), f"half of {image.name}, whose import was ended"
            found.append(Choice(entry, not live, "being imported just now" if live else why))
        else:
            runs = [use.run for use in uses.get(image.resolve(), ()) if use.is_live]
            why = f"{_named(runs)} may have it open" if runs else f"an older {image.name}"
            found.append(Choice(entry, not runs, why))
    return found


def _image_of(hidden: Path) -> Path | None:
    """The image that a hidden file is of; ``None`` for what is no part of one."""
    for mark in (REPLACED, HALF):
        name, found, _ = hidden.name[1:].rpartition(mark)
        if found and name.endswith(SQUASHFS_SUFFIXES):
            return hidden.with_name(name)
    return None


def _spared(entry: Stored, uses: Mapping[Path, Sequence[Use]], rules: Rules, now: float) -> str | None:
    """Why an image stays whatever else there is; ``None`` where nothing speaks for it."""
    of_image = uses.get(entry.path.resolve(), ())
    live = [use.run for use in of_image if use.is_live]
    if live:
        return f"{_named(live)} waits or runs, or may"
    if entry.path.is_symlink():
        return "a link, not an image"
    if _owner(entry.path) != os.getuid():
        return "another user's"
    if entry.sidecar is None:
        return "not made by slipway: it has no record"
    if of_image and not rules.ended:
        return f"{_named([use.run for use in of_image])} ran in it"
    age = now - _last_need(entry, uses)
    if age < rules.older_than:
        return f"needed {max(age, 0.0) / _DAY_SECONDS:.0f} days ago"
    return None


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


def _last_need(entry: Stored, uses: Mapping[Path, Sequence[Use]]) -> float:
    return max([entry.modified, *(use.launched for use in uses.get(entry.path.resolve(), ()))])


def _unneeded(entry: Stored, uses: Mapping[Path, Sequence[Use]]) -> str:
    runs = [use.run for use in uses.get(entry.path.resolve(), ())]
    return f"{_named(runs)} ran in it, and has ended" if runs else "no run that is known needs it"


def _named(runs: Sequence[str]) -> str:
    names = list(dict.fromkeys(runs))
    return names[-1] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def remove(entry: Stored) -> None:
    """Remove an image and its record, unless somebody makes it anew just now.

    Raises
    ------
    UserError
        If somebody does.
    OSError
        If it may not be removed.
    """

    def refuse(who: str) -> None:
        raise UserError(f"{one_line(str(entry.path))}: {who} makes it anew just now; it stays")

    with locked(_image_of(entry.path) or entry.path, refuse):
        # A record without an image says nothing; an image without a record would never be removed.
        entry.path.unlink()
        sidecar_path(entry.path).unlink(missing_ok=True)
