"""The two ways to import: by Enroot, or by skopeo, umoci and mksquashfs."""

from __future__ import annotations

from collections.abc import Callable

from launcher import __version__
from launcher.errors import UserError, nearest
from launcher.images import through_enroot, through_skopeo, tools
from launcher.images.complaints import CREDENTIALS, NO_IMAGE, NO_SPACE, REFUSED, Complaint, named
from launcher.images.credentials import login_used
from launcher.images.making import Job
from launcher.images.references import Kind, Reference
from launcher.images.remote import Access, Remote, look_up_by_skopeo, names_of, tags_of

AUTO, ENROOT, SKOPEO = "auto", "enroot", "skopeo"
ROUTES = (AUTO, ENROOT, SKOPEO)

_SHOWN_TAGS = 3

_INSTALL_RUNNER = f"pip install 'slipway[{through_enroot.EXTRA}]' has it (enroot-py)"


def choose(source: Reference, via: str, note: Callable[[str], None]) -> str:
    """The way to take: Enroot's where it is there and reads such an image.

    Raises
    ------
    UserError
        If there is none, with what to install.
    """
    has_enroot = tools.which("enroot") is not None
    if via == ENROOT:
        if not through_enroot.reads(source):
            raise UserError(f"--via enroot: Enroot does not import {source}", hint="leave it out")
        tools.need("enroot", "mksquashfs", why="to import by it")
        if not through_enroot.has_runner():
            raise UserError("Enroot is run through enroot-py, which is not installed", hint=_INSTALL_RUNNER)
        return ENROOT
    lacking = tools.missing(*through_skopeo.PROGRAMS)
    # Enroot's own import from podman leaves a container behind.
    prefers_enroot = (
        has_enroot and through_enroot.reads(source) and (source.kind is not Kind.PODMAN or lacking)
    )
    if via == AUTO and prefers_enroot:
        if through_enroot.has_runner():
            return ENROOT
        if lacking:
            raise UserError("Enroot is run through enroot-py, which is not installed", hint=_INSTALL_RUNNER)
        note(f"Enroot is there, and not what runs it: imported without it ({_INSTALL_RUNNER})")
    if lacking:
        raise _nothing(lacking, has_enroot or not through_enroot.reads(source))
    return SKOPEO


def _nothing(lacking: tuple[str, ...], enroot_is_no_help: bool) -> UserError:
    names = " and ".join(lacking)
    are = "is" if len(lacking) == 1 else "are"
    other = () if enroot_is_no_help else ("enroot",)
    return UserError(
        f"{names} {are} needed {through_skopeo.WHY}, and not on PATH",
        hint=tools.how_to_get(*lacking, *other)
        + "\nor do it where they are: slipway image import ... --on-cluster",
    )


def look_up(route: str, source: Reference, access: Access) -> tuple[Remote | None, str | None]:
    """Return what an image is, and its digest; ``None`` for what cannot be told.

    Raises
    ------
    UserError
        If there is no such image, or one may not have it, with the nearest tags and the login that was used.
    """
    try:
        return _looked_up(route, source, access)
    except Complaint as error:
        if source.kind is Kind.REGISTRY and error.why in (NO_IMAGE, REFUSED) and tools.which("skopeo"):
            _tell_more(error, source, access)
        raise


def _tell_more(error: Complaint, source: Reference, access: Access) -> None:
    """Say of a missing image whether its tag or all of it is missing, and of any refusal who asked."""
    tags = tags_of(source, access) if error.why == NO_IMAGE and source.digest is None else []
    if source.tag is not None and tags and source.tag not in tags:
        near = nearest(source.tag, tags, _SHOWN_TAGS) or sorted(tags)[-_SHOWN_TAGS:]
        error.message += f"\n{source.name} has no tag {source.tag} (of {len(tags)} tags)"
        error.hint = f"nearest: {', '.join(near)}\n{error.hint}"
        return
    error.message += f"\nthe registry was asked {login_used(access, source)}"
    if error.why == NO_IMAGE:
        private = "or it is private: registries give the same answer to a login that may not read it"
        error.hint = f"{error.hint}\n{private}\n{named(CREDENTIALS, names_of(source))}"


def _looked_up(route: str, source: Reference, access: Access) -> tuple[Remote | None, str | None]:
    refused: Complaint | None = None
    if tools.which("skopeo") is not None:
        try:
            remote = look_up_by_skopeo(source, access)
        except Complaint as error:
            # Enroot has logins of its own, such as those that a command tells.
            if route != ENROOT or error.why != REFUSED:
                raise
            refused = error
        else:
            return remote, remote.digest
    try:
        return None, through_enroot.digest(source, access.plain_http) if route == ENROOT else None
    except Complaint as error:
        # Of one that may not it says only whom it asked as.
        raise (refused or error) from None


def make(route: str, job: Job, via: str) -> str:
    """Write the squashfs; return what made it, with versions.

    What Enroot cannot, skopeo may: it has logins of its own, and speaks to more registries.
    """
    may_change = via == AUTO and not tools.missing(*through_skopeo.PROGRAMS)
    if route == ENROOT:
        try:
            through_enroot.make(job)
        except Complaint as error:
            if not may_change or job.remote is None or error.why == NO_SPACE:
                raise
            job.progress.note(f"{_why_not(error, job)}\nimported without Enroot")
            job.output.unlink(missing_ok=True)
            route = SKOPEO
    if route == SKOPEO:
        through_skopeo.make(job)
    used = ("enroot", "mksquashfs") if route == ENROOT else through_skopeo.PROGRAMS
    found = [tools.find(name) for name in used]
    versions = [f"{tool.name} {tool.version or ''}".strip() for tool in found if tool]
    return ", ".join([f"slipway {__version__}", *versions])


def _why_not(error: Complaint, job: Job) -> str:
    """Return why Enroot did not import an image that skopeo has found."""
    if error.why != NO_IMAGE:
        return error.message
    # As seen with the `registry` 2.8: 404 to a request that does not name the type of an OCI manifest.
    return f"Enroot does not find {job.source} in the registry, and skopeo does"
