"""Whether an image is whole: what it begins with, its tables, its record, and each of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError, explain_refusal, one_line
from launcher.images import squashfs, tools
from launcher.images.progress import Progress, Silent
from launcher.images.store import Sidecar, read_sidecar, sidecar_path
from launcher.images.superblock import Superblock, read_superblock

_CHUNK_BYTES = 1 << 22
_ANEW = "make it anew: slipway image import ... --force, or slipway image build ... --force"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was looked at, and what was found.

    Attributes
    ----------
    checked
        What is right, in words.
    problem
        What is wrong; ``None`` where nothing is.
    notes
        What could not be looked at, and why.
    """

    path: Path
    checked: tuple[str, ...] = ()
    problem: UserError | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.problem is None


def verify(path: Path, *, deep: bool = False, progress: Progress | None = None) -> Verified:
    """Look at an image as closely as can be done without writing anything.

    Parameters
    ----------
    deep
        Decompress every file of it, too.
    """
    checked: list[str] = []
    notes: list[str] = []
    problem = None
    try:
        for kind, words in _looked_at(path, deep, progress or Silent()):
            (checked if kind else notes).append(words)
    except UserError as error:
        problem = UserError(error.message, hint=error.hint or _ANEW)
    except OSError as error:
        # Of the disk itself, such as one that breaks, there is nothing to explain.
        problem = explain_refusal(error) or UserError(f"{one_line(str(path))}: {error.strerror or error}")
    return Verified(path, tuple(checked), problem, tuple(notes))


def _looked_at(path: Path, deep: bool, progress: Progress) -> Iterator[tuple[bool, str]]:
    """What is right, and what cannot be told; the first thing that is wrong ends it."""
    block = read_superblock(path)
    size = path.stat().st_size
    yield True, f"{size:,} bytes of squashfs, {block.compression}"
    sidecar = read_sidecar(path)
    if sidecar is not None:
        yield True, _same_contents(path, sidecar, progress)
    elif sidecar_path(path).exists():
        raise UserError(
            f"{one_line(str(path))}: {sidecar_path(path).name} is the record of another file, or of none",
            hint=f"{_ANEW}; or remove the record, if the image is yours",
        )
    else:
        yield False, "its checksum: there is no record beside it"
    if tools.which("unsquashfs") is None:
        if deep:
            tools.need("unsquashfs", why="to read the files of an image")
        yield False, "its tables: there is no unsquashfs on PATH"
        return
    yield from _tables(path, block, deep, progress)


def _same_contents(path: Path, sidecar: Sidecar, progress: Progress) -> str:
    progress.step(f"sha256 of {path.name}", sidecar.size)
    found = sha256_of(path, progress)
    if found != sidecar.sha256:
        raise UserError(
            f"{one_line(str(path))}: its sha256 is {found[:12]}..., and was {sidecar.sha256[:12]}... when it"
            " was made: its bytes have changed"
        )
    return f"sha256 {found[:12]}... as when it was made"


def _tables(path: Path, block: Superblock, deep: bool, progress: Progress) -> Iterator[tuple[bool, str]]:
    files = squashfs.files_of(path)
    yield True, f"its tables: {len(files):,} files of {block.inodes:,} entries"
    if deep:
        total = sum(file.size for file in files)
        progress.step(f"reading the files of {path.name}", total)
        squashfs.read_everything(path, files, progress)
        yield True, f"every file: {total:,} bytes"


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """The checksum of a file's bytes, in hexadecimal digits."""
    progress = progress or Silent()
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as stream:
        while data := stream.read(_CHUNK_BYTES):
            digest.update(data)
            done += len(data)
            progress.advance(done)
    return digest.hexdigest()
