"""Secrets, recognized by their name, form or origin, and texts with secrets masked.

A secret is known by the name that it is given to (`is_secret_name`), by its form, such as that of a token of
Hugging Face or a password in an address, or because a variable of this process with a secret's name has the
same value. Everything that is written or printed goes by the functions of this module.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from launcher.secret_forms import Secret, formed

MASK = "***"

# HF_TOKEN, apiKey and PGPASSWORD in their words.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# Secrets in any name: nothing else ends in these.
_PLAIN_SECRET = re.compile(
    r"(PASS(WORD|WD|PHRASE|CODE)|CREDENTIAL|(API|ACCESS|AUTH|PRIVATE|SECRET)KEY)S?$|^SECRETS?$"
)
# AWS_ACCESS_KEY_ID: its last word says nothing.
_KEY_ID = re.compile(r"ACCESS_?KEY_?ID$", re.IGNORECASE)

# Secrets in a variable's name, but not in a model's key such as `eos_token` or `label_key`.
_IN_VARIABLES = ("AUTH", "BEARER", "CREDS", "JWT", "KEY", "KEYS", "PASS", "PAT", "PWD", "TOKEN", "TOKENS")

# With one of these words in front, those are secrets in any name: `hf_token`, `api_key`.
_OWNER_NAMES = """
ACCESS ACCOUNT API AUTH AWS AZURE BEARER CLIENT CLEARML COMET DB DEPLOY ENCRYPTION GCP GIT GITHUB GITLAB
GOOGLE HF HUB HUGGINGFACE LOGIN MLFLOW MYSQL NEPTUNE NGC NGCCLI OAUTH OPENAI PG PRIVATE REFRESH SECRET SESSION
SHARED SIGNING SLACK SSH USER WANDB
"""
_OWNERS = frozenset(_OWNER_NAMES.split())

# EOS_TOKEN, MAX_TOKENS, PUBLIC_KEY and HF_HUB_DISABLE_IMPLICIT_TOKEN hide nothing.
_HARMLESS_NAMES = """
BOS CLS DISABLE ENABLE END EOD EOS IGNORE MASK MAX MIN N NO NUM OF PAD PER PUBLIC SEP SKIP SPECIAL START UNK
USE
"""
_HARMLESS_WORDS = frozenset(_HARMLESS_NAMES.split())
_HARMLESS = ("PWD", "OLDPWD", "GOOGLE_APPLICATION_CREDENTIALS")  # the last is a file's path

# Networks and their launchers have many variables and no secrets.
_NETWORKS = ("NCCL_", "FI_", "UCX_", "PMIX_", "OMPI_", "I_MPI_", "NVSHMEM_")

# Mappings of variables, and of variables to the files that hold them.
_VARIABLES = ("env_vars", "env_expand", "env_files")
_FILES = re.compile(r"(.*\.)?env_files(\..*)?|wandb_api_key_file", re.DOTALL)
_PATH = re.compile(r"\s*['\"]?(/|~|\$\{)")

# Keys of an image's name, in which a login is the user's alone: docker://USER@REGISTRY#IMAGE.
_IMAGES = ("container", "image", "image.base")
_IMAGE_LOGIN = re.compile(r"(?:['\"]?[\w-]+://)?[^:]*:(?!//)(.+)@(?!sha\d+:)")

# NAME=VALUE and NAME: VALUE within a text, also of Makefiles (`?=`), programs (`NAME: str =`, `["NAME"] =`)
# and options (`--NAME=`). Values are looked at where the name is a secret's: they may be long.
_TYPE = r"(?:\s*:\s*(?:str|bytes|string|String|(?:Final|Optional|ClassVar)\[str\])(?: \| None)?(?=\s*=))?"
_QUOTED = r"""'(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?"""
_ASSIGNED = re.compile(
    r"""(?<![\w/-])-{0,2}(?P<name>[A-Za-z_][\w-]*)['"]?\]?"""
    + _TYPE
    + r"""[^\S\n]*(?:[?+:!]{0,2}={1,2}>?|:)[^\S\n]*""",
    re.ASCII,
)
_ASSIGNED_VALUE = re.compile(rf"""[bfru]{{0,2}}(?:{_QUOTED})|[\[{{].*|[^,}}\]'"\n]*""", re.ASCII | re.DOTALL)
_NOTHING = ("", "null", "none", "~", "''", '""')
# The name of a variable, a command or a file is no secret: ${oc.env:HF_TOKEN}, "$HF_TOKEN", $(cat FILE).
_REFERENCE = re.compile(
    r"""\s*\\?['"]?(\$\{[\w.:]+\}|\$[A-Z_][A-Z0-9_]*|\$\(.*|<[^<>]*>|~?(?:/[\w.-]+){2,}/?|\*{3,})['"]?([\s;&|)].*)?""",
    re.DOTALL,
)
# The words of a shell, of a Dockerfile and of a program: export HF_TOKEN abc, setenv("HF_TOKEN", "abc").
_SET = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"""\b(?:setenv|ENV|ARG|set\s+-\w+|conf\w*\s+set)\s+(?P<name>[\w.-]+)\s+(?P<value>{_QUOTED}|\S+)""",
        rf"""(?<![\w-])--?(?P<name>[A-Za-z][\w.-]*)(?:\s|\\\n)+(?P<value>(?!-){_QUOTED}|(?!-)\S+)""",
        rf"""['"](?:--?(?=[A-Za-z])|(?=[A-Z][A-Z0-9_]+['"]))(?P<name>[\w.-]+)['"]\s*,\s*(?=(?P<value>{_QUOTED}))""",
    )
)

