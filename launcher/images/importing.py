"""Importing an image as a squashfs, once: others who want it wait, and a partial file is never visible."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from launcher.errors import UserError, escape, explain_os_error
from launcher.file_systems import mount_of
from launcher.images import backends, scratch
from launcher.images.backends import ImportContext
from launcher.images.progress import SILENT, ImageProgress
from launcher.images.references import SQUASHFS_SUFFIXES, Kind, Reference
from launcher.images.registry import Access, RemoteImage, borrow_login
from launcher.images.scratch import ImageLock, lock_image
from launcher.images.squashfs import (
    AUTO,
    COMPRESSED_FRACTION,
    SQUASH_OPTIONS,
    default_compression,
    read_superblock,
    sha256_of,
)
from launcher.images.store import (
    ImageConfig,
    RecipeOrigin,
    Sidecar,
    Stored,
    match_stored,
    read_stored,
    sidecar_path,
)
from launcher.images.tools import ending_cleanly
from launcher.runs.trust import user_name
from launcher.runs.write import umask
from slipway.common.files import sync_path

# In the hidden names of an image that is being written, and of one that was replaced.
PARTIAL_PREFIX = ".tmp-"
REPLACED_PREFIX = ".old-"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The options of an import.

    `compression` is one of `COMPRESSIONS`; ``auto`` is what suits the target's file system, and accepts any
    that is there. `authfile` has logins for the registry, as of ``skopeo login``.
    """

    compression: str = AUTO
    temp_dir: Path | None = None
    force: bool = False
    via: str = backends.AUTO
    plain_http: bool = False
    authfile: Path | None = None
    recipe: RecipeOrigin | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """An image that is in place now; `reused` if it was there, or another process imported it meanwhile."""

    path: Path
    reused: bool
    sidecar: Sidecar | None
    # Notes that the progress printed besides its steps.
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str | None:
        return self.sidecar.digest if self.sidecar else None


def import_image(
    source: Reference,
    target: Path,
    options: ImportOptions | None = None,
    progress: ImageProgress = SILENT,
) -> Imported:
    """Make `target` the squashfs of an image, unless it is that already; its directory is made too.

    It is written under a temporary name, made durable and renamed last. Any end before that, SIGKILL
    included, leaves no target, or the former one; the next import removes remains of a killed one.
    """
    with ending_cleanly():
        return _Import(source, target.absolute(), options or ImportOptions(), progress).run()


def reuse(entry: Stored, notes: tuple[str, ...] = ()) -> Imported:
    """Return a stored image as the result of an import."""
    return Imported(entry.path, True, entry.sidecar, notes)


def make_directory(store: Path) -> None:
    """Make the directory of images if it does not exist; raise UserError if it cannot be made."""
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, store, "images_dir") from error


def check_replaceable(target: Path) -> None:
    """Raise UserError if an image could not be given this name, before it is fetched, unpacked and packed.

    Nothing may be written there, or the directory is sticky and the file, or its record, is another user's.
    """
    directory, user = target.parent, os.geteuid()
    if not os.access(directory, os.W_OK | os.X_OK):
        raise explain_os_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), target, "images_dir")
    status = directory.stat()
    if not status.st_mode & stat.S_ISVTX or user in (0, status.st_uid):
        return
    for path in (target, sidecar_path(target)):
        with contextlib.suppress(FileNotFoundError):
            owner = path.lstat().st_uid
            if owner != user:
                raise UserError(
                    f"{escape(str(path))}: {user_name(owner)}'s, and in a directory with the sticky bit, "
                    "where only its owner can replace it",
                    hint="have its owner import it, or choose another place: --output FILE, images_dir=DIR",
                )


