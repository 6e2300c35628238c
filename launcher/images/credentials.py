"""Logins that the user gave to Enroot, lent to skopeo: one place is enough to write them."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launcher.errors import one_line
from launcher.images import tools
from launcher.images.references import DOCKER_HUB, Kind, Reference
from launcher.images.remote import Access, host_of

# The hosts that Docker Hub's images are asked of.
HUB_MACHINES = ("auth.docker.io", "registry-1.docker.io", DOCKER_HUB)
_HUB_KEY = "https://index.docker.io/v1/"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)


def enroot_login(
    registry: str, user: str | None = None, environment: Mapping[str, str] | None = None
) -> tuple[str, str] | None:
    """The user and the password that Enroot's file has for a registry, as in a netrc without its port.

    A password may be a variable, which Enroot has a shell evaluate. One that a command is to tell is left to
    Enroot.
    """
    environment = os.environ if environment is None else environment
    machines = HUB_MACHINES if registry == DOCKER_HUB else (host_of(registry),)
    try:
        lines = login_file(environment).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        words = line.split(None, 5)
        if words[:3:2] != ["machine", "login"] or len(words) < 6 or words[4] != "password":
            continue
        password = _evaluated(words[5].strip(), environment)
        if words[1] in machines and user in (None, words[3]) and password:
            return words[3], password
    return None


def login_file(environment: Mapping[str, str]) -> Path:
    """Where Enroot reads logins."""
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - there may be none
    config = environment.get("XDG_CONFIG_HOME") or f"{home}/.config"
    return Path(environment.get("ENROOT_CONFIG_PATH") or f"{config}/enroot") / ".credentials"


def _evaluated(word: str, environment: Mapping[str, str]) -> str | None:
    if not word.startswith("$"):
        return word
    try:
        [plain] = shlex.split(word)
    except ValueError:
        return None
    found = _VARIABLE.fullmatch(plain)
    return environment.get(found[1] or found[2]) if found else None


@contextmanager
def lent(access: Access, source: Reference) -> Iterator[Access]:
    """Access with Enroot's login, where skopeo has none for the registry.

    The login is in memory, and only the programs that we start see it. Where a registry refuses it, its user
    is told.
    """
    registry = source.registry
    login = None
    if source.kind is Kind.REGISTRY and registry and access.authfile is None:
        login = enroot_login(registry, source.user)
    if login is None or registry is None or _skopeo_login(registry) is not None:
        yield access
        return
    key = _HUB_KEY if registry == DOCKER_HUB else registry
    token = base64.b64encode(":".join(login).encode()).decode()
    handle = os.memfd_create("login", os.MFD_CLOEXEC)
    try:
        os.write(handle, json.dumps({"auths": {key: {"auth": token}}}).encode())
        lending = replace(access, authfile=Path(f"/proc/self/fd/{handle}"), descriptors=(handle,))
        yield lending
    finally:
        os.close(handle)


def login_used(access: Access, source: Reference) -> str:
    """Return as whom skopeo asks a registry, and which file says so; never the password."""
    registry = source.registry or ""
    lent_login = enroot_login(registry, source.user) if access.descriptors else None
    if lent_login is not None:
        return f"as {one_line(lent_login[0])}, of {login_file(os.environ)}"
    user = _skopeo_login(registry, access.authfile)
    if user is None:
        return "without a login"
    return f"as {one_line(user)}, of {access.authfile or 'the logins of skopeo and docker'}"


def _skopeo_login(registry: str, authfile: Path | None = None) -> str | None:
    """Return the user that skopeo knows for a registry."""
    skopeo = tools.which("skopeo")
    if skopeo is None:
        return None
    words = [str(skopeo), "login", "--get-login", registry]
    words += ["--authfile", str(authfile)] if authfile is not None else []
    nothing = subprocess.DEVNULL
    done = subprocess.run(words, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing, errors="replace")
    return None if done.returncode else done.stdout.strip()
