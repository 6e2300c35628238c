"""The specification of a data preparation: the node `data_preparation` of a launch's YAML, checked.

All keys have defaults but `inputs`, `output_prefix` and `tokenizer_dir`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError, suggest

ROOT = "data_preparation"
FORMATS = ("txt", "jsonl", "parquet", "wikipedia", "tar")
COMPRESSIONS = ("gz", "zst", "bz2", "xz")
# The 256 bytes and the end-of-text token.
SMALLEST_VOCABULARY = 257
MAX_DOCUMENT_BYTES = 1 << 32
MAX_EXPANSION = 100
_SHA256 = re.compile("[0-9a-f]{64}")
# Keys of the launcher alone.
_OF_THE_LAUNCHER = ("run", "phase")


@dataclass(frozen=True)
class Input:
    """Entry of `inputs`.

    Attributes
    ----------
    location
        Path, glob, directory, or ``https://`` or ``s3://`` URL.
    sha256
        Expected digest of a single file.
    format, text_key
        In place of the specification's; None takes those.
    name
        Name for the manifest, in place of the location.
    """

    location: str
    sha256: str | None = None
    format: str | None = None
    text_key: str | None = None
    name: str | None = None

    @property
    def is_remote(self) -> bool:
        return "://" in self.location


@dataclass(frozen=True)
class Filter:
    """Quality filter of datatrove by its name here, and its options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class MinHash:
    """Near-duplicate detection: words per shingle, buckets, and hashes in each.

    `language` is the code of a language whose words datatrove's tokenizer shall find; None takes what stands
    between spaces.
    """

    ngram: int = 5
    buckets: int = 14
    hashes_per_bucket: int = 8
    language: str | None = None


@dataclass(frozen=True)
class TokenizerSource:
    """Origin of an existing tokenizer, if it is not in `tokenizer_dir` already.

    Attributes
    ----------
    vocab_url, merges_url
        GPT-2's two files.
    vocab_sha256, merges_sha256
        Their digests.
    file
        Local ``tokenizer.json`` of Hugging Face, or SentencePiece model.
    url, sha256
        The same from a URL, and its digest.
    end_of_document
        Token that ends a document; None takes ``<|endoftext|>``, ``</s>`` or ``<|end_of_text|>``.
    """

    vocab_url: str | None = None
    vocab_sha256: str | None = None
    merges_url: str | None = None
    merges_sha256: str | None = None
    file: Path | None = None
    url: str | None = None
    sha256: str | None = None
    end_of_document: str | None = None


@dataclass(frozen=True)
class Preparation:
    """Everything that a data preparation is told; `docs/data.md` explains each key."""

    inputs: tuple[Input, ...]
    output_prefix: Path
    tokenizer_dir: Path
    work_dir: Path
    pattern: str = "*"
    format: str = "auto"
    text_key: str = "text"
    filters: tuple[Filter, ...] = ()
    exact: bool = False
    minhash: MinHash | None = None
    vocab_size: int | None = None
    tokenizer: TokenizerSource = TokenizerSource()
    append_eod: bool = True
    splits: tuple[tuple[str, float], ...] = ()
    shard_bytes: int = 1 << 26
    tasks: int = 1
    workers: int = 2
    on_error: str = "raise"
    max_errors: float = 0.001
    max_files: int | None = None
    max_bytes: int | None = None
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    max_expansion: int = MAX_EXPANSION
    download_timeout: int = 60
    seed: int = 1234
    replace: bool = False

    @property
    def units_dir(self) -> Path:
        """Return the directory of finished shards."""
        return self.work_dir / "units"

    @property
    def downloads_dir(self) -> Path:
        """Return the directory of downloaded sources."""
        return self.work_dir / "downloads"

    @property
    def needs_hashes(self) -> bool:
        """Return True if the merge decides by documents' hashes."""
        return self.exact or bool(self.splits)

    def allows(self, bad: int, documents: int) -> bool:
        """Return True if `max_errors` permits `bad` records besides so many documents."""
        if self.max_errors >= 1:
            return bad <= self.max_errors
        return bad <= self.max_errors * (bad + documents)

    def prefix_of(self, split: str | None) -> Path:
        """Return the output prefix of a split; None is the only output."""
        return self.output_prefix if split is None else Path(f"{self.output_prefix}_{split}")


