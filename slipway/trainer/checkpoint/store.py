"""The directory of checkpoints: the complete ones, the others, and the newest. Imports no torch.

A checkpoint is written into ``.unfinished-<name>-<unique>``. When all ranks have written and synced their
files, rank 0 writes the marker there, renames the directory to ``<name>`` and points the link ``latest`` at
it. The rename is the one moment at which the checkpoint comes into being:

===========================  ==========================================================================
killed before                leaves behind
===========================  ==========================================================================
the marker or the rename     the checkpoint before, and a hidden directory that is never looked into
``latest`` points at it      the new checkpoint: the link is a convenience, the serial decides
a removal's rename           a checkpoint too many
a removal's end              a hidden directory; a removal begins with a rename
a damaged one is set aside   it is found damaged again, or has been moved
===========================  ==========================================================================

The newest checkpoint is the one with the highest serial, which each marker counts on from the highest in the
directory: it is right even if the clocks of two nodes differ, and also when a training starts afresh next to
an older one whose steps are higher. Only the holder of the directory's lock writes (:mod:`.lock`).
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slipway.arithmetic.indexed import SPLIT_RULE
from slipway.common.errors import UserError
from slipway.common.files import sync_path
from slipway.trainer.checkpoint.files import file_checksum, is_absent, mismatch
from slipway.trainer.checkpoint.marker import MARKER, Marker, examine_marker, read_marker
from slipway.trainer.logs import LOGGER

LATEST = "latest"
UNFINISHED = ".unfinished-"
REMOVING = ".removing-"
# No name of a checkpoint: those have a step, which is also how the job script knows them.
DAMAGED = "damaged"
_RANK = re.compile(r"__(\d+)_")
_SHARD = re.compile(r"__\d+_\d+\.distcp")
# A save writes one shard for each rank, and these.
_OTHERS = (MARKER, ".metadata", "common.pt", "metadata.json")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    marker: Marker


def list_complete(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints that have a marker, the newest last."""
    marked = ((path, read_marker(path)) for path in _directories(directory) if not path.name.startswith("."))
    checkpoints = [Checkpoint(path, marker) for path, marker in marked if marker is not None]
    return sorted(checkpoints, key=_age)


def find_newest(directory: Path, without: Collection[Path] = ()) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest complete checkpoint, and the directories that are not complete, each with the reason.

    A checkpoint whose files are not those that its marker lists, such as one that was copied in part, is not
    complete either. Checkpoints older than the one that is returned are not looked into, nor are those
    `without` which it is to do.

    Raises
    ------
    OSError
        If a directory cannot be examined, as when a file system does not answer.
    """
    marked, torn = [], {}
    for path in _candidates(directory):
        marker, wrong = examine_marker(path) if path not in without else (None, None)
        if path.name.startswith(UNFINISHED):
            torn[path] = f"no {MARKER}"
        elif marker is not None:
            marked.append(Checkpoint(path, marker))
        elif wrong is not None:
            torn[path] = wrong
    for checkpoint in sorted(marked, key=_age, reverse=True):
        wrong = find_damage(checkpoint)
        if wrong is None:
            return checkpoint, torn
        torn[checkpoint.path] = wrong
    return None, torn


def open_checkpoint(path: Path) -> tuple[Checkpoint | None, str | None]:
    """Return the complete checkpoint in a directory, or None and its defect."""
    marker, wrong = examine_marker(path)
    if marker is None:
        return None, wrong
    checkpoint = Checkpoint(path, marker)
    wrong = find_damage(checkpoint)
    return (checkpoint, None) if wrong is None else (None, wrong)


def split_rule(*places: Path) -> str:
    """Return how the training of a checkpoint, or of the newest in a directory, divided its data.

    The first place that has one decides; for a new training, it is how data are divided now.
    """
    for place in places:
        marker = read_marker(place)
        markers = [marker] if marker else [checkpoint.marker for checkpoint in list_complete(place)]
        if markers:
            return markers[-1].split_rule
    return SPLIT_RULE


def open_named(path: Path) -> Checkpoint:
    """Return the checkpoint that a path names: itself, or the newest complete one of a directory.

    Raises
    ------
    UserError
        If no complete checkpoint is found, or its files are damaged.
    """
    checkpoint, wrong = open_checkpoint(path)
    if checkpoint is None and path.is_dir():
        latest, _ = find_newest(path)
        checkpoint, wrong = latest, wrong if latest is None else None
    if checkpoint is None:
        reason = wrong if path.is_dir() else "there is no such directory"
        raise UserError(f"{path} is no complete checkpoint, and holds none ({reason})")
    return checkpoint


def check_content(checkpoint: Checkpoint, report: Callable[[int], None] = lambda _: None) -> None:
    """Compare files with their checksums, which a checkpoint of an earlier version does not have.

    Parameters
    ----------
    report
        Called with the bytes of each file that was read.

    Raises
    ------
    UserError
        If a file is damaged.
    """
    for name, expected in checkpoint.marker.checksums.items():
        wrong = mismatch(checkpoint.path, name, expected)
        if wrong is not None:
            raise UserError(f"{checkpoint.path} is damaged: {wrong}")
        report(checkpoint.marker.files.get(name, 0))


def find_damage(checkpoint: Checkpoint) -> str | None:
    """Return the defect of a marked checkpoint's files, or None; no content is read.

    Shards that the marker does not list are those of another checkpoint; other files are their owner's.
    """
    for name, size in checkpoint.marker.files.items():
        try:
            if (checkpoint.path / name).stat().st_size == size:
                continue
        except OSError as error:
            if not is_absent(error):
                raise
        return f"{name} is missing or has another size than {MARKER} says"
    for name in _names(checkpoint.path):
        if checkpoint.marker.files and _SHARD.fullmatch(name) and name not in checkpoint.marker.files:
            return f"{name} is not one of the files that {MARKER} lists"
    return None


def is_ours(path: Path) -> bool:
    """Return whether an incomplete directory holds the rest of a checkpoint, and no other files."""
    names = _names(path)
    if MARKER in names:
        return True
    return bool(names) and all(name in _OTHERS or _SHARD.fullmatch(name) for name in names)


def set_aside(path: Path) -> Path:
    """Move a damaged checkpoint out of the search path; return its new path. Nothing is overwritten.

    Raises
    ------
    OSError
        If it cannot be moved.
    """
    directory, link = path.parent, path.parent / LATEST
    (directory / DAMAGED).mkdir(exist_ok=True)
    aside = _choose_free_name(directory / DAMAGED / path.name)
    path.rename(aside)
    if link.is_symlink() and link.readlink() == Path(path.name):
        link.unlink()
    sync_path(directory / DAMAGED)
    sync_path(directory)
    return aside


def list_damaged(directory: Path) -> list[Path]:
    """Return the checkpoints that were set aside."""
    return list(_directories(directory / DAMAGED))


def begin(directory: Path, name: str, parents: bool = True) -> Path:
    """Create and return the hidden directory in which a checkpoint is written.

    Its name is used once: a leftover process of a killed training can never write into it. Without `parents`,
    a directory that was deleted is not created again.
    """
    path = directory / f"{UNFINISHED}{name}-{make_suffix()}"
    path.mkdir(parents=parents)
    return path


def sync_part(unfinished: Path, rank: int) -> dict[str, int]:
    """Have the files that a rank wrote on disk; return their names and sizes in bytes.

    Each node has to do this for itself: on a parallel file system another node cannot. megatron-core's own
    sync comes before its last buffer is flushed.
    """
    written = {}
    for path in _list_written_by(unfinished, rank):
        sync_path(path)
        written[str(path.relative_to(unfinished))] = path.stat().st_size
    return written


def checksum_part(unfinished: Path, rank: int, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the checksums of the files that a rank wrote; those that are `known` are not read again."""
    checksums = dict(known or {})
    for path in _list_written_by(unfinished, rank):
        name = str(path.relative_to(unfinished))
        if name not in checksums:
            checksums[name] = file_checksum(path)
    return checksums