_EXPORTED = re.compile(r"(?<![\w.-])(?P<name>[A-Za-z_]\w*)=(?P<value>[^\s,'\"\]}]+)", re.ASCII)

# A shorter value would be found in the middle of other words.
_SHORTEST = 4
# A value of a variable is looked for everywhere: words of few letters, and numbers, would be found by chance.
_SHORTEST_KNOWN, _SHORTEST_WORD = 8, 12
_WORD_ALONE = re.compile(r"[a-z]+|[A-Z]+|[A-Z][a-z]+|[0-9.]+")
# Variables with values that are on record anyway, also where another variable has the same value.
_PUBLIC = ("HOME", "PWD", "USER", "LOGNAME", "HOSTNAME", "PATH", "VIRTUAL_ENV")


# Variables with a secret's name, and how to find the value of each.
Known = tuple[tuple[str, re.Pattern[str]], ...]


def is_secret_name(name: str) -> bool:
    """Return whether a variable or a key of this name holds a secret.

    The name's last word decides. In a variable's, all of capitals, a KEY or a TOKEN is one; in a key of the
    tree it needs a word in front that says so, such as `api` or `hf`: models have tokens too.
    """
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or name.upper() in _HARMLESS or name.startswith(_NETWORKS):
        return False
    *before, last = words
    if not _HARMLESS_WORDS.isdisjoint(before):
        return False
    if _PLAIN_SECRET.search(last) or _KEY_ID.search(name):
        return True
    if last not in _IN_VARIABLES:
        return False
    return name.isupper() or (before[-1] in _OWNERS if before else last in ("TOKEN", "BEARER", "JWT"))


def is_secret_key(key: str) -> bool:
    """Return whether a key with its parents holds a secret; a variable's name may be in lower case."""
    *parents, name = key.split(".")
    variable = bool(parents) and parents[-1] in _VARIABLES
    return is_secret_name(name.upper() if variable else name)


def is_file_key(key: str) -> bool:
    """Return whether a key names the file of a secret."""
    return bool(_FILES.fullmatch(key))


def _looks_random(value: str) -> bool:
    """Return whether a value is one word in which small letters, capitals and digits are mixed."""
    return bool(
        re.fullmatch(r"(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[\w+=~-]{8,}", value, re.ASCII)
        and not re.fullmatch(r"[A-Z]?[a-z]+[0-9]+|([A-Z][a-z]+)+[0-9]{1,4}", value)
    )


def secrets_in(
    text: str, key: str = "", *, literals: bool = False, known: Known | None = None
) -> list[Secret]:
    """Return the secrets of a text, the value of a `key` or any other, in their order.

    `literals` is for a program's text, in which names are given quoted values, and all else may be anything.
    `known` is the result of `collect_known_values`, for callers with many texts.
    """
    return list(
        _secrets_in(
            text, literals, is_exported(text, key), collect_known_values() if known is None else known
        )
    )


def is_exported(text: str, key: str = "") -> bool:
    """Return whether a text, or the value of a key, has a list that sbatch or srun would export."""
    return "--export" in text or key.endswith("sbatch.export")


# Most points of a sweep have the same values.
@functools.lru_cache(maxsize=4096)
def _secrets_in(text: str, literals: bool, exported: bool, known: Known) -> Sequence[Secret]:
    listed = _find_exported(text) if exported else ()
    return _merge([*listed, *_find_given(text, literals=literals), *_find_formed(text, known)])


