"""The tokenizer that made a data set's tokens, by its manifest, and whether it is the training's.

The launcher asks ``python -m slipway.trainer.data.tokenized``: it reads ``{"data": {"name": "prefix"},
"tokenizer": {...}, "ends_matter": false}`` from stdin, with the fields of a `Tokenizer`, and writes a
`Comparison`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from slipway.arithmetic.indexed import manifest_path
from slipway.common.errors import UserError
from slipway.trainer.config.data import Data
from slipway.trainer.config.tokenizer import WORDPIECES, Tokenizer
from slipway.trainer.data.identity import DATA_KEY, read_manifest
from slipway.trainer.data.vocabulary import read_vocabulary
from slipway.trainer.logs import LOGGER

_FAST = "tokenizer.json"


class TokenizerRecord(NamedTuple):
    """A tokenizer as manifests describe it: `end` is None if documents do not end with it."""

    kind: str
    files: tuple[str, ...]
    sha256: str | None
    size: int
    end: int | None

    def __str__(self) -> str:
        digest = f"sha256 {self.sha256[:12]}, " if self.sha256 else ""
        return f"{' and '.join(self.files)} ({digest}{self.size:,} tokens)"


class Comparison(NamedTuple):
    """Data sets of another tokenizer, why, and whether that is certain; those without a manifest.

    `accept` is the value of `resume.accept_data` that accepts the certain ones.
    """

    others: list[tuple[str, str, bool]]
    unknown: list[str]
    accept: str | None


def read_data_tokenizer(prefix: Path) -> TokenizerRecord | None:
    """Return the tokenizer that a data set's manifest names; None without a manifest of this file."""
    try:
        content = read_manifest(manifest_path(prefix))
        size = Path(f"{prefix}.bin").stat().st_size
        if size not in [item["size"] for item in content["outputs"] if item["path"].endswith(".bin")]:
            return None
        record, ends = content["tokenizer"], content["options"].get("append_eod", True)
        kind, files, digest = str(record["kind"]), tuple(map(str, record["files"])), str(record["sha256"])
        end = int(record["end_of_document"]) if ends else None
        return TokenizerRecord(kind, files, digest, int(record["vocabulary_size"]), end)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def read_training_tokenizer(tokenizer: Tokenizer) -> TokenizerRecord | None:
    """Return the tokenizer of a training; None if its files are not here."""
    kind, paths = "gpt2", [tokenizer.vocab_file, tokenizer.merge_file]
    if tokenizer.library == "sentencepiece":
        kind, paths = "sentencepiece", [tokenizer.model]
    elif tokenizer.library == "huggingface":
        kind, paths = _FAST, [Path(tokenizer.name, _FAST)]
    elif tokenizer.name in WORDPIECES:
        kind, paths = "wordpiece", [tokenizer.vocab_file]
    files = [path for path in paths if path is not None and path.is_file()]
    is_directory = kind == _FAST and Path(tokenizer.name).is_dir()
    if is_directory and not Path(tokenizer.name, "tokenizer_config.json").is_file():
        return None
    if len(files) < len(paths) and (is_directory or kind != _FAST):
        return None
    try:
        vocabulary = read_vocabulary(replace(tokenizer, override_size=None), mock=False)
        digest = hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest() if files else None
    except (UserError, OSError):
        return None
    names = tuple(map(str, files)) or (tokenizer.name,)
    return TokenizerRecord(kind, names, digest, vocabulary.size, vocabulary.end_of_text)


def mismatch(data: TokenizerRecord, own: TokenizerRecord, ends_matter: bool) -> tuple[str, bool] | None:
    """Return why data are not of a training's tokenizer, and whether that is certain; None if they are.

    A ``tokenizer.json`` may be the same tokenizer as files of another form, with added tokens or without.
    """
    is_same, forms = data.sha256 == own.sha256, {data.kind, own.kind}
    is_comparable = own.sha256 is not None and (len(forms) == 1 or _FAST not in forms)
    if not is_same and (is_comparable or data.size > own.size):
        return f"its manifest says that {data} made it, and the training has {own}", True
    if data.end not in (None, own.end):
        what = f"its documents end with the token {data.end}, and the training takes {own.end} for the end"
        return f"{what}, by {' and '.join(own.files)}", ends_matter
    return None if is_same else (f"{data} made it; whether {own} is the same tokenizer is not known", False)


def compare(prefixes: Mapping[str, Path], own: TokenizerRecord, ends_matter: bool) -> Comparison:
    """Compare the tokenizers of data sets, by their names, with a training's."""
    others, unknown, certain = [], [], set()
    for name, prefix in prefixes.items():
        data = read_data_tokenizer(prefix)
        if data is None:
            unknown.append(name)
        elif (problem := mismatch(data, own, ends_matter)) is not None:
            others.append((name, *problem))
            certain |= {f"{data.sha256} {data.end} {own.sha256} {own.end}"} if problem[1] else set()
    digest = hashlib.sha256("\n".join(sorted(certain)).encode()).hexdigest()[:12]
    return Comparison(others, unknown, f"tokenizer-{digest}" if certain else None)


def check(data: Data, prefixes: Iterable[Path]) -> None:
    """Raise UserError if data sets are of another tokenizer than the training's, unless that is accepted."""
    own = read_training_tokenizer(data.tokenizer)
    if own is None:
        return
    ends_matter = data.eod_mask_loss or data.reset_positions or data.reset_attention
    answer = compare({str(prefix): prefix for prefix in prefixes}, own, ends_matter)
    is_accepted = answer.accept in (data.accepted or "").split("+")
    for name, problem, is_certain in answer.others:
        if is_certain and not is_accepted:
            raise UserError(
                f"{DATA_KEY}: {name}: {problem}; expected the tokenizer of the data in model.tokenizer, or "
                f"data of this one; resume.accept_data={answer.accept} says that they fit"
            )
        LOGGER.warning("%s: %s", name, problem)


def main() -> None:
    """Answer the launcher."""
    request = json.load(sys.stdin)
    fields = request["tokenizer"]
    files = {name: Path(fields[name]) for name in ("model", "vocab_file", "merge_file") if name in fields}
    own = read_training_tokenizer(Tokenizer(**{**fields, **files}))
    prefixes = {name: Path(prefix) for name, prefix in request["data"].items()}
    answer = compare(prefixes, own, request["ends_matter"]) if own else Comparison([], [], None)
    json.dump(answer._asdict(), sys.stdout)


if __name__ == "__main__":
    main()
