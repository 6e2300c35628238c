"""Make a squashfs of an image, once: whoever else wants it waits, and nobody ever sees half of it."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError, did_you_mean, explain_os_error, one_line
from launcher.images import credentials, routes, space
from launcher.images.finishing import finish
from launcher.images.interrupts import ending_cleanly
from launcher.images.locking import Lock, lock_path, locked
from launcher.images.making import Job
from launcher.images.progress import Progress, Silent
from launcher.images.references import SQUASHFS_SUFFIXES, Kind, Reference
from launcher.images.remote import Access, Remote
from launcher.images.reuse import reusable
from launcher.images.squashing import AUTO, COMPRESSIONS, SIZE_PART, SQUASH_OPTIONS, compression_for
from launcher.images.store import RecipeOrigin, Sidecar, Stored, sidecar_path, stored
from launcher.images.working import working_in
from launcher.runs.trust import user_name

# In the hidden name of an image that is being written.
HALF = ".tmp-"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """How to import.

    Attributes
    ----------
    compression
        One of `COMPRESSIONS`; ``auto`` is what suits the target's file system, and takes any that is there.
    temp_dir
        Where to unpack; chosen by the room that there is, if it is not given.
    force
        Make it even if it is there.
    via
        ``enroot``, ``skopeo``, or ``auto``: Enroot where it is installed.
    plain_http, authfile
        Of the registry: no TLS, and a file of logins as of ``skopeo login``.
    recipe
        What the image was built from, for its record.
    """

    compression: str = AUTO
    temp_dir: Path | None = None
    force: bool = False
    via: str = routes.AUTO
    plain_http: bool = False
    authfile: Path | None = None
    recipe: RecipeOrigin | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """An image that is there now.

    Attributes
    ----------
    reused
        Whether it was there, or another made it meanwhile.
    sidecar
        Its record; ``None`` for one that others put there.
    notes
        What the user was told besides.
    """

    path: Path
    digest: str | None
    reused: bool
    sidecar: Sidecar | None
    notes: tuple[str, ...] = ()


def import_image(
    source: Reference,
    target: Path,
    options: ImportOptions | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Make `target` the squashfs of an image, unless it is that already.

    It is written under a temporary name, made durable and given its name last. Any end before that, be it by
    SIGKILL, leaves no target, or the one that was there; what a killed one leaves, the next removes.

    Parameters
    ----------
    source
        The image, anywhere but in a squashfs.
    target
        A file ending in ``.sqsh``; its directory is made.

    Raises
    ------
    UserError
        With what to do next; nothing is left behind.
    """
    importing = _Importing(source, target.absolute(), options or ImportOptions(), progress or Silent())
    with ending_cleanly():
        return importing.run()


