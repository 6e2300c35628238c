"""Registries: logging in, looking up an image before it is fetched, and pushing one; all by skopeo."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import UserError, escape
from launcher.images import tools
from launcher.images.progress import ImageProgress
from launcher.images.references import DOCKER_HUB, Kind, Reference
from launcher.images.scratch import SpaceNeeds, choose_scratch, scratch_directory
from launcher.images.store import ImageConfig, text_labels, texts_of

# The hosts that Docker Hub's images are requested from.
HUB_MACHINES = ("auth.docker.io", "registry-1.docker.io", DOCKER_HUB)
_HUB_KEY = "https://index.docker.io/v1/"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)

# As images name them (Go's GOARCH).
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Factor by which layers are larger when unpacked: gzip makes a half to a third of Python, libraries and CUDA.
_UNPACKED_RATIO = {"gzip": 3.0, "zstd": 3.5}
# For a hint alone.
_LISTING_PATIENCE = "20s"
# What reading JSON of another shape, or nested too deeply, ends with.
_NOT_JSON = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# These hold an image as it was packed: copying it changes nothing.
_PACKED = (Kind.REGISTRY, Kind.OCI_DIRECTORY)


@dataclass(frozen=True, slots=True)
class Access:
    """The options of a connection to a registry.

    `authfile` has logins, as ``skopeo login`` writes them; skopeo's own file if ``None``.
    """

    plain_http: bool = False
    authfile: Path | None = None
    descriptors: tuple[int, ...] = ()

    def options(self, side: str = "") -> list[str]:
        """Return skopeo's options; `side` is ``src-`` or ``dest-`` for a copy."""
        login = [f"--{side}authfile", str(self.authfile)] if self.authfile else []
        return login + [f"--{side}tls-verify=false"] * self.plain_http


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """The known facts of an image for this machine's architecture, which is not fetched yet."""

    digest: str | None = None
    # Bytes of its layers, and an estimate of them unpacked; 0 if unknown.
    packed: int = 0
    unpacked: int = 0
    config: ImageConfig | None = None


