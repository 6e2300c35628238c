"""An image to several registries: packed once, sent to each, and read back by its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.images import tools
from launcher.images.credentials import lent
from launcher.images.progress import Progress
from launcher.images.references import Kind, Reference
from launcher.images.remote import Access, names_of
from launcher.images.space import Needs, place
from launcher.images.working import working_in

# Those that hold an image as it was packed: sending it on changes nothing.
_PACKED = (Kind.REGISTRY, Kind.OCI_DIRECTORY)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What is sent: skopeo's name for it, its manifest or the list of them, and how it is read."""

    name: str
    raw: str
    access: Access

    @property
    def digest(self) -> str:
        return _digest(self.raw)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What came of sending an image to a registry.

    Attributes
    ----------
    digest
        What the registry says of it: the same in all of them.
    was_there
        Whether it had that image under that name already.
    error
        Why it is not there now.
    """

    target: Reference
    digest: str | None = None
    was_there: bool = False
    error: UserError | None = None


def push(
    source: Reference,
    targets: Sequence[Reference],
    progress: Progress,
    access: Access | None = None,
    temp_dir: Path | None = None,
) -> list[Pushed]:
    """Send an image to registries, one after the other; one that refuses keeps it from no other.

    Raises
    ------
    UserError
        If a target is no registry's, or the image cannot be read: then nothing is sent.
    """
    access = access or Access()
    _check(source, targets)
    tools.need("skopeo", why="to push images")
    with lent(access, source) as reading, _packed(source, temp_dir, progress) as name:
        sent = _Sent(name, _raw(name, reading, source, f"read {source}"), reading)
        return [_pushed(sent, target, access, progress) for target in targets]


def _check(source: Reference, targets: Sequence[Reference]) -> None:
    if source.kind is Kind.SQUASHFS:
        raise UserError(
            f"{source}: a squashfs has lost its layers, and cannot be pushed",
            hint="push what it was made from: the recipe, or the image that `slipway image inspect` says",
        )
    check_places(targets)


def check_places(targets: Sequence[Reference]) -> None:
    """Refuse what nothing can be pushed to.

    Raises
    ------
    UserError
        Naming the first of them.
    """
    for target in targets:
        if target.kind is not Kind.REGISTRY or target.tag is None or target.digest is not None:
            raise UserError(
                f"{target}: this is no place in a registry",
                hint="a place is such as registry.example/team/nemo:25.07, with a tag and without a digest",
            )


@contextmanager
def _packed(source: Reference, temp_dir: Path | None, progress: Progress) -> Iterator[str]:
    """The image as skopeo is to copy it: one of an engine's storage is packed, once for all registries."""
    name = source.for_skopeo
    assert name
    if source.kind in _PACKED:
        yield name
        return
    size = _size(_parsed(_raw(name, Access(), source, f"read {source}")))
    # What is sent does not stay here.
    parent = place(Needs(size, 0), Path.cwd() / "image", temp_dir)
    with working_in(parent) as work:
        # Such a directory keeps the image's own format: Enroot does not read OCI's from every registry.
        packed = f"dir:{work.path / 'image'}"
        progress.step(f"packing {source}", size or None)
        tools.run(
            ["skopeo", "copy", "--dest-compress", name, packed],
            doing=f"pack {source}",
            on_line=lambda _: None,
            on_tick=_telling(progress, "rchar"),
            env={"TMPDIR": str(work.path)},
            keep=(work.descriptor,),
        )
        yield packed


def _pushed(sent: _Sent, target: Reference, access: Access, progress: Progress) -> Pushed:
    try:
        with lent(access, target) as writing:
            was_there = _digest_there(target, writing) == sent.digest
            if not was_there:
                _send(sent, target, writing, progress)
    except UserError as error:
        return Pushed(target, error=error)
    return Pushed(target, sent.digest, was_there)


def _send(sent: _Sent, target: Reference, access: Access, progress: Progress) -> None:
    progress.step(f"pushing to {target}", _size(_parsed(sent.raw)) or None)
    # All architectures, and as they are: else the digests would differ.
    words = ["skopeo", "copy", "--all", "--preserve-digests"]
    for side, one in (("src", sent.access), ("dest", access)):
        words += [f"--{side}-authfile={one.authfile}"] * (one.authfile is not None)
        words += [f"--{side}-tls-verify=false"] * one.plain_http
    tools.run(
        [*words, sent.name, target.for_skopeo or ""],
        doing=f"push to {target}",
        names=names_of(target),
        on_line=lambda _: None,
        on_tick=_telling(progress, "wchar"),
        keep=(*sent.access.descriptors, *access.descriptors),
    )
    found = _digest(_raw(target.for_skopeo or "", access, target, f"read {target} back"))
    if found != sent.digest:
        told = f"{target}: the registry has {found} now, and {sent.digest} was sent"
        raise UserError(told, hint="push again")


def _digest_there(target: Reference, access: Access) -> str | None:
    """What a registry has under a name; ``None`` also where it does not say: pushing tells."""
    try:
        return _digest(_raw(target.for_skopeo or "", access, target, "look whether it is there"))
    except UserError:
        return None


def _raw(name: str, access: Access, reference: Reference, doing: str) -> str:
    words = ["skopeo", "inspect", *access.words(), "--raw", name]
    return tools.run(words, doing=doing, names=names_of(reference), keep=access.descriptors)


def _digest(raw: str) -> str:
    return f"sha256:{hashlib.sha256(raw.encode()).hexdigest()}"


def _parsed(raw: str) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _size(manifest: dict[str, Any]) -> int:
    """The bytes of an image's layers; 0 for a list of images."""
    return sum(int(layer.get("size") or 0) for layer in manifest.get("layers") or ())


def _telling(progress: Progress, counter: str) -> Callable[[int], None]:
    """Tell how much a program has read or written so far (proc_pid_io(5)): skopeo itself does not say."""

    def tell(pid: int) -> None:
        try:
            lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        except OSError:
            return
        done = next((line.split()[1] for line in lines if line.startswith(f"{counter}:")), None)
        if done is not None:
            progress.advance(int(done))

    return tell