def make_directory(store: Path) -> None:
    """Make the directory of images, if it is not there.

    Raises
    ------
    UserError
        If it cannot be made.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, store, "images_dir") from error


def check_replaceable(target: Path) -> None:
    """Raise if a file of this name could not be given to an image.

    Raises
    ------
    UserError
        If nothing may be written there, or the directory is sticky and the file, or its record, is another
        user's.
    """
    directory = target.parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise explain_os_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), target, "images_dir")
    found = directory.stat()
    user = os.geteuid()
    if not found.st_mode & stat.S_ISVTX or user in (0, found.st_uid):
        return
    for path in (target, sidecar_path(target)):
        with contextlib.suppress(FileNotFoundError):
            owner = path.lstat().st_uid
            if owner != user:
                raise UserError(
                    f"{one_line(str(path))}: {user_name(owner)}'s, and in a directory with the sticky bit, "
                    "where nobody else replaces it",
                    hint="have its owner import it, or choose another place: --output FILE, images_dir=DIR",
                )


class _Importing:
    """One import on its way."""

    def __init__(self, source: Reference, target: Path, options: ImportOptions, progress: Progress) -> None:
        self._source, self._target, self._options, self._progress = source, target, options, progress
        self._access = Access(options.plain_http, options.authfile)
        self._notes: list[str] = []

    def run(self) -> Imported:
        self._check()
        before = stored(self._target)
        if before is not None and not self._options.force and self._is_pinned_as(before):
            return self._as_it_is(before)
        route = routes.choose(self._source, self._options.via, self._note)
        self._progress.step(f"looking up {self._source}")
        with credentials.lent(self._access, self._source) as self._access:
            return self._asked(route, before)

    def _asked(self, route: str, before: Stored | None) -> Imported:
        try:
            remote, digest = routes.look_up(route, self._source, self._access)
        except UserError as error:
            return self._without_asking(before, error)
        again = self._options.force
        if before is not None and not again and self._has_its_record(before) and self._serves(before, digest):
            return self._as_it_is(before)
        make_directory(self._target.parent)
        with locked(self._target, self._wait) as lock:
            # Another may have made it meanwhile, with this one waiting or not.
            now = stored(self._target)
            may_serve = now is not None and (not again or self._is_new(now, before))
            if now is not None and may_serve and self._serves(now, digest):
                return self._as_it_is(now)
            if not lock.certain:
                self._note("this file system has no locks: another import of this image may run too")
            return self._made(route, remote, digest, lock)

    def _check(self) -> None:
        if self._source.kind is Kind.SQUASHFS:
            raise UserError(
                f"{one_line(str(self._source))} is a squashfs already",
                hint=f"use it: container={self._source}",
            )
        for option, value, valid in (
            ("--compression", self._options.compression, COMPRESSIONS),
            ("--via", self._options.via, routes.ROUTES),
        ):
            if value not in valid:
                raise UserError(f"{option} {value}: unknown", hint=did_you_mean(value, valid))
        if self._target.is_dir():
            raise UserError(
                f"{one_line(str(self._target))}: a directory, and no image's file",
                hint=f"a file in it: {one_line(str(self._target / self._source.file_name))}",
            )
        if not self._target.name.endswith(SQUASHFS_SUFFIXES) or self._target.name.startswith("."):
            raise UserError(
                f"{one_line(self._target.name)}: an image's file ends in {' or '.join(SQUASHFS_SUFFIXES)}, "
                "and is not hidden",
                hint=f"such as {self._source.file_name}",
            )

    def _without_asking(self, before: Stored | None, error: UserError) -> Imported:
        """What is there of the same name has to do where nobody can be asked for a newer one."""
        recorded = before.sidecar if before is not None else None
        wanted = str(self._source)
        if before is None or recorded is None or recorded.source != wanted or self._options.force:
            raise error
        if not reusable(before, recorded.digest, self._options.compression).yes:
            raise error
        self._note(f"{error.message}\n{self._target.name} is used as it was imported at {recorded.created}")
        return self._as_it_is(before)

    def _is_pinned_as(self, found: Stored) -> bool:
        """Whether the digest in the reference says already that it is this."""
        recorded = found.sidecar
        if recorded is None or recorded.source != str(self._source) or not self._source.is_pinned:
            return False
        return self._serves(found, recorded.digest)

    def _has_its_record(self, found: Stored) -> bool:
        """Whether no import is about to write it: for a moment an image that is replaced has none."""
        if found.sidecar is not None:
            return True
        # Where this user cannot lock, and nobody has, it is a colleague's who has made none.
        return not os.access(found.path.parent, os.W_OK) and not lock_path(found.path).exists()

    def _serves(self, found: Stored, digest: str | None) -> bool:
        verdict = reusable(found, digest, self._options.compression)
        if verdict.note:
            self._note(verdict.note)
        return verdict.yes

    def _is_new(self, now: Stored, before: Stored | None) -> bool:
        return before is None or (now.modified, now.size) != (before.modified, before.size)

    def _as_it_is(self, found: Stored) -> Imported:
        self._progress.done()
        digest = found.sidecar.digest if found.sidecar else None
        return Imported(found.path, digest, True, found.sidecar, tuple(self._notes))

    def _made(self, route: str, remote: Remote | None, digest: str | None, lock: Lock) -> Imported:
        # Else it is noticed when the image is fetched, unpacked and packed.
        check_replaceable(self._target)
        compression = self._options.compression
        if compression == AUTO:
            compression = compression_for(self._target)
        unpacked = remote.unpacked if remote else 0
        needs = space.Needs(
            unpacked + (remote.packed if remote else 0), int(unpacked * SIZE_PART[compression])
        )
        parent = space.place(needs, self._target, self._options.temp_dir)
        with self._output(lock) as output, working_in(parent) as work:
            job = Job(
                *(
                    self._source,
                    remote,
                    digest,
                    output,
                    compression,
                    SQUASH_OPTIONS[compression],
                    self._access,
                ),
                *(work, (*lock.descriptors, work.descriptor), self._progress),
            )
            made_by = routes.make(route, job, self._options.via)
            sidecar = finish(job, self._target, digest, made_by, self._options.recipe)
        self._progress.done()
        return Imported(self._target, digest, False, sidecar, tuple(self._notes))

    @contextmanager
    def _output(self, lock: Lock) -> Iterator[Path]:
        """The temporary name; it does not outlive the work."""
        start = self._target.with_name(f".{self._target.name}{HALF}")
        if lock.certain:
            for left in glob.glob(f"{glob.escape(str(start))}*"):  # noqa: PTH207
                with contextlib.suppress(OSError):
                    Path(left).unlink()
        output = start.with_name(f"{start.name}{os.urandom(6).hex()}")
        try:
            yield output
        except OSError as error:
            raise explain_os_error(error, output, "images_dir") from error
        finally:
            with contextlib.suppress(OSError):
                output.unlink()

    def _wait(self, holder: str) -> None:
        self._note(f"{self._target.name} is being imported by {holder}: waiting for it")
        self._progress.step(f"waiting for {holder}")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            self._progress.note(text)
