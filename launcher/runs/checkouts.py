"""The checkout that something came from: its commit, and how it differed from it."""

from __future__ import annotations

import contextlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import one_line
from launcher.secrecy import MASK, known_values, suspect_lines, without_secrets

_PATIENCE = 30.0  # seconds, of one git
# More are data that somebody forgot to ignore; the manifest and the commit must do.
_LARGEST_DIFF = 8 << 20
_MOST_UNTRACKED = 1000

# However the user has set up git, a diff that `git apply` takes.
_PLAIN = ["--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/"]
# In programs `name = value` may be anything, and a secret is a quoted text; elsewhere it is a setting.
_PROGRAMS = (
    *(".py", ".pyx", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".java", ".kt"),
    *(".js", ".jsx", ".mjs", ".ts", ".tsx", ".lua", ".rb", ".pl", ".php", ".swift", ".scala", ".jl", ".R"),
)
_KEY_BEGINS, _KEY_ENDS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"), re.compile(r"-----END ")
# A line of a private key whose beginning is not in the diff.
_KEY_LINE = re.compile(r"[+ -](?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9+/]{64}")
_KEY_LENGTH = 65
_HEADINGS = ("diff --git ", "@@ ", "GIT binary patch")


@dataclass(frozen=True, slots=True)
class Checkout:
    """A git checkout as it was just now.

    Attributes
    ----------
    top
        Its directory.
    dirty
        Whether tracked files were changed since the commit; ``None`` if git could not tell.
    diff
        The changes, as a text that `git apply` takes, with the names of untracked files in front; ``None``
        where there are neither.
    """

    top: Path
    commit: str
    dirty: bool | None
    diff: str | None


def checkout_of(directory: Path) -> Checkout | None:
    """The checkout that `directory` is a part of.

    ``None`` outside a checkout, also where an installed package lies below somebody else's.
    """
    if _git(directory, "ls-files", "--error-unmatch", ".") is None:
        return None
    told = (_git(directory, "rev-parse", "--show-toplevel", "HEAD") or "").splitlines()
    if len(told) != 2:
        return None
    top, commit = Path(told[0]), told[1]
    status = _git(top, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal")
    if status is None:
        return Checkout(top, commit, None, None)
    entries = [entry for entry in status.split("\0") if entry]
    untracked = [entry[3:] for entry in entries if entry.startswith("?? ")]
    dirty = len(untracked) < len(entries)
    diff = _diff(top, commit, untracked, dirty) if entries else None
    return Checkout(top, commit, dirty, diff)


def _diff(top: Path, commit: str, untracked: list[str], dirty: bool) -> str:
    lines = [f"# {one_line(str(top))}, as it differed from commit {commit}"]
    text = _bounded_diff(top) if dirty else ""
    if text is None:
        lines.append(f"# the changes are not here: git could not tell them within {_PATIENCE:.0f} s and")
        lines.append(f"# {_LARGEST_DIFF >> 20} MiB")
        text = ""
    shown = _without_secrets(text)
    if shown != text:
        lines.append(
            "# the values of secrets are masked; git does not apply a hunk with one of them as it was"
        )
    if untracked:
        lines.append("# not tracked, and not in here:")
        lines += [f"#   {one_line(without_secrets(name))}" for name in untracked[:_MOST_UNTRACKED]]
        more = len(untracked) - _MOST_UNTRACKED
        lines += [f"#   ... and {more} more"] if more > 0 else []
    return "\n".join(lines) + "\n" + shown


def _bounded_diff(top: Path) -> str | None:
    command = ["git", "-C", str(top), "diff", "HEAD", *_PLAIN]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            content = process.stdout.read(_LARGEST_DIFF + 1)
            if len(content) > _LARGEST_DIFF:
                process.kill()
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(_PATIENCE) == 0:
                    # As bytes of whatever encoding; they are written as they are.
                    return content.decode("utf-8", "surrogateescape")
            process.kill()
    except OSError:
        pass
    return None


def _without_secrets(diff: str) -> str:
    """Return a diff with secrets masked; each line stays a line of its file."""
    known = known_values()
    suspects = suspect_lines(diff, known)
    found, program, binary, in_key = [], False, False, False
    for number, line in enumerate(diff.split("\n")):
        if line.startswith(_HEADINGS):
            binary, in_key = line == "GIT binary patch", False
            if line.startswith("diff --git "):
                program = line.rstrip('"').endswith(_PROGRAMS)
        if binary:
            found.append(line)
        elif in_key or (len(line) == _KEY_LENGTH and _KEY_LINE.fullmatch(line)):
            in_key = in_key and not _KEY_ENDS.search(line)
            found.append(line[:1] + MASK)
        elif number not in suspects:
            found.append(line)
        else:
            begins = _KEY_BEGINS.search(line)
            in_key = bool(begins) and not _KEY_ENDS.search(line)
            start = 1 if line[:1] in ("+", "-", " ") else 0
            found.append(line[:start] + without_secrets(line[start:], literals=program, known=known))
    return "\n".join(found)


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            timeout=_PATIENCE,
            encoding="utf-8",
            errors="surrogateescape",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
