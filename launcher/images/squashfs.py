"""Looking into a squashfs without mounting it, with the unsquashfs of any version there may be."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.errors import UserError, one_line
from launcher.images import tools
from launcher.images.progress import Progress, Silent

_LOOKED = "to look into a squashfs"
# A line of `unsquashfs -lln -d ''` about a regular file; one whose name has a line break in it is none.
_REGULAR = re.compile(rb"-[-rwxsStT]{9} \d+/\d+ +(\d+) \d{4}-\d\d-\d\d \d\d:\d\d (/.*)")
# unsquashfs takes names as arguments, of which Linux takes two mebibytes with the environment.
_NAMES_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
# What could not be read is worse than what has another kind than the listing said.
_FATAL = 1
_KEPT_WORDS = 400


class File(NamedTuple):
    """A regular file of an image: its name as the bytes that it is, and its size in bytes."""

    name: bytes
    size: int


def read_files(image: Path, names: Sequence[str]) -> dict[str, str]:
    """The texts of some files of an image, without those that are not in it.

    Parameters
    ----------
    names
        Relative to the root of the image, such as ``etc/environment``.

    Raises
    ------
    UserError
        If there is no unsquashfs, or it cannot read the image.
    """
    tools.need("unsquashfs", why=_LOOKED)
    with tempfile.TemporaryDirectory(prefix="slipway-look-") as folder:
        there = Path(folder) / "files"
        # Not `-cat`, which unsquashfs has since 4.5 only. Names that are not in the image are no error to it.
        argv: list[str | Path] = [
            "unsquashfs",
            "-no-progress",
            "-no-xattrs",
            "-no-wildcards",
            "-d",
            there,
            image,
            *names,
        ]
        tools.run(argv, doing=f"read {one_line(str(image))}", on_line=lambda _: None)
        return {name: text for name in names if (text := _text(there, name)) is not None}


def _text(folder: Path, name: str) -> str | None:
    path = folder / name
    try:
        # An absolute link of the image leads out of it.
        if not path.resolve(strict=True).is_relative_to(folder.resolve()) or not path.is_file():
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, RuntimeError):  # not there, not to be read, or a link in circles
        return None


def files_of(image: Path) -> list[File]:
    """All regular files of an image. This reads its tables: names, modes, where the contents are.

    Raises
    ------
    UserError
        If there is no unsquashfs, or it cannot read them.
    """
    tools.need("unsquashfs", why=_LOOKED)
    done = subprocess.run(
        ["unsquashfs", "-lln", "-d", "", image],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=_environment(),
    )
    if done.returncode == _FATAL or not done.stdout:
        raise UserError(f"{one_line(str(image))}: its tables cannot be read: {_words(done.stderr)}")
    lines = (_REGULAR.fullmatch(line) for line in done.stdout.split(b"\n"))
    return [File(found[2], int(found[1])) for found in lines if found]


def read_everything(image: Path, files: Sequence[File], progress: Progress | None = None) -> None:
    """Decompress all files of an image, and keep nothing.

    Raises
    ------
    UserError
        If one cannot be read, or is shorter than it should be, or this unsquashfs is older than 4.5.
    """
    progress = progress or Silent()
    read = 0
    for some in _portions(files):
        read += _cat(image, some, progress, read)
    expected = sum(file.size for file in files)
    if read != expected:
        raise UserError(f"{one_line(str(image))}: {read:,} bytes of {expected:,} in its files can be read")


def _cat(image: Path, files: Sequence[File], progress: Progress, before: int) -> int:
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            ["unsquashfs", "-no-wildcards", "-cat", image, *(file.name for file in files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=_environment(),
        )
        assert process.stdout
        read = 0
        try:
            while data := process.stdout.read(_CHUNK_BYTES):
                read += len(data)
                progress.advance(before + read)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()
        complaints.seek(0)
        said = complaints.read()
    if code == _FATAL:
        if b"SYNTAX" in said or b"invalid option" in said:
            raise UserError("this unsquashfs cannot read files without writing them: 4.5 is needed")
        raise UserError(f"{one_line(str(image))}: a file in it cannot be read: {_words(said)}")
    return read


def _portions(files: Sequence[File]) -> Iterator[list[File]]:
    some: list[File] = []
    room = _NAMES_BYTES
    for file in files:
        # Each argument costs its bytes, the one that ends it, and a pointer.
        cost = len(file.name) + 9
        if cost > room and some:
            yield some
            some, room = [], _NAMES_BYTES
        some.append(file)
        room -= cost
    if some:
        yield some


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C.UTF-8"}


def _words(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return one_line(lines[0])[:_KEPT_WORDS] if lines else "unsquashfs does not say why"
