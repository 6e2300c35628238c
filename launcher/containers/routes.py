"""The two ways to import: by Enroot, or by skopeo, umoci and mksquashfs."""

from __future__ import annotations

from collections.abc import Callable

from launcher import __version__
from launcher.containers import through_enroot, through_skopeo, tools
from launcher.containers.complaints import NO_SPACE, REFUSED, Complaint
from launcher.containers.making import Job
from launcher.containers.references import Kind, Reference
from launcher.containers.remote import Access, Remote, look_up_by_skopeo
from launcher.errors import UserError

AUTO, ENROOT, SKOPEO = "auto", "enroot", "skopeo"
ROUTES = (AUTO, ENROOT, SKOPEO)

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
    """What an image is, and its digest; ``None`` for what cannot be told."""
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
            job.progress.note(f"{error.message}\nimported without Enroot")
            job.output.unlink(missing_ok=True)
            route = SKOPEO
    if route == SKOPEO:
        through_skopeo.make(job)
    used = ("enroot", "mksquashfs") if route == ENROOT else through_skopeo.PROGRAMS
    found = [tools.find(name) for name in used]
    versions = [f"{tool.name} {tool.version or ''}".strip() for tool in found if tool]
    return ", ".join([f"slipway {__version__}", *versions])
