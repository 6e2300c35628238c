"""Failures of the programs that images are made with: what their messages mean, and what can be done."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.errors import UserError, end_of, one_line
from launcher.secrecy import without_secrets

_QUOTED_LINES = 3
_LISTING = re.compile(": `skopeo list-tags [^`]*`")

# What their logs put around the words.
_LOG = re.compile(r'(?:time="[^"]*" )?level=\w+ msg="(.*)"')
_LEVEL = re.compile(r"(?:\[(?:ERROR|WARN|INFO)\]|(?:FATA|ERRO|WARN|INFO)\[\d+\]) +")
# Lines that repeat that a command failed, and lines that say why. BuildKit begins the lines of an instruction
# with a number and a time.
_STATUS = re.compile(r"^(?:subprocess exited with|exit) status \d+$|^(?:-+|={3,})$")
_CAUSE = re.compile(
    r"(?:#\d+ )?(?:\d+\.\d+ )?(?:E: |fatal|error\b|\S*error: |\w*(?:Error|Exception): |"
    r".*: (?:(?:fatal )?error: |not found$|No such file|command not found))",
    re.IGNORECASE,
)
_PROGRESS_BAR = re.compile(r"^\[[=\-\\|/ ]*\] *\d+/\d+ +\d+%")

CREDENTIALS = """\
log in: `skopeo login REGISTRY`, or `docker login REGISTRY`, or write
`machine HOSTNAME login USER password KEY` to ~/.config/enroot/.credentials (chmod 600);
the user of nvcr.io is $oauthtoken, and its password your NGC key"""

REFUSED = "the registry refuses access"
NO_SPACE = "no space is left"
NO_IMAGE = "there is no such image"


class ToolError(UserError):
    """A program's failure; `why` is a short cause, the same words for the same cause."""

    def __init__(self, doing: str, why: str, quoted: Sequence[str], hint: str) -> None:
        super().__init__("\n".join([f"cannot {doing}: {why}", *quoted]), hint=hint or None)
        self.why = why


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    why: str
    hint: str


def _rule(pattern: str, why: str, hint: str) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE), why, hint)


# The first match decides: a full disk hides behind many other messages, and so does a lack of rights.
_RULES = (
    _rule(
        r"no space left on device|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b",
        NO_SPACE,
        "make room (`df -h`, `df -i`, `quota`), or choose other directories: --temp-dir DIR, images_dir=DIR",
    ),
    _rule(
        r"cannot connect to the docker daemon|docker daemon.*running",
        "the docker daemon does not answer",
        "start it, or use what needs none: podman://NAME:TAG, a registry, oci-archive:FILE",
    ),
    _rule(
        r"server gave HTTP response to HTTPS client",
        "the registry speaks plain HTTP",
        "if you trust the network on the way to it: --plain-http",
    ),
    _rule(
        r"x509|certificate signed by unknown|certificate verify failed|self.signed certificate",
        "this machine does not trust the registry's certificate",
        "have its authority added to the system's certificates; in a network you trust: --plain-http",
    ),
    _rule(
        r"unauthorized|authentication required|invalid username/password|code:? 40[13]|40[13] \(?forbidden|"
        r"access to the (resource|requested resource).*denied|\bdenied: ",
        REFUSED,
        f"{CREDENTIALS}\n"
        "or check the name: registries refuse a repository that they do not have in the same words",
    ),
    _rule(
        r"no such host|could not resolve|name or service not known|connection refused|network is unreachable|"
        r"no route to host|i/o timeout|timed? ?out|connection reset|failed to connect|couldn't connect|"
        r"TLS handshake|\bEOF$",
        "the registry cannot be reached",
        "check that this machine can reach it: `curl -I https://REGISTRY/v2/` (by proxy: set https_proxy);\n"
        "compute nodes often cannot, the login node can: import there",
    ),
    _rule(
        r"manifest unknown|name unknown|repository name not known|error: 404|code:? 404|404 \(?not found|"
        r"(manifest|image|tag|reference|repository)\b.* not found|no such (image|manifest)|image not known|"
        r"does not resolve to an image|no descriptor found for reference|"
        r"parsing image name.*no such file or directory",
        NO_IMAGE,
        "check its name and its tag: `skopeo list-tags docker://REGISTRY/NAME`",
    ),
    _rule(
        r"no image found in manifest list|no image found in image index|no matching manifest",
        "the image is not made for this machine's architecture",
        "choose a tag that is",
    ),
    _rule(
        r"exec format error",
        "a program in the image is for another architecture",
        "build it on a machine of that architecture, or choose another base",
    ),
    _rule(
        r"cannot clone: |user namespaces|newuidmap|newgidmap|no subuid ranges|supplemental groups|"
        r"unshare.*operation not permitted",
        "this machine does not let you use user namespaces",
        "have lines for you written into /etc/subuid and /etc/subgid, or do it on another machine",
    ),
    _rule(r"\bpermission denied\b|operation not permitted", "permission is denied", ""),
)


def explain_failure(
    doing: str,
    program: str,
    code: int,
    output: Sequence[str],
    names: Mapping[str, str] | None = None,
    plain_http: bool = False,
) -> ToolError:
    """Return the error for a program that failed: its cause, the lines that show it, and what to do next.

    Parameters
    ----------
    doing
        What it was run for, as in ``cannot DOING``.
    code
        The exit code; negative for a signal.
    output
        The last lines that it printed.
    names
        The values of ``REGISTRY``, ``HOSTNAME`` (without its port) and ``NAME``, so that the hint can be
        pasted; empty for an image of no registry.
    plain_http
        True if the registry was asked without TLS.
    """
    name = Path(program).name
    lines = [line for line in output if not _PROGRESS_BAR.match(line)]
    rule = next((rule for rule in _RULES if any(rule.pattern.search(line) for line in lines)), None)
    if rule is None:
        why = f"{name} was ended by signal {-code}" if code < 0 else f"{name} failed with exit code {code}"
        quoted = _causes(lines)
        hint = ""
    else:
        why, hint = rule.why, rule.hint
        quoted = [next(line for line in reversed(lines) if rule.pattern.search(line))]
    if names == {}:  # an image of no registry has no list of tags
        hint = _LISTING.sub("", hint)
    if plain_http or any("http://" in line for line in lines):
        hint = hint.replace("https://REGISTRY", "http://REGISTRY")
        hint = hint.replace("list-tags docker", "list-tags --tls-verify=false docker")
    words = [f"{name}: {end_of(one_line(without_secrets(_strip_log(line))))}" for line in quoted]
    return ToolError(doing, why, words, fill_names(hint, names or {}))


def fill_names(hint: str, names: Mapping[str, str]) -> str:
    """Return a hint with the names of an image filled in, so that it can be pasted."""
    for word, value in names.items():
        hint = hint.replace(word, one_line(value))
    return hint


def _causes(lines: Sequence[str]) -> list[str]:
    """Return the lines that say why, and the last one; if none does, the last lines."""
    candidates = [line for line in dict.fromkeys(lines) if not _STATUS.search(line)] or list(lines)
    causes = [line for line in candidates if _CAUSE.match(line)][-_QUOTED_LINES + 1 :]
    if not causes:
        return candidates[-_QUOTED_LINES:]
    return list(dict.fromkeys([*causes, candidates[-1]]))


def _strip_log(line: str) -> str:
    match = _LOG.fullmatch(line)
    return match[1].replace('\\"', '"') if match else _LEVEL.sub("", line, count=1)
