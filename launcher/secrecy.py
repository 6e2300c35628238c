"""What is a secret, by its name, and text without the secrets in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MASK = "***"

# HF_TOKEN, apiKey and PGPASSWORD in their words.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# Of whatever: nothing else ends in these.
_PLAIN_SECRET = re.compile(
    r"(PASS(WORD|WD|PHRASE|CODE)|CREDENTIAL|(API|ACCESS|AUTH|PRIVATE|SECRET)KEY)S?$|^SECRETS?$"
)

# Secrets in a variable's name, where a model's key of the same name, `eos_token` or `label_key`, is none.
_IN_VARIABLES = ("AUTH", "BEARER", "CREDS", "JWT", "KEY", "KEYS", "PASS", "PAT", "PWD", "TOKEN", "TOKENS")

# What makes one of those a secret in any name: `hf_token`, `api_key`.
_OWNER_NAMES = """
ACCESS API AUTH AWS AZURE BEARER CLIENT CLEARML COMET DB DEPLOY ENCRYPTION GCP GIT GITHUB GITLAB GOOGLE HF HUB
HUGGINGFACE LOGIN MLFLOW MYSQL NEPTUNE NGC NGCCLI OPENAI PG PRIVATE REFRESH SECRET SESSION SIGNING SLACK SSH
USER WANDB
"""
_OWNERS = frozenset(_OWNER_NAMES.split())

# EOS_TOKEN, MAX_TOKENS, PUBLIC_KEY and HF_HUB_DISABLE_IMPLICIT_TOKEN hide nothing.
_HARMLESS_NAMES = """
BOS CLS DISABLE ENABLE END EOD EOS IGNORE MASK MAX MIN N NO NUM OF PAD PER PUBLIC SEP SKIP SPECIAL START UNK
USE
"""
_HARMLESS_WORDS = frozenset(_HARMLESS_NAMES.split())
_HARMLESS = ("PWD", "OLDPWD", "GOOGLE_APPLICATION_CREDENTIALS")  # the last is a file's path

# Of networks and their launchers, which have many variables and no secrets.
_NETWORKS = ("NCCL_", "FI_", "UCX_", "PMIX_", "OMPI_", "I_MPI_", "NVSHMEM_")

# Mappings of variables, and of variables to the files that hold them.
_VARIABLES = ("env_vars", "env_files")
_FILES = re.compile(r"(.*\.)?env_files(\..*)?|wandb_api_key_file", re.DOTALL)
_PATH = re.compile(r"\s*['\"]?(/|~|\$\{)")

# NAME=VALUE and NAME: VALUE within a text. The value is looked at, not taken: it may hold further ones.
_ASSIGNED = re.compile(
    r"""(?<![\w/-])(?P<name>[A-Za-z_]\w*)['"]?\s*(?P<sign>[:=])\s*"""
    r"""(?=(?P<value>'(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?|[\[{].*|[^,}\]'"]*))""",
    re.ASCII | re.DOTALL,
)
# Of a proxy, a repository, a database: scheme://user:password@host.
_IN_URL = re.compile(r"(?<=://)[^\s/:@]*:(?P<value>[^\s/@]+)(?=@)")
_NOTHING = ("", "null", "''", '""')

# A shorter value would be found in the middle of other words.
_SHORTEST = 4


def is_secret_name(name: str) -> bool:
    """Whether a variable or a key of this name holds a secret.

    The name's last word decides. In a variable's, all of capitals, a KEY or a TOKEN is one; in a key of the
    tree it needs a word in front that says so, such as `api` or `hf`: models have tokens too.
    """
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or name.upper() in _HARMLESS or name.startswith(_NETWORKS):
        return False
    *before, last = words
    if not _HARMLESS_WORDS.isdisjoint(before):
        return False
    if _PLAIN_SECRET.search(last):
        return True
    if last not in _IN_VARIABLES:
        return False
    return name.isupper() or (before[-1] in _OWNERS if before else last == "TOKEN")


def is_secret_key(key: str) -> bool:
    """The same of a key with its parents; a variable's name may be in small letters."""
    *parents, name = key.split(".")
    variable = bool(parents) and parents[-1] in _VARIABLES
    return is_secret_name(name.upper() if variable else name)


def exported_secrets(text: str) -> list[str]:
    """The names of the secrets that a text gives values to, as in ``ALL,NAME=VALUE``."""
    return [found["name"] for found in _assigned(text) if found["sign"] == "="]


def hidden(key: str, value: Any) -> Any:
    """A value of the configuration as it may be shown."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return {name: hidden(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list):
        return [hidden(key, item) for item in value]
    if _FILES.fullmatch(key):
        return value if _PATH.match(str(value)) else MASK
    if is_secret_key(key):
        return MASK
    return without_secrets(value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """A text with the values of the secrets in it masked."""
    return _masked(text, _spans_within(text))


def redacted(override: str) -> str:
    """An override with the values of the secrets in it masked."""
    return _masked(override, _spans(override))


def secrets_of(override: str) -> list[str]:
    """The values that `redacted` masks, where they are long enough to be known again."""
    values = (override[start:end].strip(" \t'\"") for start, end in _spans(override))
    return [value for value in values if len(value) >= _SHORTEST]


def _spans(override: str) -> list[tuple[int, int]]:
    """Where an override has the values of secrets."""
    key, equals, value = override.partition("=")
    node, start = key.lstrip("+~").strip(), len(key) + 1
    if not equals or value.strip().lower() in _NOTHING:
        return []
    files, mapping = bool(_FILES.fullmatch(node)), value.lstrip().startswith("{")
    if not mapping and (files or is_secret_key(node)):
        return [] if files and _PATH.match(value) else [(start, len(override))]
    inner = _spans_within(value, files=files, variables=node.endswith(_VARIABLES))
    return [(start + begin, start + end) for begin, end in inner]


def _spans_within(text: str, *, files: bool = False, variables: bool = False) -> list[tuple[int, int]]:
    """Where a text has the values of secrets: what is given to one's name, and passwords in addresses."""
    given = [found.span("value") for found in _assigned(text, files=files, variables=variables)]
    passwords = (found.span("value") for found in _IN_URL.finditer(text))
    alone = [span for span in passwords if not any(low <= span[0] < high for low, high in given)]
    return sorted([*given, *alone])


def _assigned(text: str, *, files: bool = False, variables: bool = False) -> Iterator[re.Match[str]]:
    """The places where a secret is given a value."""
    end = 0
    for found in _ASSIGNED.finditer(text):
        name = found["name"].upper() if variables else found["name"]
        secret = not _PATH.match(found["value"]) if files else is_secret_name(name)
        if secret and found.start() >= end and found["value"].strip().lower() not in _NOTHING:
            end = found.end("value")
            yield found


def _masked(text: str, spans: list[tuple[int, int]]) -> str:
    for start, end in reversed(spans):
        text = f"{text[:start]}{MASK}{text[end:]}"
    return text