def architecture() -> str:
    """Return this machine's architecture, as images name it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def hint_names(source: Reference) -> dict[str, str]:
    """Return what fills in the placeholders of hints for an image of a registry."""
    if source.registry is None:
        return {}
    # Enroot reads Docker Hub's logins under another host.
    machine = HUB_MACHINES[0] if source.registry == DOCKER_HUB else _host_of(source.registry)
    return {"REGISTRY": source.registry, "HOSTNAME": machine, "NAME": source.name}


def _host_of(registry: str) -> str:
    return re.sub(r":\d+$", "", registry)


# --- logins


def login_file(environment: Mapping[str, str]) -> Path:
    """Return the file that Enroot reads logins from."""
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - there may be none
    config = environment.get("XDG_CONFIG_HOME") or f"{home}/.config"
    return Path(environment.get("ENROOT_CONFIG_PATH") or f"{config}/enroot") / ".credentials"


def enroot_login(
    registry: str, user: str | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, str] | None:
    """Return the user and the password in Enroot's file for a registry.

    Like a netrc it has no ports. A password may be a variable, which Enroot has a shell evaluate; one that a
    command prints is left to Enroot.
    """
    machines = HUB_MACHINES if registry == DOCKER_HUB else (_host_of(registry),)
    try:
        lines = login_file(environment).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        words = line.split(None, 5)
        if words[:3:2] != ["machine", "login"] or len(words) < 6 or words[4] != "password":
            continue
        password = _expand(words[5].strip(), environment)
        if words[1] in machines and user in (None, words[3]) and password:
            return words[3], password
    return None


def _expand(word: str, environment: Mapping[str, str]) -> str | None:
    if not word.startswith("$"):
        return word
    try:
        [plain] = shlex.split(word)
    except ValueError:
        return None
    match = _VARIABLE.fullmatch(plain)
    return environment.get(match[1] or match[2]) if match else None


@contextmanager
def borrow_login(access: Access, source: Reference) -> Iterator[Access]:
    """Yield access with Enroot's login if skopeo has no login for the registry.

    The login is in memory alone: no file and no argument has it, and only programs that inherit it read it.
    """
    registry = source.registry or ""
    login = enroot_login(registry, source.user) if registry and access.authfile is None else None
    if login is None or _skopeo_login(registry) is not None:
        yield access
        return
    key = _HUB_KEY if registry == DOCKER_HUB else registry
    token = base64.b64encode(":".join(login).encode()).decode()
    handle = os.memfd_create("login", os.MFD_CLOEXEC)
    try:
        os.write(handle, json.dumps({"auths": {key: {"auth": token}}}).encode())
        yield replace(access, authfile=Path(f"/proc/self/fd/{handle}"), descriptors=(handle,))
    finally:
        os.close(handle)


def describe_login(access: Access, source: Reference) -> str:
    """Return the user that skopeo sends to a registry, and the file that names it; never the password."""
    registry = source.registry or ""
    borrowed = enroot_login(registry, source.user) if access.descriptors else None
    if borrowed is not None:
        return f"as {escape(borrowed[0])}, of {login_file(os.environ)}"
    user = _skopeo_login(registry, access.authfile)
    if user is None:
        return "without a login"
    return f"as {escape(user)}, of {access.authfile or 'the logins of skopeo and docker'}"


def _skopeo_login(registry: str, authfile: Path | None = None) -> str | None:
    """Return the user that skopeo knows for a registry."""
    command = ["skopeo", "login", "--get-login", registry]
    command += ["--authfile", str(authfile)] if authfile is not None else []
    try:
        return tools.run(command, doing=f"look for a login of {registry}").strip()
    except UserError:
        return None


def look_up(source: Reference, access: Access) -> RemoteImage:
    """Return an image's manifest and configuration; nothing of its layers is fetched."""
    doing, name = f"look up {source}", escape(str(source))
    try:
        raw = _inspect(source, access, doing, "--raw")
        digest = _digest_for_this_machine(json.loads(raw)) if source.kind is Kind.REGISTRY else None
        if digest is not None:
            source = source.pin(digest)
            raw = _inspect(source, access, doing, "--raw")
        config = _image_config(json.loads(_inspect(source, access, doing, "--config")))
        unpacked = 0.0
        for layer in json.loads(raw).get("layers") or ():
            size, kind = int(layer.get("size") or 0), str(layer.get("mediaType") or "")
            unpacked += size * next(
                (part for end, part in _UNPACKED_RATIO.items() if kind.endswith(end)), 1.0
            )
        return RemoteImage(_digest_of(raw), _layer_bytes(raw), int(unpacked), config)
    except _NOT_JSON as error:  # another shape than the specification's
        raise UserError(f"{name}: the answer is no manifest", hint="is it a container registry?") from error


def list_tags(source: Reference, access: Access) -> list[str]:
    """Return the tags of a repository; none if the registry does not list them."""
    command = ["skopeo", "--command-timeout", _LISTING_PATIENCE, "list-tags", *access.options()]
    command.append(f"docker://{source.registry}/{source.name}")
    try:
        answer = tools.run(command, doing=f"list the tags of {source.name}", keep=access.descriptors)
        tags = json.loads(answer)["Tags"]
    except (UserError, *_NOT_JSON):
        return []
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def _inspect(source: Reference, access: Access, doing: str, what: str, name: str | None = None) -> str:
    command = ["skopeo", "inspect", *access.options(), what, name or source.for_skopeo or ""]
    return tools.run(command, doing=doing, names=hint_names(source), keep=access.descriptors)


def _digest_of(manifest: str) -> str:
    return f"sha256:{hashlib.sha256(manifest.encode()).hexdigest()}"


def _digest_for_this_machine(manifest: Mapping[str, Any]) -> str | None:
    """Return the digest of this machine's image in a list of several architectures."""
    images = [(entry.get("platform") or {}, entry) for entry in manifest.get("manifests") or ()]
    own = architecture()
    for target, entry in images:
        if target.get("architecture") == own and target.get("os", "linux") == "linux":
            return str(entry["digest"])
    if images:
        names = sorted({str(target.get("architecture")) for target, _ in images})
        raise UserError(
            f"the image is made for {', '.join(names)}, and this machine is {own}",
            hint="import it on a machine of that architecture, or choose another tag",
        )
    return None


