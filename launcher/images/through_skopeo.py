"""Import without Enroot: skopeo fetches, umoci unpacks, mksquashfs packs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from launcher.images import rootfs, tools
from launcher.images.making import Job
from launcher.images.remote import names_of
from launcher.images.squashing import limits
from launcher.images.working import remove_tree

PROGRAMS = ("skopeo", "umoci", "mksquashfs")
WHY = "to import an image without Enroot"

# The bar of mksquashfs counts blocks: [====   ] 123/456  26%
_BAR = re.compile(r"\] +(\d+)/(\d+) +\d+%")
_NAME = "image"


def make(job: Job) -> None:
    """Write the squashfs of an image."""
    assert job.remote
    layout, root = job.work.path / "oci", job.work.path / "rootfs"
    # What they write besides must not go to /tmp, which may be too small.
    env = {"TMPDIR": str(job.work.path)}
    job.progress.step(f"fetching {job.source}", job.packed or None)
    tools.run(
        [
            *("skopeo", "copy", *job.access.words("src-")),
            *(str(job.source_pinned.for_skopeo), f"oci:{layout}:{_NAME}"),
        ],
        doing=f"fetch {job.source}",
        names=names_of(job.source),
        env=env,
        on_line=lambda line: None,
        on_tick=lambda pid: job.progress.advance(_size_of(layout)),
        keep=(*job.descriptors, *job.access.descriptors),
    )
    job.progress.step("unpacking", job.packed or None)
    rootless = () if os.geteuid() == 0 else ("--rootless",)
    tools.run(
        ["umoci", "raw", "unpack", *rootless, "--image", f"{layout}:{_NAME}", root],
        doing=f"unpack {job.source}",
        env=env,
        on_tick=lambda pid: job.progress.advance(_read_by(pid)),
        keep=job.descriptors,
    )
    remove_tree(layout)
    total = rootfs.make_readable(root)
    for note in rootfs.configure(root, job.remote.config, str(job.source.for_enroot or job.source)):
        job.progress.note(note)
    job.progress.step(f"packing with {job.compression}", total)

    def told(line: str) -> None:
        found = _BAR.search(line)
        if found and int(found[2]):
            job.progress.advance(total * int(found[1]) // int(found[2]))

    tools.run(
        [
            "mksquashfs",
            root,
            job.output,
            "-all-root",
            "-noappend",
            "-progress",
            *job.squash_options,
            *limits(),
        ],
        doing=f"pack {job.source}",
        env=env,
        on_line=told,
        keep=job.descriptors,
    )


def _size_of(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += Path(root, name).stat().st_size
            except OSError:  # it was given its final name meanwhile
                continue
    return total


def _read_by(pid: int) -> int:
    """How many bytes a process has read so far (proc(5), /proc/PID/io)."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("rchar:")), 0)