def finish(unfinished: Path, name: str, marker: Marker) -> Checkpoint:
    """Mark a written checkpoint as complete, give it its name and point ``latest`` at it.

    Call it when every rank has returned from :func:`sync_part`. The serial is filled in here.
    """
    directory = unfinished.parent
    serial = 1 + max((checkpoint.marker.serial for checkpoint in list_complete(directory)), default=0)
    marker = replace(marker, serial=serial)
    marker.write(unfinished)
    # The marker is on disk before the name is: whoever sees the name sees a complete checkpoint.
    for path in (*(part for part in unfinished.rglob("*") if part.is_dir()), unfinished):
        sync_path(path)
    path = _choose_free_name(directory / name)
    unfinished.rename(path)
    sync_path(directory)
    point_latest(path)
    return Checkpoint(path, marker)


def point_latest(path: Path) -> None:
    """Have the link ``latest`` name a checkpoint, if it does not yet; where that cannot be, say so."""
    link = path.parent / LATEST
    if link.is_symlink() and link.readlink() == Path(path.name):
        return
    fresh = path.parent / f".{LATEST}"
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.name)
        fresh.replace(link)
        sync_path(path.parent)
    except OSError as error:
        LOGGER.warning("the link %s cannot be set: %s", link, error.strerror)


def list_leftovers(directory: Path) -> list[Path]:
    """Return what killed trainings left: checkpoints and removals, begun and not finished."""
    return [path for path in _directories(directory) if path.name.startswith((UNFINISHED, REMOVING))]


def make_suffix() -> str:
    """Return a few letters that no other call returns."""
    return uuid.uuid4().hex[:12]


def _directories(directory: Path) -> Iterator[Path]:
    # Not `Path.is_dir`: from Python 3.14 on it answers False for what cannot be read, and the training would
    # start afresh.
    try:
        with os.scandir(directory) as entries:
            paths = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from sorted(paths)


def _candidates(directory: Path) -> Iterator[Path]:
    for path in _directories(directory):
        # Other hidden directories are a file system's, or a removal's.
        is_hidden = path.name.startswith(".") and not path.name.startswith(UNFINISHED)
        if not is_hidden and path.name != DAMAGED:
            yield path


def _age(checkpoint: Checkpoint) -> tuple[int, int]:
    # Markers of the first version have no serial.
    return checkpoint.marker.serial, checkpoint.marker.step


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _list_written_by(unfinished: Path, rank: int) -> Iterator[Path]:
    # The name before the file: a thousand ranks would ask a file system about each other's files.
    return (path for path in sorted(unfinished.rglob("*")) if _parse_writer(path) == rank and path.is_file())


def _parse_writer(path: Path) -> int:
    # megatron-core's files of a rank are __<rank>_<number>.distcp; all others are rank 0's.
    match = _RANK.match(path.name)
    return int(match[1]) if match else 0


def _choose_free_name(path: Path) -> Path:
    # Lightning's way out when a name is taken; evidence is never overwritten.
    candidate, version = path, 1
    while candidate.exists():
        candidate, version = path.with_name(f"{path.name}-v{version}"), version + 1
    return candidate