def _image_config(record: Mapping[str, Any]) -> ImageConfig:
    config = record.get("config") or {}
    return ImageConfig(
        architecture=str(record.get("architecture") or ""),
        env=texts_of(config.get("Env")),
        workdir=str(config.get("WorkingDir") or ""),
        entrypoint=texts_of(config.get("Entrypoint")),
        cmd=texts_of(config.get("Cmd")),
        volumes=texts_of(config.get("Volumes")),
        labels=text_labels(config.get("Labels")),
    )


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of pushing an image to a registry; `was_there` if it had it under that name already."""

    target: Reference
    digest: str | None = None
    was_there: bool = False
    error: UserError | None = None


def check_targets(targets: Sequence[Reference]) -> None:
    """Raise UserError naming the first target that cannot be pushed to."""
    for target in targets:
        if target.kind is not Kind.REGISTRY or target.tag is None or target.digest is not None:
            raise UserError(
                f"{target}: not a place in a registry",
                hint="a place is such as registry.example/team/nemo:25.07, with a tag and without a digest",
            )


def push(
    source: Reference,
    targets: Sequence[Reference],
    progress: ImageProgress,
    access: Access,
    temp_dir: Path | None = None,
) -> list[Pushed]:
    """Push an image to registries, one after the other; a refusal of one does not stop the others.

    Raise UserError if the image cannot be read: then nothing is sent.
    """
    if source.kind is Kind.SQUASHFS:
        raise UserError(
            f"{source}: a squashfs has lost its layers, and cannot be pushed",
            hint="push its origin: the recipe, or the image that `slipway image inspect` shows",
        )
    tools.require("skopeo", why="to push images")
    with borrow_login(access, source) as reading, _pack_once(source, temp_dir, progress) as name:
        manifest = _inspect(source, reading, f"read {source}", "--raw", name)
        return [_push(name, manifest, reading, target, access, progress) for target in targets]


@contextmanager
def _pack_once(source: Reference, temp_dir: Path | None, progress: ImageProgress) -> Iterator[str]:
    """Yield skopeo's name of the image; pack one in an engine's storage first, once for all registries."""
    name = source.for_skopeo
    assert name
    if source.kind in _PACKED:
        yield name
        return
    size = _layer_bytes(_inspect(source, Access(), f"read {source}", "--raw"))
    parent = choose_scratch(SpaceNeeds(size, 0), Path.cwd() / "image", temp_dir)
    with scratch_directory(parent) as (scratch, locks):
        # This kind of directory keeps the image's own format: Enroot does not read OCI's from every registry.
        packed = f"dir:{scratch / 'image'}"
        progress.step(f"packing {source}", size or None)
        tools.run(
            ["skopeo", "copy", "--dest-compress", name, packed],
            doing=f"pack {source}",
            on_line=lambda _: None,
            on_tick=lambda pid: progress.advance(tools.bytes_moved(pid, "rchar")),
            env={"TMPDIR": str(scratch)},
            keep=locks,
        )
        yield packed


def _push(
    name: str, manifest: str, reading: Access, target: Reference, access: Access, progress: ImageProgress
) -> Pushed:
    digest = _digest_of(manifest)
    try:
        with borrow_login(access, target) as writing:
            with suppress(UserError):  # the registry does not have the image
                if _digest_of(_inspect(target, writing, f"look up {target}", "--raw")) == digest:
                    return Pushed(target, digest, was_there=True)
            progress.step(f"pushing to {target}", _layer_bytes(manifest) or None)
            # All architectures, unchanged: otherwise the digests would differ.
            command = ["skopeo", "copy", "--all", "--preserve-digests"]
            command += [*reading.options("src-"), *writing.options("dest-"), name, target.for_skopeo or ""]
            tools.run(
                command,
                doing=f"push to {target}",
                names=hint_names(target),
                on_line=lambda _: None,
                on_tick=lambda pid: progress.advance(tools.bytes_moved(pid, "wchar")),
                keep=(*reading.descriptors, *writing.descriptors),
            )
            received = _digest_of(_inspect(target, writing, f"read {target} back", "--raw"))
            if received != digest:
                message = f"{target}: the registry has {received} now, and {digest} was sent"
                raise UserError(message, hint="push again")
    except UserError as error:
        return Pushed(target, error=error)
    return Pushed(target, digest)


def _layer_bytes(manifest: str) -> int:
    """Return the bytes of an image's layers; 0 for a list of images, and for any other text."""
    try:
        return sum(int(layer.get("size") or 0) for layer in json.loads(manifest).get("layers") or ())
    except _NOT_JSON:
        return 0