class _Import:
    """One import on its way."""

    def __init__(
        self, source: Reference, target: Path, options: ImportOptions, progress: ImageProgress
    ) -> None:
        self._source, self._target, self._options, self._progress = source, target, options, progress
        self._notes: list[str] = []

    def run(self) -> Imported:
        self._check()
        source, options = self._source, self._options
        before = read_stored(self._target)
        usable = None if options.force else before
        record = usable.sidecar if usable else None
        # The digest in the reference may say already that it is this image.
        is_same = record is not None and record.source == str(source)
        if usable and record and is_same and source.is_pinned and self._serves(usable, record.digest):
            return self._reuse(usable)
        backend = backends.choose_backend(source, options.via, self._note)
        self._progress.step(f"looking up {source}")
        with borrow_login(Access(options.plain_http, options.authfile), source) as access:
            try:
                remote = backends.look_up(backend, source, access)
            except UserError as error:
                # A former import of the same reference serves while the registry does not answer.
                if not (usable and record and is_same):
                    raise
                if not match_stored(usable, record.digest, options.compression)[0]:
                    raise
                used = f"{self._target.name} is used as it was imported at {record.created}"
                self._note(f"{error.message}\n{used}")
                return self._reuse(usable)
            if usable and self._has_settled(usable) and self._serves(usable, remote.digest):
                return self._reuse(usable)
            make_directory(self._target.parent)
            with lock_image(self._target, self._on_wait) as lock:
                # Another process may have imported it meanwhile, even if this one did not wait.
                now = read_stored(self._target)
                is_new = now and (not before or (now.modified, now.size) != (before.modified, before.size))
                if now and (not options.force or is_new) and self._serves(now, remote.digest):
                    return self._reuse(now)
                if not lock.certain:
                    self._note("this file system has no locks: another import of this image may run too")
                return self._import(backend, remote, access, lock)

    def _check(self) -> None:
        if self._source.kind is Kind.SQUASHFS:
            raise UserError(
                f"{escape(str(self._source))} is a squashfs already",
                hint=f"use it: container={self._source}",
            )
        if self._target.is_dir():
            raise UserError(
                f"{escape(str(self._target))}: a directory, and no image's file",
                hint=f"a file in it: {escape(str(self._target / self._source.file_name))}",
            )
        if not self._target.name.endswith(SQUASHFS_SUFFIXES) or self._target.name.startswith("."):
            raise UserError(
                f"{escape(self._target.name)}: an image's file ends in {' or '.join(SQUASHFS_SUFFIXES)}, "
                "and is not hidden",
                hint=f"such as {self._source.file_name}",
            )

    def _has_settled(self, entry: Stored) -> bool:
        """Return False if an import may be about to write its record: it first removes the old one."""
        if entry.sidecar is not None:
            return True
        # Without a lock, and permission to make one, the file is a colleague's without a record.
        return not os.access(entry.path.parent, os.W_OK) and not scratch.lock_path(entry.path).exists()

    def _serves(self, entry: Stored, digest: str | None) -> bool:
        serves, note = match_stored(entry, digest, self._options.compression)
        if note:
            self._note(note)
        return serves

    def _reuse(self, entry: Stored) -> Imported:
        self._progress.done()
        return reuse(entry, tuple(self._notes))

    def _import(self, backend: str, remote: RemoteImage, access: Access, lock: ImageLock) -> Imported:
        check_replaceable(self._target)
        options = self._options
        is_auto = options.compression == AUTO
        compression = default_compression(self._target) if is_auto else options.compression
        final = int(remote.unpacked * COMPRESSED_FRACTION[compression])
        needs = scratch.SpaceNeeds(remote.unpacked + remote.packed, final)
        parent = scratch.choose_scratch(needs, self._target, options.temp_dir)
        with self._partial(lock) as output, scratch.scratch_directory(parent) as (work, own):
            locks = (*lock.descriptors, *own)
            context = ImportContext(
                self._source, remote, output, compression, access, work, locks, self._progress
            )
            made_by = backends.make_squashfs(backend, context, options.via)
            sidecar = publish(context, self._target, made_by, options.recipe)
        self._progress.done()
        return Imported(self._target, False, sidecar, tuple(self._notes))

    @contextmanager
    def _partial(self, lock: ImageLock) -> Iterator[Path]:
        """Yield the temporary name, and remove it afterwards; remove those of killed imports."""
        directory, prefix = self._target.parent, f".{self._target.name}{PARTIAL_PREFIX}"
        if lock.certain:
            for path in directory.iterdir():
                if path.name.startswith(prefix):
                    with contextlib.suppress(OSError):
                        path.unlink()
        output = directory / f"{prefix}{os.urandom(6).hex()}"
        try:
            yield output
        except OSError as error:
            raise explain_os_error(error, output, "images_dir") from error
        finally:
            with contextlib.suppress(OSError):
                output.unlink()

    def _on_wait(self, holder: str) -> None:
        self._note(f"{self._target.name} is being imported by {holder}: waiting for it")
        self._progress.step(f"waiting for {holder}")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            self._progress.note(text)


def publish(context: ImportContext, target: Path, made_by: str, recipe: RecipeOrigin | None) -> Sidecar:
    """Check a new squashfs, make it durable, record it, and rename it to its target."""
    output, progress = context.output, context.progress
    try:
        block = read_superblock(output)
    except FileNotFoundError:
        raise UserError(f"{made_by} succeeded, and wrote no image") from None
    status = output.stat()
    progress.step("writing it to disk, and its checksum", status.st_size)
    with output.open("rb") as stream:
        os.fsync(stream.fileno())
    sidecar = Sidecar(
        source=str(context.source),
        digest=context.remote.digest,
        sha256=sha256_of(output, progress),
        size=status.st_size,
        compression=context.compression,
        squash_options=SQUASH_OPTIONS[context.compression],
        block_size=block.block_size,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        made_by=made_by,
        config=context.remote.config or ImageConfig(),
        recipe=recipe,
        modified=int(status.st_mtime),
    )
    output.chmod(0o666 & ~umask())
    _keep_for_jobs(target)
    # The record goes first: a missing record is harmless, but a wrong one is believed.
    sidecar_path(target).unlink(missing_ok=True)
    output.replace(target)
    sync_path(target.parent)
    sidecar.write(target)
    return sidecar


def _keep_for_jobs(target: Path) -> None:
    """Keep a file that is replaced on NFS under a hidden name, for jobs on other machines that have it open.

    Elsewhere a file lives as long as it is open somewhere; on NFS only as long as it has a name. `slipway
    image prune` removes it.
    """
    mount = mount_of(target)
    if mount is not None and mount.kind.startswith("nfs") and target.exists():
        kept = target.with_name(f".{target.name}{REPLACED_PREFIX}{os.urandom(6).hex()}")
        try:
            os.link(target, kept)
        except PermissionError:
            # fs.protected_hardlinks forbids links to a colleague's file: for a moment the name has no file.
            target.rename(kept)
