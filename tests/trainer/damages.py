"""Ways in which a checkpoint is damaged, chosen at random."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from slipway.trainer.checkpoint.marker import MARKER

Damage = Callable[[Path, Path, random.Random], None]


def flip(file: Path, _: Path, chance: random.Random) -> None:
    """Flip one to sixteen bits."""
    content = bytearray(file.read_bytes())
    for bit in chance.sample(range(8 * len(content)), chance.randint(1, 16)):
        content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def zero(file: Path, _: Path, chance: random.Random) -> None:
    """Write zeros over a part that holds something else."""
    content = bytearray(file.read_bytes())
    size = chance.randint(1, len(content))
    while True:
        at = chance.randint(0, len(content) - size)
        if any(content[at : at + size]):
            break
        size = min(2 * size, len(content))
    content[at : at + size] = bytes(size)
    file.write_bytes(content)


def garble(file: Path, _: Path, chance: random.Random) -> None:
    """Write random bytes over a part."""
    content = bytearray(file.read_bytes())
    size = chance.randint(4, min(4096, len(content)))
    at = chance.randint(0, len(content) - size)
    content[at : at + size] = chance.randbytes(size)
    file.write_bytes(content)


def truncate(file: Path, _: Path, chance: random.Random) -> None:
    """Cut the end off, or all."""
    os.truncate(file, chance.randrange(file.stat().st_size))


def extend(file: Path, _: Path, chance: random.Random) -> None:
    """Add bytes."""
    with file.open("ab") as stream:
        stream.write(chance.randbytes(chance.randint(1, 100)))


def remove(file: Path, _: Path, chance: random.Random) -> None:
    """Remove the file, or put something in its place that is none."""
    file.unlink()
    chance.choice((lambda: None, lambda: file.mkdir(), lambda: os.mkfifo(file)))()


def swap_steps(file: Path, older: Path, _: random.Random) -> None:
    """Take the file of another step's checkpoint."""
    shutil.copyfile(older / file.name, file)


def swap_files(file: Path, _: Path, chance: random.Random) -> None:
    """Exchange two files of the checkpoint."""
    candidates = [path for path in _files(file.parent) if path.read_bytes() != file.read_bytes()]
    other = chance.choice(candidates)
    content = file.read_bytes()
    other.replace(file)
    other.write_bytes(content)


def stray(file: Path, older: Path, _: random.Random) -> None:
    """Add a shard of another checkpoint."""
    shutil.copyfile(older / "__0_0.distcp", file.parent / "__7_0.distcp")


DAMAGES: tuple[Damage, ...] = (
    flip,
    zero,
    garble,
    truncate,
    extend,
    remove,
    swap_steps,
    swap_files,
    stray,
)


def damage(checkpoint: Path, older: Path, chance: random.Random) -> str:
    """Damage a checkpoint in one way; return which.

    `older` is another one of the same training. Where a file is the same in both, one is taken that is not.
    """
    kind = chance.choice(DAMAGES)
    files = _files(checkpoint)
    if kind is swap_steps:
        files = [path for path in files if path.read_bytes() != (older / path.name).read_bytes()]
    # The marker is small and matters as much.
    file = chance.choice([*files, checkpoint / MARKER] if kind is not swap_steps else files)
    before = file.read_bytes()
    kind(file, older, chance)
    assert kind is stray or not file.is_file() or file.read_bytes() != before, (kind, file)
    return f"{kind.__name__} {file.name}"


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.iterdir() if path.is_file())