def hidden(key: str, value: Any) -> Any:
    """Return a value of the configuration as it may be shown."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return {name: hidden(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list):
        return mask_items([hidden(key, item) for item in value])
    if is_file_key(key):
        return printable(value) if _PATH.match(str(value)) else MASK
    if is_secret_key(key):
        return MASK
    return without_secrets(value) if isinstance(value, str) else value


def without_secrets(text: str, *, literals: bool = False, known: Known | None = None) -> str:
    """Return a text with the secrets in it masked; see `secrets_in`."""
    return _mask(text, secrets_in(text, literals=literals, known=known))


def printable(text: str) -> str:
    """Return a message with the secrets in it masked: those known by their form or as a variable's value.

    Names are left alone: a message explains which file a variable is read from.
    """
    return _mask(text, _merge(_find_formed(text)))


def redacted(override: str) -> str:
    return _mask(override, _find_in_override(override))


def recorded(words: Iterable[str]) -> list[str]:
    """Return the words of a command line with the secrets in them masked, for a record."""
    return mask_items([redacted(word) if "=" in word else without_secrets(word) for word in words])


def mask_items(items: Sequence[Any]) -> list[Any]:
    """Return the items of a list with those masked that hold a secret; see `secret_items`."""
    secrets = secret_items(items)
    return [MASK if number in secrets else item for number, item in enumerate(items)]


def secret_items(items: Sequence[Any], known: Known | None = None) -> dict[int, Secret]:
    """Return the secrets of a list's items as arguments of a command, by the numbers of these items.

    In ``[prog, --password, x]`` and ``[docker, login, -p, x]`` an item gives a value to those before it.
    """
    words = [_format_word(item) for item in items]
    text, end = " ".join(words), -1
    secrets: dict[int, Secret] = {}
    exported = _find_exported(text) if is_exported(text) else ()
    places = _merge([*exported, *_find_options(text), *_find_formed(text, known)])
    for number, word in enumerate(words):
        begin, end = end + 1, end + 1 + len(word)
        for place in places:
            if place.start < end and begin < place.end:
                secrets[number] = place
    return secrets


def secrets_of(override: str) -> list[str]:
    """Return the values that `redacted` masks and those that the override refers to, but for short ones."""
    values = [override[secret.start : secret.end].strip(" \t'\"") for secret in _find_in_override(override)]
    values += [os.environ.get(name, "") for name in referred_variables(override)]
    return [value for value in values if len(value) >= _SHORTEST]


def referred_variables(text: str) -> list[str]:
    """Return the variables with a secret's name that a text refers to: ``${oc.env:HF_TOKEN}``."""
    return [
        name for name in re.findall(r"oc\.env:\s*['\"]?(\w+)", text, re.ASCII) if is_secret_name(name.upper())
    ]


def _find_in_override(override: str) -> list[Secret]:
    key, equals, value = override.partition("=")
    node, start = key.lstrip("+~").strip(), len(key) + 1
    if not equals:
        return secrets_in(override)
    if value.strip().lower() in _NOTHING:
        return _merge(_find_formed(override))
    files, mapping = is_file_key(node), value.lstrip().startswith("{")
    if not mapping and (files or is_secret_key(node)) and not _REFERENCE.fullmatch(value):
        is_path = files and _PATH.match(value)
        return _merge(_find_formed(override)) if is_path else [Secret(start, len(override), "a secret", None)]
    assigned = _find_given(value, files=files, variables=node.endswith(_VARIABLES))
    inner = [Secret(start + item.start, start + item.end, item.what, item.variable) for item in assigned]
    listed = _find_exported(override) if is_exported(value, node) else ()
    if "[" in value:
        matches = list(_ITEM.finditer(value, value.index("[")))
        for number, item in secret_items([match[0].strip(" \t'\"") for match in matches]).items():
            span = matches[number].span()
            inner.append(Secret(start + span[0], start + span[1], item.what, item.variable))
    if node.endswith(_IMAGES) and (login := _IMAGE_LOGIN.match(value)):
        inner.append(Secret(start + login.start(1), start + login.end(1), "a password in an image's name"))
    return _merge([*listed, *inner, *_find_formed(override)])


_ITEM = re.compile(rf"{_QUOTED}|[^\s\[\],'\"](?:\$\{{[^}}]*\}}|[^\[\],])*")


def _format_word(item: Any) -> str:
    """Return an item as a word of a command line; a list or one of several words is looked at by itself."""
    text = str(item) if isinstance(item, (str, int, float)) else "[ ]"
    is_text = re.search(r"\s", text) and not _REFERENCE.fullmatch(text)
    return "_" * len(text) if is_text else shlex.quote(text)


