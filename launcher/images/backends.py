"""The two backends of an import: Enroot, or skopeo with umoci and mksquashfs."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher import __version__
from launcher.errors import UserError, nearest
from launcher.images import registry, rootfs, tools
from launcher.images.progress import ImageProgress
from launcher.images.references import Kind, Reference
from launcher.images.registry import Access, RemoteImage, hint_names
from launcher.images.scratch import remove_tree
from launcher.images.squashfs import COMPRESSED_FRACTION, SQUASH_OPTIONS, resource_limits
from launcher.images.tools import CREDENTIALS, NO_IMAGE, NO_SPACE, REFUSED, ToolError, fill_names
from launcher.runs.paths import PACKAGE
from slipway.common.extras import install_command

AUTO, ENROOT, SKOPEO = "auto", "enroot", "skopeo"
BACKENDS = (AUTO, ENROOT, SKOPEO)
_SKOPEO_PROGRAMS = ("skopeo", "umoci", "mksquashfs")

_NO_RUNNER = "Enroot is run through enroot-py, which is not installed"
_ELSEWHERE = "or do it where they are: slipway image import ... --on-cluster"
_SUGGESTED_TAGS = 3

# The bar of mksquashfs counts blocks: [====   ] 123/456  26%
_BAR = re.compile(r"\] +(\d+)/(\d+) +\d+%")


@dataclass(frozen=True, slots=True)
class ImportContext:
    """The inputs of a backend; the programs inherit the descriptors of `locks`."""

    source: Reference
    remote: RemoteImage
    output: Path
    compression: str
    access: Access
    work: Path
    locks: tuple[int, ...]
    progress: ImageProgress

    @property
    def pinned_source(self) -> Reference:
        """The image that was looked up, even if its tag has moved since."""
        digest = self.remote.digest
        return self.source.pin(digest) if digest and self.source.kind is Kind.REGISTRY else self.source


def choose_backend(source: Reference, via: str, note: Callable[[str], None]) -> str:
    """Return the backend for an image: Enroot where it is installed and reads such an image."""
    reads, has_runner = source.for_enroot is not None, _has_runner()
    if via == ENROOT:
        if not reads:
            raise UserError(f"--via enroot: Enroot does not import {source}", hint="leave it out")
        tools.require("enroot", "mksquashfs", why="to import by it")
        if not has_runner:
            raise UserError(_NO_RUNNER, hint=install_command("containers"))
        return ENROOT
    lacking = tools.list_missing(*_SKOPEO_PROGRAMS)
    has_enroot = tools.find_program("enroot") is not None
    # Enroot's own import from podman leaves a container behind.
    if via == AUTO and has_enroot and reads and (source.kind is not Kind.PODMAN or lacking):
        if has_runner:
            return ENROOT
        if lacking:
            raise UserError(_NO_RUNNER, hint=install_command("containers"))
        note(f"Enroot is there, but not enroot-py ({install_command('containers')}): imported without it")
    also = ("enroot",) if reads and not has_enroot else ()
    why = "to import an image without Enroot"
    tools.require(*_SKOPEO_PROGRAMS, why=why, or_else=_ELSEWHERE, also=also)
    return SKOPEO


def _has_runner() -> bool:
    """Return True if enroot-py is installed; importing it would make directories."""
    return importlib.util.find_spec("enroot") is not None


def look_up(backend: str, source: Reference, access: Access) -> RemoteImage:
    """Look an image up; raise UserError with the nearest tags, or the login that was used."""
    has_skopeo, refusal = tools.find_program("skopeo") is not None, None
    try:
        if has_skopeo:
            try:
                return registry.look_up(source, access)
            except ToolError as error:
                # Enroot has its own logins, such as those that a command prints.
                if backend != ENROOT or error.why != REFUSED:
                    raise
                refusal = error
        if backend != ENROOT or source.kind is not Kind.REGISTRY:
            return RemoteImage()
        try:
            answer = _run_enroot(["digest", str(source.for_enroot)], source, "look up", access)
        except ToolError as error:
            # When access is refused, Enroot names only the user that it sent.
            raise (refusal or error) from None
        # Versions that print no digest do not know the command.
        return RemoteImage(next((line for line in answer.splitlines() if line.startswith("sha256:")), None))
    except ToolError as error:
        if has_skopeo and source.kind is Kind.REGISTRY and error.why in (NO_IMAGE, REFUSED):
            _add_advice(error, source, access)
        raise


def _add_advice(error: ToolError, source: Reference, access: Access) -> None:
    """Add to an error if the tag or the whole repository is missing, and which login was refused."""
    lists = error.why == NO_IMAGE and source.digest is None
    tags = registry.list_tags(source, access) if lists else []
    if source.tag is not None and tags and source.tag not in tags:
        near = nearest(source.tag, tags, _SUGGESTED_TAGS) or sorted(tags)[-_SUGGESTED_TAGS:]
        error.message += f"\n{source.name} has no tag {source.tag} (of {len(tags)} tags)"
        error.hint = f"nearest: {', '.join(near)}\n{error.hint}"
        return
    error.message += f"\nthe registry was asked {registry.describe_login(access, source)}"
    if error.why == NO_IMAGE:
        private = "or it is private: registries give the same answer to a login that may not read it"
        error.hint = f"{error.hint}\n{private}\n{fill_names(CREDENTIALS, hint_names(source))}"


def make_squashfs(backend: str, context: ImportContext, via: str) -> str:
    """Write the squashfs; return the programs that made it, with their versions.

    In ``auto``, skopeo takes over where Enroot fails: it has other logins, and speaks to more registries.
    """
    if backend == ENROOT:
        try:
            _make_by_enroot(context)
        except ToolError as error:
            may_change = via == AUTO and not tools.list_missing(*_SKOPEO_PROGRAMS)
            if not may_change or context.remote.config is None or error.why == NO_SPACE:
                raise
            # The `registry` 2.8 answers 404 to a request that does not name the type of an OCI manifest.
            not_seen = f"Enroot does not find {context.source} in the registry, and skopeo does"
            reason = not_seen if error.why == NO_IMAGE else error.message
            context.progress.note(f"{reason}\nimported without Enroot")
            context.output.unlink(missing_ok=True)
            backend = SKOPEO
    if backend == SKOPEO:
        _make_by_skopeo(context)
    programs = ("enroot", "mksquashfs") if backend == ENROOT else _SKOPEO_PROGRAMS
    return ", ".join([f"slipway {__version__}", *map(tools.name_and_version, programs)])


def _make_by_enroot(context: ImportContext) -> None:
    source, work, output, progress = context.source, context.work, context.output, context.progress
    # By default Enroot keeps layers for other imports, in the user's home, and never removes them.
    cache = work / "cache"
    cache.mkdir()
    options = [*SQUASH_OPTIONS[context.compression], *resource_limits(processors=False)]
    environment = {
        "PATH": _path_for_enroot(source, work),
        "TMPDIR": str(work),
        "ENROOT_TEMP_PATH": str(work),
        "ENROOT_CACHE_PATH": str(cache),
        "ENROOT_SQUASH_OPTIONS": " ".join(options),
    }
    expected = int(context.remote.unpacked * COMPRESSED_FRACTION[context.compression])
    progress.step(f"fetching {source} by Enroot", context.remote.packed or None)
    is_packing = False

    def tick(_: int) -> None:
        nonlocal is_packing
        if not output.exists():
            progress.advance(_bytes_below(cache))
            return
        if not is_packing:
            is_packing = True
            progress.step(f"packing with {context.compression}", expected or None)
        progress.advance(output.stat().st_size)

    arguments = ["import", "-o", str(output), str(context.pinned_source.for_enroot)]
    _run_enroot(arguments, source, "import", context.access, environment, tick, context.locks)


def _run_enroot(
    arguments: list[str],
    source: Reference,
    doing: str,
    access: Access,
    environment: Mapping[str, str] | None = None,
    tick: Callable[[int], None] | None = None,
    keep: tuple[int, ...] = (),
) -> str:
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    plain = {"ENROOT_ALLOW_HTTP": "yes"} if access.plain_http else {}
    return tools.run(
        # -P: the current directory is not searched for modules.
        [sys.executable, "-P", "-m", "launcher.images.enroot_runner", *arguments],
        doing=f"{doing} {source}",
        program="enroot",
        names=hint_names(source),
        env={**plain, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
        on_tick=tick,
        keep=keep,
    )


def _path_for_enroot(source: Reference, work: Path) -> str:
    """Return the PATH for Enroot, in which podman is `docker`.

    With podman Enroot removes its container by `docker rm` all the same; without a `docker` the import
    succeeds, exits with 1 and leaves that container.
    """
    path, podman = os.environ.get("PATH", os.defpath), tools.find_program("podman")
    if source.kind is not Kind.PODMAN or podman is None:
        return path
    links = work / "bin"
    links.mkdir()
    (links / "docker").symlink_to(podman)
    return f"{links}{os.pathsep}{path}"


def _make_by_skopeo(context: ImportContext) -> None:
    assert context.remote.config
    source, work, progress = context.source, context.work, context.progress
    layout, root = work / "oci", work / "rootfs"
    # Their temporary files must not go to /tmp, which may be too small.
    environment = {"TMPDIR": str(work)}
    packed = context.remote.packed or None
    progress.step(f"fetching {source}", packed)
    copy = ["skopeo", "copy", *context.access.options("src-")]
    tools.run(
        [*copy, str(context.pinned_source.for_skopeo), f"oci:{layout}:image"],
        doing=f"fetch {source}",
        names=hint_names(source),
        env=environment,
        on_line=lambda _: None,
        on_tick=lambda _: progress.advance(_bytes_below(layout)),
        keep=(*context.locks, *context.access.descriptors),
    )
    progress.step("unpacking", packed)
    rootless = () if os.geteuid() == 0 else ("--rootless",)
    tools.run(
        ["umoci", "raw", "unpack", *rootless, "--image", f"{layout}:image", root],
        doing=f"unpack {source}",
        env=environment,
        on_tick=lambda pid: progress.advance(tools.bytes_moved(pid, "rchar")),
        keep=context.locks,
    )
    remove_tree(layout)
    total = rootfs.make_readable(root)
    for note in rootfs.configure(root, context.remote.config, str(source.for_enroot or source)):
        progress.note(note)
    progress.step(f"packing with {context.compression}", total)

    def read_bar(line: str) -> None:
        match = _BAR.search(line)
        if match and int(match[2]):
            progress.advance(total * int(match[1]) // int(match[2]))

    options = [*SQUASH_OPTIONS[context.compression], *resource_limits()]
    tools.run(
        ["mksquashfs", root, context.output, "-all-root", "-noappend", "-progress", *options],
        doing=f"pack {source}",
        env=environment,
        on_line=read_bar,
        keep=context.locks,
    )


def _bytes_below(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += Path(root, name).stat().st_size
            except OSError:  # renamed meanwhile
                continue
    return total