def load(directory: Path, name: str) -> Preparation:
    """Read ``directory/name`` (``.yaml`` may be left out).

    Raises
    ------
    UserError
        If the file is missing or malformed, or a value is not valid.
    """
    import yaml

    path = directory / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    try:
        config = yaml.safe_load(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"configuration {path} is not valid YAML: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get(ROOT), dict):
        raise UserError(f"configuration {path}: expected a mapping under the root key '{ROOT}'")
    return read(config[ROOT])


def read(config: Mapping[str, Any]) -> Preparation:
    """Check the node `data_preparation`.

    Raises
    ------
    UserError
        Naming the key, its value and what is valid.
    """
    node = _Node(ROOT, {key: value for key, value in config.items() if key not in _OF_THE_LAUNCHER})
    output_prefix = node.path("output_prefix")
    exact, minhash = _deduplication(node)
    preparation = Preparation(
        inputs=_inputs(node),
        output_prefix=output_prefix,
        tokenizer_dir=node.path("tokenizer_dir"),
        work_dir=node.path("work_dir", Path(f"{output_prefix}.work")),
        pattern=node.text("pattern", "*"),
        format=node.choice("format", ("auto", *FORMATS), "auto"),
        text_key=node.text("text_key", "text"),
        filters=_filters(node),
        exact=exact,
        minhash=minhash,
        vocab_size=node.whole("vocab_size", None, least=SMALLEST_VOCABULARY),
        tokenizer=_tokenizer(node),
        append_eod=node.flag("append_eod", True),
        splits=_splits(node),
        shard_bytes=node.whole("shard_bytes", 1 << 26, least=1 << 10),
        tasks=node.whole("tasks", 1, least=1),
        workers=node.whole("workers", 2, least=1),
        on_error=node.choice("on_error", ("raise", "skip"), "raise"),
        max_errors=node.number("max_errors", 0.001),
        max_files=node.whole("max_files", None, least=1),
        max_bytes=node.whole("max_bytes", None, least=1),
        max_document_bytes=node.whole("max_document_bytes", MAX_DOCUMENT_BYTES, least=1),
        max_expansion=node.whole("max_expansion", MAX_EXPANSION, least=1),
        download_timeout=node.whole("download_timeout", 60, least=1),
        seed=node.whole("seed", 1234, least=0),
        replace=node.flag("replace", False),
    )
    node.end()
    return preparation


class _Node:
    """Mapping of the configuration whose keys are taken one by one."""

    def __init__(self, name: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise UserError(f"{name}={values!r}: expected a mapping")
        self._name = name
        self._left = {str(key): value for key, value in values.items()}
        self._valid: list[str] = []

    def end(self) -> None:
        """Raise UserError if a key was not taken: there is none of that name."""
        if self._left:
            key = min(self._left)
            valid = ", ".join(sorted(self._valid))
            raise UserError(f"{self._name}.{key}: unknown key; valid are {valid}{suggest(key, self._valid)}")

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value as it is; a null is the default."""
        self._valid.append(key)
        value = self._left.pop(key, None)
        return default if value is None else value

    def wrong(self, key: str, value: object, expected: str) -> UserError:
        return UserError(f"{self._name}.{key}={value!r}: expected {expected}")

    def optional_text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.wrong(key, value, "a text")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.optional_text(key)
        if value is None and default is None:
            raise UserError(f"{self._name}.{key}: missing")
        return value or default or ""

    def path(self, key: str, default: Path | None = None) -> Path:
        return Path(self.text(key, None if default is None else str(default))).absolute()

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def choice(self, key: str, valid: Sequence[str], default: str) -> str:
        value = self.take(key, default)
        if value not in valid:
            raise self.wrong(key, value, f"one of {', '.join(valid)}{suggest(str(value), valid)}")
        return str(value)

    def whole(self, key: str, default: int | None, least: int) -> Any:
        value = self.take(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise self.wrong(key, value, f"a whole number of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.take(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value < 0 or (value > 1 and value != int(value)):
            raise self.wrong(key, value, "a fraction of the documents below 1, or a whole number of them")
        return float(value)

    def digest(self, key: str) -> str | None:
        value = self.optional_text(key)
        if value is not None and not _SHA256.fullmatch(value.lower()):
            raise self.wrong(key, value, "a SHA-256 in 64 hexadecimal digits")
        return value and value.lower()


def _inputs(node: _Node) -> tuple[Input, ...]:
    entries = node.take("inputs", [])
    if isinstance(entries, str):
        entries = [entries]
    if not isinstance(entries, list) or not entries:
        raise node.wrong(
            "inputs", entries, "a list of paths, globs or URLs, or of mappings with `url` or `path`"
        )
    return tuple(_input(number, entry) for number, entry in enumerate(entries))


def _input(number: int, entry: object) -> Input:
    if isinstance(entry, str) and entry:
        return Input(entry)
    node = _Node(f"{ROOT}.inputs[{number}]", entry)
    url, path = node.optional_text("url"), node.optional_text("path")
    location = url or path
    if location is None or (url and path):
        raise UserError(f"{ROOT}.inputs[{number}]: expected either `url` or `path`")
    kind = node.choice("format", ("auto", *FORMATS), "auto")
    result = Input(
        location,
        node.digest("sha256"),
        None if kind == "auto" else kind,
        node.optional_text("text_key"),
        node.optional_text("name"),
    )
    node.end()
    return result


def _filters(node: _Node) -> tuple[Filter, ...]:
    entries = node.take("filters", [])
    if not isinstance(entries, list):
        raise node.wrong("filters", entries, "a list of names, or of {name: {option: value}}")
    filters = []
    for entry in entries:
        if isinstance(entry, str):
            filters.append(Filter(entry, {}))
        elif isinstance(entry, Mapping) and len(entry) == 1:
            name, options = next(iter(entry.items()))
            if not isinstance(options, Mapping | None):
                raise node.wrong("filters", entry, "{name: {option: value}}")
            filters.append(Filter(str(name), dict(options or {})))
        else:
            raise node.wrong("filters", entry, "a name, or {name: {option: value}}")
    return tuple(filters)


def _deduplication(node: _Node) -> tuple[bool, MinHash | None]:
    inner = _Node(f"{ROOT}.deduplicate", node.take("deduplicate", {}))
    exact, minhash = inner.flag("exact", False), inner.take("minhash")
    inner.end()
    if minhash is None or minhash is False:
        return exact, None
    options = _Node(f"{ROOT}.deduplicate.minhash", {} if minhash is True else minhash)
    result = MinHash(
        options.whole("ngram", 5, least=1),
        options.whole("buckets", 14, least=1),
        options.whole("hashes_per_bucket", 8, least=1),
        options.optional_text("language"),
    )
    options.end()
    return exact, result


def _tokenizer(node: _Node) -> TokenizerSource:
    inner = _Node(f"{ROOT}.tokenizer", node.take("tokenizer", {}))
    file = inner.optional_text("file")
    source = TokenizerSource(
        vocab_url=inner.optional_text("vocab_url"),
        vocab_sha256=inner.digest("vocab_sha256"),
        merges_url=inner.optional_text("merges_url"),
        merges_sha256=inner.digest("merges_sha256"),
        file=None if file is None else Path(file).absolute(),
        url=inner.optional_text("url"),
        sha256=inner.digest("sha256"),
        end_of_document=inner.optional_text("end_of_document"),
    )
    inner.end()
    if (source.vocab_url is None) != (source.merges_url is None):
        raise UserError(f"{ROOT}.tokenizer: vocab_url and merges_url are needed together")
    if sum(value is not None for value in (source.vocab_url, source.file, source.url)) > 1:
        raise UserError(f"{ROOT}.tokenizer: expected one of vocab_url with merges_url, file, url")
    return source


def _splits(node: _Node) -> tuple[tuple[str, float], ...]:
    shares = node.take("splits", {})
    if not isinstance(shares, Mapping):
        raise node.wrong("splits", shares, "a mapping of names to fractions")
    for name, share in shares.items():
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or share < 0 or not re.fullmatch("[A-Za-z0-9_-]+", str(name)):
            raise node.wrong(
                f"splits.{name}", share, "a name of letters and digits, and a fraction from 0 to 1"
            )
    if shares and abs(sum(shares.values()) - 1) > 1e-9:
        raise node.wrong("splits", dict(shares), f"fractions that sum to 1, not {sum(shares.values()):g}")
    return tuple((str(name), float(share)) for name, share in shares.items())
