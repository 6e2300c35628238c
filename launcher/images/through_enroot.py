"""Import by Enroot, through enroot-py's runner and with our own URIs and options."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launcher.images import tools
from launcher.images.making import Job
from launcher.images.references import Kind, Reference
from launcher.images.remote import names_of
from launcher.images.squashing import SIZE_PART, limits

EXTRA = "containers"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# The versions that tell a digest say so in their help; older ones do not know the word.
_DIGEST = "sha256:"


def reads(source: Reference) -> bool:
    """Whether Enroot can import it."""
    return source.for_enroot is not None


def has_runner() -> bool:
    """Whether enroot-py is installed; it is not imported, which would make directories."""
    return importlib.util.find_spec("enroot") is not None


def digest(source: Reference, plain_http: bool) -> str | None:
    """The digest of an image in a registry; ``None`` for those that an engine has."""
    if source.kind is not Kind.REGISTRY:
        return None
    answer = _call(["digest", str(source.for_enroot)], source, f"look up {source}", _access(plain_http))
    return next((line for line in answer.splitlines() if line.startswith(_DIGEST)), None)


def make(job: Job) -> None:
    """Write the squashfs of an image."""
    # Layers are kept for other imports by default, in the user's home, and never removed.
    cache = job.work.path / "cache"
    cache.mkdir()
    with _engine_links(job.source, job.work.path) as path:
        environment = {
            **_access(job.access.plain_http),
            "PATH": path,
            "TMPDIR": str(job.work.path),
            "ENROOT_TEMP_PATH": str(job.work.path),
            "ENROOT_CACHE_PATH": str(cache),
            "ENROOT_SQUASH_OPTIONS": " ".join([*job.squash_options, *limits(processors=False)]),
        }
        squashing = False
        job.progress.step(f"fetching {job.source} by Enroot", job.packed or None)

        def tick(_: int) -> None:
            nonlocal squashing
            if job.output.exists():
                if not squashing:
                    squashing = True
                    expected = int(job.unpacked * SIZE_PART[job.compression])
                    job.progress.step(f"packing with {job.compression}", expected or None)
                job.progress.advance(job.output.stat().st_size)
            else:
                job.progress.advance(_size_of(cache))

        arguments = ["import", "-o", str(job.output), str(job.source_pinned.for_enroot)]
        _call(arguments, job.source, f"import {job.source}", environment, tick, job.descriptors)


def _call(
    arguments: list[str],
    source: Reference,
    doing: str,
    environment: Mapping[str, str],
    tick: tools.Tick | None = None,
    keep: tuple[int, ...] = (),
) -> str:
    # The directory that it is called in must not be looked into for modules.
    command = [sys.executable, "-P", "-m", "launcher.images.enroot_call", *arguments]
    paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return tools.run(
        command,
        doing=doing,
        program="enroot",
        names=names_of(source),
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        on_tick=tick,
        keep=keep,
    )


def _access(plain_http: bool) -> dict[str, str]:
    return {"ENROOT_ALLOW_HTTP": "yes"} if plain_http else {}


@contextmanager
def _engine_links(source: Reference, work: Path) -> Iterator[str]:
    """The PATH for Enroot: with podman it removes its container by `docker rm` all the same.

    Without a `docker` the import succeeds, exits with 1 and leaves that container.
    """
    path = os.environ.get("PATH", os.defpath)
    podman = tools.which("podman")
    if source.kind is Kind.PODMAN and podman is not None:
        links = work / "bin"
        links.mkdir()
        (links / "docker").symlink_to(podman)
        path = f"{links}{os.pathsep}{path}"
    yield path


def _size_of(cache: Path) -> int:
    """The bytes of the layers that were fetched so far."""
    try:
        with os.scandir(cache) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))
    except OSError:  # one got its final name meanwhile
        return 0
