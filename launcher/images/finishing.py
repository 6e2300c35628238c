"""The end of an import: looked at, made durable, recorded, and given its name."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path

from launcher.errors import UserError
from launcher.file_systems import mount_of
from launcher.images.making import Job
from launcher.images.store import ImageConfig, RecipeOrigin, Sidecar, sidecar_path
from launcher.images.superblock import read_superblock
from launcher.runs.write import umask
from supervisor.files import sync_directory

# In the hidden name of an image that was replaced.
REPLACED = ".old-"
_CHUNK_BYTES = 1 << 22


def finish(job: Job, target: Path, digest: str | None, made_by: str, recipe: RecipeOrigin | None) -> Sidecar:
    """Give what was made its name; without its record nothing is taken for it.

    Raises
    ------
    UserError
        If what was made is no whole squashfs.
    """
    try:
        block = read_superblock(job.output)
    except FileNotFoundError:
        raise UserError(f"{made_by} ended well, and wrote no image") from None
    sidecar = Sidecar(
        source=str(job.source),
        digest=digest,
        sha256=_durable_checksum(job),
        size=job.output.stat().st_size,
        compression=job.compression,
        squash_options=job.squash_options,
        block_size=block.block_size,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        made_by=made_by,
        config=job.remote.config if job.remote else ImageConfig(),
        recipe=recipe,
        modified=int(job.output.stat().st_mtime),
    )
    job.output.chmod(0o666 & ~umask())
    _keep_for_jobs(target)
    # The record goes first: an image without one is told to have none, and a wrong one is believed.
    sidecar_path(target).unlink(missing_ok=True)
    job.output.replace(target)
    sync_directory(target.parent)
    sidecar.write(target)
    return sidecar


def _durable_checksum(job: Job) -> str:
    size = job.output.stat().st_size
    job.progress.step("writing it to disk, and its checksum", size)
    digest, done = hashlib.sha256(), 0
    with job.output.open("rb") as stream:
        os.fsync(stream.fileno())
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            job.progress.advance(done)
    return digest.hexdigest()


def _keep_for_jobs(target: Path) -> None:
    """Keep the file that is replaced, under a hidden name, where jobs on other machines would lose it.

    On all but NFS a file lives as long as it is open somewhere; there only as long as it has a name. `slipway
    image prune` removes it.
    """
    mount = mount_of(target)
    if mount is not None and mount.kind.startswith("nfs") and target.exists():
        kept = target.with_name(f".{target.name}{REPLACED}{os.urandom(6).hex()}")
        try:
            os.link(target, kept)
        except PermissionError:
            # A colleague's, of which others make no links (fs.protected_hardlinks): for a moment the name is
            # without a file.
            target.rename(kept)
