"""What programs for images say when they fail, and what can be done about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.errors import UserError, end_of, one_line
from launcher.secrecy import without_secrets

_SHOWN_LINES = 3
_LISTING = re.compile(": `skopeo list-tags [^`]*`")

# What their logs put around the words.
_LOG = re.compile(r'(?:time="[^"]*" )?level=\w+ msg="(.*)"')
_LEVEL = re.compile(r"(?:\[(?:ERROR|WARN|INFO)\]|(?:FATA|ERRO|WARN|INFO)\[\d+\]) +")
# What repeats that a command failed, and what tells why. BuildKit begins the lines of an instruction
# with a number and a time.
_STATUS = re.compile(r"^(?:subprocess exited with|exit) status \d+$|^(?:-+|={3,})$")
_CAUSE = re.compile(
    r"(?:#\d+ )?(?:\d+\.\d+ )?(?:E: |fatal|error\b|\S*error: |\w*(?:Error|Exception): |"
    r".*: (?:(?:fatal )?error: |not found$|No such file|command not found))",
    re.IGNORECASE,
)
_REPEATED_PROGRESS = re.compile(r"^\[[=\-\\|/ ]*\] *\d+/\d+ +\d+%")

CREDENTIALS = """\
log in: `skopeo login REGISTRY`, or `docker login REGISTRY`, or write
`machine HOSTNAME login USER password KEY` to ~/.config/enroot/.credentials (chmod 600);
the user of nvcr.io is $oauthtoken, and its password your NGC key"""
_MISTYPED = "or look at the name: registries refuse a repository that they do not have in the same words"

_UNREACHABLE = """\
look whether this machine can reach it: `curl -I https://REGISTRY/v2/` (behind a proxy set https_proxy);
compute nodes often cannot, the login node can: import there"""

REFUSED = "the registry does not let you in"
NO_SPACE = "no space is left"
NO_IMAGE = "there is no such image"
_NO_ROOM = "make room (`df -h`, `df -i`, `quota`), or have it done elsewhere: --temp-dir DIR, images_dir=DIR"


class Complaint(UserError):
    """A program's failure; `why` in a few words, the same for the same cause."""

    def __init__(self, doing: str, why: str, quoted: Sequence[str], hint: str) -> None:
        super().__init__("\n".join([f"cannot {doing}: {why}", *quoted]), hint=hint or None)
        self.why = why


class _Sign(NamedTuple):
    pattern: re.Pattern[str]
    what: str
    hint: str


def _sign(pattern: str, what: str, hint: str) -> _Sign:
    return _Sign(re.compile(pattern, re.IGNORECASE), what, hint)


# The first that is found tells why: a full disk is behind many other words, and so is a lack of rights.
_SIGNS = (
    _sign(r"no space left on device|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b", NO_SPACE, _NO_ROOM),
    _sign(
        r"cannot connect to the docker daemon|docker daemon.*running",
        "the docker daemon does not answer",
        "start it, or use what needs none: podman://NAME:TAG, a registry, oci-archive:FILE",
    ),
    _sign(
        r"server gave HTTP response to HTTPS client",
        "the registry speaks plain HTTP",
        "if you trust the network on the way to it: --plain-http",
    ),
    _sign(
        r"x509|certificate signed by unknown|certificate verify failed|self.signed certificate",
        "the registry's certificate is not one that this machine trusts",
        "have its authority added to the system's certificates; in a network you trust: --plain-http",
    ),
    _sign(
        r"unauthorized|authentication required|invalid username/password|code:? 40[13]|40[13] \(?forbidden|"
        r"access to the (resource|requested resource).*denied|\bdenied: ",
        REFUSED,
        f"{CREDENTIALS}\n{_MISTYPED}",
    ),
    _sign(
        r"no such host|could not resolve|name or service not known|connection refused|network is unreachable|"
        r"no route to host|i/o timeout|timed? ?out|connection reset|failed to connect|couldn't connect|"
        r"TLS handshake|\bEOF$",
        "the registry cannot be reached",
        _UNREACHABLE,
    ),
    _sign(
        r"manifest unknown|name unknown|repository name not known|error: 404|code:? 404|404 \(?not found|"
        r"(manifest|image|tag|reference|repository)\b.* not found|no such (image|manifest)|image not known|"
        r"does not resolve to an image|no descriptor found for reference|"
        r"parsing image name.*no such file or directory",
        NO_IMAGE,
        "look at its name and its tag: `skopeo list-tags docker://REGISTRY/NAME`",
    ),
    _sign(
        r"no image found in manifest list|no image found in image index|no matching manifest",
        "the image is not made for this machine's architecture",
        "choose a tag that is",
    ),
    _sign(
        r"exec format error",
        "a program in the image is for another architecture",
        "build it on a machine of that architecture, or choose another base",
    ),
    _sign(
        r"cannot clone: |user namespaces|newuidmap|newgidmap|no subuid ranges|supplemental groups|"
        r"unshare.*operation not permitted",
        "this machine does not let you use user namespaces",
        "have lines for you written into /etc/subuid and /etc/subgid, or do it on another machine",
    ),
    _sign(r"\bpermission denied\b|operation not permitted", "it may not do that here", ""),
)


def explained(
    doing: str,
    program: str,
    code: int,
    said: Sequence[str],
    names: Mapping[str, str] | None = None,
    plain_http: bool = False,
) -> Complaint:
    """Why a program failed, from what it said last, and what to do next.

    Parameters
    ----------
    doing
        What it was run for, as in ``cannot DOING``.
    code
        How it ended; negative for a signal.
    names
        What ``REGISTRY``, ``HOSTNAME`` (without its port) and ``NAME`` are, so that what to do next can be
        pasted; empty for an image of no registry.
    plain_http
        Whether the registry was asked without TLS.
    """
    name = Path(program).name
    lines = [line for line in said if not _REPEATED_PROGRESS.match(line)]
    sign = next((one for one in _SIGNS if any(one.pattern.search(line) for line in lines)), None)
    if sign is None:
        why = f"{name} was ended by signal {-code}" if code < 0 else f"{name} failed with exit code {code}"
        shown = _causes(lines)
    else:
        why = sign.what
        shown = [next(line for line in reversed(lines) if sign.pattern.search(line))]
    quoted = [f"{name}: {end_of(one_line(without_secrets(_words(line))))}" for line in shown]
    hint = sign.hint if sign else ""
    if names == {}:  # of no registry: nothing lists its tags
        hint = _LISTING.sub("", hint)
    if plain_http or any("http://" in line for line in lines):
        hint = hint.replace("https://REGISTRY", "http://REGISTRY")
        hint = hint.replace("list-tags docker", "list-tags --tls-verify=false docker")
    return Complaint(doing, why, quoted, named(hint, names or {}))


def named(hint: str, names: Mapping[str, str]) -> str:
    """Return advice with the names of an image in it, so that it can be pasted."""
    for word, value in names.items():
        hint = hint.replace(word, one_line(value))
    return hint


def _causes(lines: Sequence[str]) -> list[str]:
    """The lines that tell why, and the last one; where none does, the last ones."""
    telling = [line for line in dict.fromkeys(lines) if not _STATUS.search(line)] or list(lines)
    causes = [line for line in telling if _CAUSE.match(line)][-_SHOWN_LINES + 1 :]
    if not causes:
        return telling[-_SHOWN_LINES:]
    return list(dict.fromkeys([*causes, telling[-1]]))


def _words(line: str) -> str:
    found = _LOG.fullmatch(line)
    return found[1].replace('\\"', '"') if found else _LEVEL.sub("", line, count=1)
