"""Where a launch comes from: who, which machine, which commit and what was not committed, which packages.

A dry run needs the tag alone, so what the others need is imported by them.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import __version__

GIT_DIFF = "git.diff"
CONFIG_GIT_DIFF = "config_git.diff"

_PACKAGES = ("hydra-core", "omegaconf", "jinja2", "pydantic", "submitit")


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_tag() -> str:
    """A name that no other launch has."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"


def user() -> str:
    import pwd

    try:
        # Not getpass: LOGNAME may say anything, and the scheduler goes by the user id.
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user id without a name, as in some containers
        return str(os.getuid())


def host() -> str:
    import socket

    return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Origin:
    """What a launch was made from.

    Attributes
    ----------
    fields
        The fields of the manifest that tell it.
    files
        Files of the launch, by name: what was not committed.
    """

    fields: dict[str, Any]
    files: dict[str, str]


def gather(code: Path, config_dir: Path | None, image: str | None) -> Origin:
    """Find out what a launch is made from. Nothing that cannot be told stops it.

    Parameters
    ----------
    code
        A directory of Slipway's own.
    config_dir
        The user's own tree of configurations.
    image
        That of the container, as it was asked for.
    """
    from launcher.runs.checkouts import checkout_of

    files = {}
    ours = checkout_of(code)
    theirs = checkout_of(config_dir) if config_dir is not None else None
    if theirs is not None and ours is not None and theirs.top == ours.top:
        theirs = None
    if ours is not None and ours.diff is not None:
        files[GIT_DIFF] = ours.diff
    if theirs is not None and theirs.diff is not None:
        files[CONFIG_GIT_DIFF] = theirs.diff
    fields: dict[str, Any] = {
        "git_commit": ours.commit if ours else None,
        "git_dirty": ours.dirty if ours else None,
        "git_diff": GIT_DIFF if GIT_DIFF in files else None,
        "packages": package_versions(),
        "image": image,
        "image_digest": _digest(image),
    }
    if theirs is not None:
        fields["config_git"] = {
            "directory": str(theirs.top),
            "commit": theirs.commit,
            "dirty": theirs.dirty,
            "diff": CONFIG_GIT_DIFF if CONFIG_GIT_DIFF in files else None,
        }
    return Origin(fields, files)


def of_image(origin: Origin, image: str | None) -> Origin:
    """The same origin of a launch that runs in another image."""
    return Origin({**origin.fields, "image": image, "image_digest": _digest(image)}, origin.files)


def package_versions() -> dict[str, str]:
    """The versions of what composes, renders and submits; what is not installed is left out."""
    import platform
    from importlib import metadata

    found = {"python": platform.python_version(), "slipway": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _digest(image: str | None) -> str | None:
    """The digest that an image's name states; that of a file is found out by the job."""
    matched = re.search(r"@(sha256:[0-9a-f]{64})$", image or "")
    return matched[1] if matched else None
