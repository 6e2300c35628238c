"""The vocabulary of NeMo's GPT2BPETokenizer: ``vocab.json`` and ``merges.txt``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trainer.config.settings import Data
from trainer.errors import UserError

END_OF_TEXT = "<|endoftext|>"
GPT2_SIZE = 50257
GPT2_END_OF_TEXT = 50256


@dataclass(frozen=True)
class Vocabulary:
    """Number of tokens, the end-of-document token's id, and what to tell the user about their origin."""

    size: int
    end_of_text: int
    origin: str


def read_vocabulary(data: Data) -> Vocabulary:
    """Read the tokenizer's size. Training needs no more of it: the text was tokenized beforehand.

    Raises
    ------
    UserError
        If a file that real data needs is not set, missing or malformed.
    """
    files = {"vocab_file": data.vocab_file, "merge_file": data.merge_file}
    for name, path in files.items():
        if path is not None and path.is_file():
            continue
        if data.kind == "mock":
            return Vocabulary(GPT2_SIZE, GPT2_END_OF_TEXT, "GPT-2's size: mock data without tokenizer files")
        problem = "it is not set" if path is None else "there is no such file"
        raise UserError(
            f"model.tokenizer.{name}={path}: {problem}; `slipway data tokenize` "
            "writes vocab.json and merges.txt"
        )
    assert data.vocab_file is not None
    return _from_json(data.vocab_file)


def _from_json(path: Path) -> Vocabulary:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        size = len(entries)
        ids_are_dense = isinstance(entries, dict) and size > 0 and max(entries.values()) == size - 1
    except (ValueError, TypeError) as error:
        raise UserError(f"model.tokenizer.vocab_file={path}: not a GPT-2 vocabulary: {error}") from None
    if not ids_are_dense:
        raise UserError(f"model.tokenizer.vocab_file={path}: not a GPT-2 vocabulary: token to id, ids from 0")
    if END_OF_TEXT not in entries:
        raise UserError(f"model.tokenizer.vocab_file={path}: it lacks the token {END_OF_TEXT}")
    return Vocabulary(size, int(entries[END_OF_TEXT]), str(path))
