"""The origin of a launch: user, machine, commit, uncommitted changes, packages."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher import __version__
from launcher.errors import escape
from launcher.secrecy import MASK, collect_known_values, without_secrets

GIT_DIFF = "git.diff"
CONFIG_GIT_DIFF = "config_git.diff"

_PACKAGES = ("hydra-core", "omegaconf", "jinja2", "pydantic", "submitit")


def format_now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_tag() -> str:
    """Return a name that no other launch has."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"


def user() -> str:
    try:
        # Not getpass: LOGNAME may be anything, and the scheduler uses the user id.
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user id without a name, as in some containers
        return str(os.getuid())


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


class Origin(NamedTuple):
    """The origin of a launch."""

    fields: dict[str, Any]
    files: dict[str, str]


def gather(code: Path, config_dirs: Sequence[Path], image: str | None) -> Origin:
    """Collect the origin of a launch; leave out what cannot be read.

    Of `config_dirs` the first in its own checkout is recorded.
    """
    ours = checkout_of(code)
    others = filter(None, map(checkout_of, config_dirs))
    theirs = next((other for other in others if ours is None or other.top != ours.top), None)
    checkouts = ((GIT_DIFF, ours), (CONFIG_GIT_DIFF, theirs))
    files = {name: checkout.diff for name, checkout in checkouts if checkout and checkout.diff is not None}
    fields: dict[str, Any] = {
        "git_commit": ours.commit if ours else None,
        "git_dirty": ours.dirty if ours else None,
        "git_diff": GIT_DIFF if GIT_DIFF in files else None,
        "packages": package_versions(),
    }
    if theirs is not None:
        fields["config_git"] = {
            "directory": str(theirs.top),
            "commit": theirs.commit,
            "dirty": theirs.dirty,
            "diff": CONFIG_GIT_DIFF if CONFIG_GIT_DIFF in files else None,
        }
    return replace_image(Origin(fields, files), image)


def replace_image(origin: Origin, image: str | None) -> Origin:
    """Return the origin with another image, and the digest in its name; the job computes that of a file."""
    match = re.search(r"@(sha256:[0-9a-f]{64})$", image or "")
    digest = match[1] if match else None
    return origin._replace(fields=origin.fields | {"image": image, "image_digest": digest})


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compose, render and submit; leave out missing ones."""
    import platform
    from importlib import metadata

    versions = {"python": platform.python_version(), "slipway": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


_GIT_SECONDS = 30.0  # the time limit of one git command
# Larger ones are data that somebody forgot to ignore; the commit alone is recorded.
_LARGEST_DIFF = 8 << 20
_MOST_UNTRACKED = 1000

# A diff for `git apply`, independent of the user's git settings.
_PLAIN = ["--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/"]
# In programs `name = value` may be anything, and a secret is a quoted string; elsewhere it is a setting.
_PROGRAMS = (
    *(".py", ".pyx", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".java", ".kt"),
    *(".js", ".jsx", ".mjs", ".ts", ".tsx", ".lua", ".rb", ".pl", ".php", ".swift", ".scala", ".jl", ".R"),
)
_KEY_BEGINS, _KEY_ENDS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"), re.compile(r"-----END ")
# A line of a private key that begins outside the diff.
_KEY_LINE = re.compile(r"[+ -](?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9+/]{64}")
_KEY_LENGTH = 65
_HEADINGS = ("diff --git ", "@@ ", "GIT binary patch")


class Checkout(NamedTuple):
    """The present state of a git checkout.

    `dirty` is True if tracked files were changed since the commit, ``None`` if git did not answer. `diff` has
    the changes for `git apply`, after the names of untracked files; it is ``None`` without changes.
    """

    top: Path
    commit: str
    dirty: bool | None
    diff: str | None


def checkout_of(directory: Path) -> Checkout | None:
    """Return the checkout that has `directory` among its files, or ``None``."""
    if _git(directory, "ls-files", "--error-unmatch", ".") is None:
        return None
    lines = (_git(directory, "rev-parse", "--show-toplevel", "HEAD") or "").splitlines()
    if len(lines) != 2:
        return None
    top, commit = Path(lines[0]), lines[1]
    status = _git(top, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal")
    if status is None:
        return Checkout(top, commit, None, None)
    entries = [entry for entry in status.split("\0") if entry]
    untracked = [entry[3:] for entry in entries if entry.startswith("?? ")]
    dirty = len(untracked) < len(entries)
    diff = _diff(top, commit, untracked, dirty) if entries else None
    return Checkout(top, commit, dirty, diff)


def _diff(top: Path, commit: str, untracked: list[str], dirty: bool) -> str:
    lines = [f"# {escape(str(top))}, as it differed from commit {commit}"]
    text = _bounded_diff(top) if dirty else ""
    if text is None:
        lines.append(f"# the changes are missing: git did not print them within {_GIT_SECONDS:.0f} s and")
        lines.append(f"# {_LARGEST_DIFF >> 20} MiB")
    shown = _mask_secrets(text or "")
    if shown != (text or ""):
        lines.append(
            "# the values of secrets are masked; git does not apply a hunk with one of them as it was"
        )
    if untracked:
        lines.append("# not tracked, and not in here:")
        lines += [f"#   {escape(without_secrets(name))}" for name in untracked[:_MOST_UNTRACKED]]
        more = len(untracked) - _MOST_UNTRACKED
        lines += [f"#   ... and {more} more"] if more > 0 else []
    return "\n".join([*lines, shown])


def _bounded_diff(top: Path) -> str | None:
    command = ["git", "-C", str(top), "diff", "HEAD", *_PLAIN]
    with (
        contextlib.suppress(OSError, subprocess.TimeoutExpired),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process,
    ):
        assert process.stdout is not None
        try:
            content = process.stdout.read(_LARGEST_DIFF + 1)
            if len(content) <= _LARGEST_DIFF and process.wait(_GIT_SECONDS) == 0:
                return content.decode("utf-8", "surrogateescape")  # bytes of any encoding are kept
        finally:
            process.kill()
    return None


def _mask_secrets(diff: str) -> str:
    """Return a diff with secrets masked; each line stays a line."""
    known = collect_known_values()
    masked, program, binary, in_key = [], False, False, False
    for line in diff.split("\n"):
        if line.startswith(_HEADINGS):
            binary, in_key = line == "GIT binary patch", False
            if line.startswith("diff --git "):
                program = line.rstrip('"').endswith(_PROGRAMS)
        if binary:
            masked.append(line)
        elif in_key or (len(line) == _KEY_LENGTH and _KEY_LINE.fullmatch(line)):
            in_key = in_key and not _KEY_ENDS.search(line)
            masked.append(line[:1] + MASK)
        else:
            begins = _KEY_BEGINS.search(line)
            in_key = bool(begins) and not _KEY_ENDS.search(line)
            start = 1 if line[:1] in ("+", "-", " ") else 0
            masked.append(line[:start] + without_secrets(line[start:], literals=program, known=known))
    return "\n".join(masked)


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(directory), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None
