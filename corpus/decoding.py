"""Tokens back to text: ``python -m corpus.decoding`` answers ``{"tokenizer": [...], "ids": [[...]]}``.

It reads that from stdin, and writes the texts as a JSON list. A tokenizer is named by its directory or its
files: GPT-2's ``vocab.json`` and ``merges.txt``, a ``tokenizer.json`` of Hugging Face, or a SentencePiece
model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from corpus.formats import FAST, MERGES, VOCAB
from corpus.tokenizers import load_bpe, load_fast, load_pieces


@dataclass(frozen=True)
class Decoder:
    """A tokenizer that is read backwards.

    Attributes
    ----------
    size
        Number of tokens.
    decode
        Returns the text of ids; special tokens stay in it.
    """

    size: int
    decode: Callable[[Sequence[int]], str]


def open_decoder(paths: Sequence[Path]) -> Decoder:
    """Open a tokenizer.

    Parameters
    ----------
    paths
        Its directory, or its files.

    Raises
    ------
    UserError
        If there is none, it cannot be read, or its library is missing.
    """
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]

    def named(*ends: str) -> Path | None:
        return next((file for file in files if file.is_file() and file.name.endswith(ends)), None)

    # Each may have another name where it is named itself.
    fast, vocabulary = named(FAST), named(VOCAB, "vocab")
    merges, model = named(MERGES, ".bpe"), named(".model")
    if vocabulary and merges:
        return _of_tokenizers(load_bpe((vocabulary, merges)))
    if fast:
        return _of_tokenizers(load_fast(fast))
    if model:
        processor = load_pieces(model)
        return Decoder(processor.get_piece_size(), lambda ids: str(processor.decode(list(ids))))
    raise UserError(
        f"tokenizer {', '.join(map(str, paths))}: expected vocab.json and merges.txt, a tokenizer.json, or a "
        "SentencePiece model (*.model), or the directory of one of these"
    )


def _of_tokenizers(tokenizer: Any) -> Decoder:
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return Decoder(size, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))


def main() -> int:
    """Decode what stdin holds; return the exit code."""
    try:
        question = json.load(sys.stdin)
        decoder = open_decoder([Path(path) for path in question["tokenizer"]])
        json.dump([decoder.decode(ids) for ids in question["ids"]], sys.stdout)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
