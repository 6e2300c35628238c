"""The files of a tokenizer."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arithmetic.vocabulary import WAYS_TO_A_VOCABULARY
from launcher.checks.facts import MissingPath
from launcher.checks.gathering.path_resolver import PathResolver, opened, why_unreadable
from launcher.errors import file_mode, nearest_files
from launcher.estimates.values import Values

_NODE = "model.tokenizer"
_WORDPIECES = ("BertWordPieceCase", "BertWordPieceLowerCase")
_MERGES = "it is made together with vocab.json: with merges of another tokenizer the ids are others"
_PIECES = (
    "a SentencePiece model, such as the tokenizer.model of published weights; the text is tokenized with it "
    "by data_preparation.tokenizer.file=PATH"
)
_WORDPIECE = "BERT's vocab.txt has a token in each line"
# What lies in the place of a large file of a repository until it is fetched.
_LFS = b"version https://git-lfs"


def missing_tokenizer(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return the missing files among those that the payload needs.

    ``None`` if it needs none.
    """
    values = _values(resolver)
    if values is None or _does_without(resolver, values):
        return None
    lacks = [_looked_at(resolver, key, given) for key, given in tokenizer_files(resolver)]
    if resolver.plan.job.engine != "nemo":  # which downloads those that are not named
        lacks += [_not_set(key, values) for key in _needed(values) if values.raw(key) is None]
    return tuple(lack for lack in lacks if lack is not None)


def tokenizer_files(resolver: PathResolver) -> Iterator[tuple[str, str]]:
    """Yield keys and paths of the tokenizer's files, or of its directory."""
    values = _values(resolver)
    for key in _needed(values) if values is not None else ():
        given = values.raw(key) if values is not None else None
        if isinstance(given, str) and given and "://" not in given:
            yield key, given


def _values(resolver: PathResolver) -> Values | None:
    config = resolver.plan.job.config
    return Values(config) if config is not None else None


def _does_without(resolver: PathResolver, values: Values) -> bool:
    """Return True for mock data, for which our trainer takes known sizes instead of files."""
    return resolver.plan.job.engine == "megatron" and values.raw("model.data.data_impl") == "mock"


def _needed(values: Values) -> tuple[str, ...]:
    """Return the keys whose files the tokenizer of this library and type reads."""
    library, kind = values.raw(f"{_NODE}.library"), values.raw(f"{_NODE}.type")
    if library == "sentencepiece":
        return (f"{_NODE}.model",)
    if library == "huggingface":
        # A name on the hub is no path.
        return (f"{_NODE}.type",) if _is_absolute(kind) else ()
    if library != "megatron":
        names = ("model", "vocab_file", "merge_file")
        return tuple(f"{_NODE}.{name}" for name in names if values.raw(f"{_NODE}.{name}") is not None)
    if kind in _WORDPIECES:
        return (f"{_NODE}.vocab_file",)
    return (f"{_NODE}.vocab_file", f"{_NODE}.merge_file")


def _is_absolute(given: Any) -> bool:
    return isinstance(given, str) and Path(given).is_absolute()


def _not_set(key: str, values: Values) -> MissingPath:
    if values.raw(f"{_NODE}.type") in _WORDPIECES:
        way_out = _WORDPIECE
    elif key.endswith(".model"):
        way_out = _PIECES
    else:
        way_out = _MERGES if key.endswith(".merge_file") else WAYS_TO_A_VOCABULARY
    return MissingPath(key, "null", "it is not set", True, way_out)


def _looked_at(resolver: PathResolver, key: str, given: str) -> MissingPath | None:
    path = resolver.input(key, given, f"training.{key}={Path(given).absolute()}")
    if not isinstance(path, Path):
        return path
    why = _why_lost(path, key)
    if why is None:
        return None
    fix = nearest_files(path, path.suffix)
    way_out = {"vocab.json": WAYS_TO_A_VOCABULARY, "merges.txt": _MERGES, "tokenizer.model": _PIECES}
    fix = "\n".join(filter(None, (fix, way_out.get(path.name))))
    return resolver.missing(key, given, why, certain=resolver.tells_of(path), fix=fix)


def _why_lost(path: Path, key: str) -> str | None:
    if key.endswith(".type"):
        return _why_no_directory(path)
    try:
        with opened(path) as stream:
            head = stream.read(64)
    except OSError as error:
        return why_unreadable(error)
    if not head:
        return "an empty file"
    if head.startswith(_LFS):
        return "not the file, but a pointer of Git LFS's to it: git lfs pull"
    if path.suffix == ".json" and not head.lstrip().startswith(b"{"):
        return "not a vocabulary: it does not begin with {"
    return None


def _why_no_directory(path: Path) -> str | None:
    try:
        return None if stat.S_ISDIR(file_mode(path)) else "there is no such directory"
    except OSError as error:
        return why_unreadable(error)