def _find_given(
    text: str, *, files: bool = False, variables: bool = False, literals: bool = False
) -> Iterator[Secret]:
    """Find the places where a secret's name is given a value."""
    end = 0
    for match in _ASSIGNED.finditer(text):
        name = match["name"].upper() if variables else match["name"]
        if match.start() < end or not (files or is_secret_name(name)):
            continue
        stated = _ASSIGNED_VALUE.match(text, match.end())
        assert stated is not None  # there may be nothing
        value = stated[0]
        if value.strip().lower() in _NOTHING or _REFERENCE.fullmatch(value) or (files and _PATH.match(value)):
            continue
        if not literals or _LITERAL.match(value):
            end = stated.end()
            yield Secret(*stated.span(), f"a value for {name}", name)
    yield from _find_options(text, literals=literals)
    for match in _DEFAULT.finditer(text):
        if is_secret_name(match["name"].upper()) and match["value"].strip().lower() not in _NOTHING:
            yield Secret(*match.span("value"), f"a value for {match['name']}", match["name"])


def _find_options(text: str, *, literals: bool = False) -> Iterator[Secret]:
    """Find the words that follow a secret's name: ``--token x``, ``setenv HF_TOKEN x``."""
    for match in itertools.chain.from_iterable(pattern.finditer(text) for pattern in _SET):
        name, value = match["name"], match["value"]
        secret = is_secret_name(name) and not _REFERENCE.fullmatch(value)
        if secret and (not literals or _LITERAL.match(value)):
            yield Secret(*match.span("value"), f"a value for {name}", name)


_LITERAL = re.compile(r"""[bfru]{0,2}['"][^'"]{4,}""")
_DEFAULT = re.compile(r"oc\.env:\s*(?P<name>\w+)\s*,(?P<value>[^}]*)", re.ASCII)


def _find_exported(text: str) -> Iterator[Secret]:
    """Find secrets that sbatch or srun would export: the list is on record, and in the list of processes.

    A harmless variable has a better place, so more values count as secrets than elsewhere.
    """
    for match in _EXPORTED.finditer(text):
        if is_secret_name(match["name"]) or _looks_random(match["value"]):
            yield Secret(*match.span("value"), f"a value for {match['name']}", match["name"])


def _find_formed(text: str, known: Known | None = None) -> Iterator[Secret]:
    """Find secrets by their forms, and values of this process's secret variables."""
    yield from formed(text)
    for name, pattern in collect_known_values() if known is None else known:
        for match in pattern.finditer(text):
            yield Secret(*match.span(), f"the value of the variable {name}", name)


def collect_known_values() -> Known:
    """Return the secrets among the variables of this process, as they are now."""
    return _collect_known(tuple(os.environ.items()))


@functools.lru_cache(maxsize=8)
def _collect_known(environment: Sequence[tuple[str, str]]) -> Known:
    """Return the variables with secret values, each with a pattern of its value, the longest first."""
    public = [value for name, value in environment if name in _PUBLIC]
    names = {
        part: name
        for name, value in sorted(environment)
        if is_secret_name(name.upper())
        for part in map(str.strip, value.splitlines())
        if _is_telling(part) and not any(part in text for text in public)
    }
    return tuple(
        (names[value], re.compile("|".join(map(re.escape, _spell_variants(value)))))
        for value in sorted(names, key=len, reverse=True)
    )


def _is_telling(value: str) -> bool:
    """Return whether a value is unlikely to occur by chance, and is no path."""
    if value.startswith("-----") or (value.startswith("/") and os.path.lexists(value)):
        return False
    return len(value) >= (_SHORTEST_WORD if _WORD_ALONE.fullmatch(value) else _SHORTEST_KNOWN)


def _spell_variants(value: str) -> list[str]:
    """Return the ways in which a value may be written: as it is, quoted for JSON, a shell, an address."""
    ways = [
        value,
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        value.replace("'", "'\"'\"'"),
        value.replace("'", "''"),
        value.replace("'", "\\'"),
        *(urllib.parse.quote(value, safe=safe, errors="surrogateescape") for safe in ("/", "")),
    ]
    return sorted(set(ways), key=len, reverse=True)


def _merge(secrets: Iterable[Secret]) -> list[Secret]:
    """Return secrets in their order, those that overlap as one."""
    apart: list[Secret] = []
    for item in sorted(secrets, key=lambda secret: (secret.start, -secret.end)):
        if apart and item.start < apart[-1].end:
            last = apart[-1]
            apart[-1] = Secret(last.start, max(last.end, item.end), last.what, last.variable or item.variable)
        elif item.end > item.start:
            apart.append(item)
    return apart


def _mask(text: str, secrets: Sequence[Secret]) -> str:
    for secret in reversed(secrets):
        text = f"{text[: secret.start]}{MASK}{text[secret.end :]}"
    return text
