"""The forms of secrets under any name: tokens, keys, passwords in addresses."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple


class Secret(NamedTuple):
    """A secret within a text: its place, its kind, and its variable, if known."""

    start: int
    end: int
    what: str
    variable: str | None = None


# Neither the mask nor a variable, which replace a secret.
_NONE = r"(?!\*{3}|\$)"
_SCHEME = r"(?i:https?|ftps?|wss?)://"
_QUERY = r"[\w.-]*(?:token|secret|passw(?:or)?d|pwd|api[_-]?key|auth|jwt|sas)|key"
_REGISTRY_LOGIN = (
    r"\b(?:docker|podman|buildah|skopeo|helm|oras|crane|apptainer\s+remote)\s+(?:\w+\s+)?login\b"
)
_HOOKS = r"hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/"
_HTTP_LOGINS = r"(?:bearer|basic|token|digest|negotiate)"
_SIGNED = r"sig|signature|X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)"

# The name of each form; its cues, in small letters (each text with such a secret has one); and its pattern,
# with the secret as the group `value`.
_FORMS = (
    ("a private key", "key-----", r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<value>.*?)(?:-----END|\Z)"),
    ("a token of Hugging Face", "hf_", r"\b(?P<value>hf_(?=[A-Za-z]*[A-Z0-9])[A-Za-z0-9]{16,})"),
    (
        "a token of GitHub",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"\b(?P<value>gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,})",
    ),
    (
        "a token of GitLab",
        "glpat- gldt- glrt- glptt- glcbt- glsoat- glagent- gloas- glft- glimt-",
        r"\b(?P<value>gl(?:pat|dt|rt|ptt|cbt|soat|agent|oas|ft|imt)-[\w-]{16,})",
    ),
    ("a token of Slack", "xox xapp-", r"\b(?P<value>(?:xox[a-z]|xapp)-[\w-]{8,})"),
    ("a key of NVIDIA", "nvapi-", r"\b(?P<value>nvapi-[\w-]{16,})"),
    (
        "a token of a registry",
        "pypi- npm_ dckr_",
        r"\b(?P<value>pypi-[\w-]{32,}|npm_[A-Za-z0-9]{30,}|dckr_[a-z]+_[\w-]{16,})",
    ),
    ("a key of Google", "aiza ya29.", r"\b(?P<value>AIza[\w-]{30,}|ya29\.[\w-]{20,})"),
    (
        "a key of an API",
        "sk- sk_live_ sk_test_ rk_live_ rk_test_",
        r"(?<![\w-])(?P<value>sk-(?=[\w-]*\d)[\w-]{16,}|[sr]k_(?:live|test)_\w{16,})",
    ),
    ("a key of AWS", "akia asia", r"\b(?P<value>(?:AKIA|ASIA)(?=[A-Z]*\d)[A-Z0-9]{12,})\b"),
    ("a token (JWT)", "eyj", r"\b(?P<value>eyJ[\w-]{8,}\.eyJ[\w-]{4,}(?:\.[\w-]*)?)"),
    (
        "a key of Weights & Biases",
        "wandb",
        r"(?i:wandb)[^\n@]{0,60}?(?<![0-9a-f])(?P<value>[0-9a-f]{40})(?![0-9a-f])",
    ),
    (
        "a login of Weights & Biases",
        "wandb",
        # Words that are read in one way alone: else it would take for ever where no key follows.
        r"\bwandb\s+login\s+(?:--host\s+(?!--)\S+\s+|--[\w-]+(?:=\S+)?\s+)*['\"]?"
        rf"{_NONE}(?P<value>[^\s;&|'\"<>-][^\s;&|'\"]{{7,}})",
    ),
    (
        "a password in an address",
        "://",
        rf"(?<=://)[^\s/:@'\"]*:{_NONE}(?P<value>[^\s/'\"]+)(?=@)",
    ),
    (
        "a password in an image's name",  # USER:PASSWORD@REGISTRY#IMAGE
        "@",
        rf"(?<![\w/.@-])[\w.+%-]+(?:@[\w.-]+)?:{_NONE}(?P<value>[^\s/@'\",]+)"
        r"(?=@(?:[\w.-]+(?::\d+)?#|(?:localhost|[\w-]+\.[\w.-]+|(?!sha\d)[\w-]+(?=:))(?::\d+)?/))",
    ),
    (
        "a token in an address",
        "://",
        # A name alone is no token: https://git@host.
        rf"{_SCHEME}(?![a-z][a-z._-]*[:@])(?!\{{){_NONE}(?P<value>[^\s/:@'\"]+)(?=[:@])(?=[^\s/'\"]*@)",
    ),
    (
        "an address for whoever has it",
        "hooks.slack.com/ /api/webhooks/ webhook.office.com/ api.telegram.org/bot",
        rf"(?i:{_HOOKS}|webhook\.office\.com/|api\.telegram\.org/bot){_NONE}(?P<value>[^\s'\",]+)",
    ),
    (
        "a signature in an address",
        "sig= signature= credential= security-token=",
        rf"(?<![\w-])(?i:{_SIGNED})={_NONE}(?P<value>[^\s&#'\",;]{{6,}})",
    ),
    (
        "a token in an address's query",
        "token= secret= password= passwd= pwd= key= auth= jwt= sas=",
        rf"[?&;](?i:{_QUERY})={_NONE}(?P<value>[^\s&#'\",;]+)",
    ),
    (
        "a login of HTTP",
        "authorization",
        rf"(?i:\b(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:{_HTTP_LOGINS}\s+)?)"
        rf"(?!(?i:{_HTTP_LOGINS})\b){_NONE}(?P<value>[^\s'\",]{{4,}})",
    ),
    ("a bearer's token", "bearer", r"(?i:\bbearer\s+)(?P<value>(?=\S*\d)[\w.~+/=-]{8,})"),
    (
        "a registry's password",
        "login",
        rf"{_REGISTRY_LOGIN}[^\n;|&]{{0,400}}?\s-p[ =]?{_NONE}(?P<value>[^\s-]\S*)",
    ),
    ("a password of sshpass", "sshpass", rf"\bsshpass\s+-p\s*{_NONE}(?P<value>\S+)"),
    (
        "a password of curl",
        "curl wget",
        r"\b(?:curl|wget)\b[^\n;|]{0,400}?\s(?:-u|--user)(?:\s+|=)?['\"]?[^\s:'\"]+:"
        rf"{_NONE}(?P<value>[^\s'\"]+)",
    ),
    ("a password of a netrc", "password", rf"\blogin\s+\S+\s+password\s+{_NONE}(?P<value>\S+)"),
)
_CUES = sorted({cue for _, cues, _ in _FORMS for cue in cues.split()})

# Characters that `(?i:...)` takes for a letter of ASCII, besides the letter in both cases.
_FOLDED = (("\u0130", "i"), ("\u0131", "i"), ("\u017f", "s"), ("\u212a", "k"))


def formed(text: str) -> Iterator[Secret]:
    """Yield the secrets of a text that are known by their forms."""
    present = _find_cues(text)  # none in most texts
    for what, cues, pattern in _FORMS if present else ():
        if not present.isdisjoint(cues.split()):
            for match in _compile(pattern).finditer(text):
                yield Secret(*match.span("value"), what)


def _find_cues(text: str) -> set[str]:
    for letter, plain in _FOLDED:
        text = text.replace(letter, plain)
    text = text.lower()
    return {cue for cue in _CUES if cue in text}


@functools.cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
