"""Tokens back to text: ``python -m slipway.corpus.decoding`` from stdin to stdout.

It reads ``{"tokenizer": [...], "ids": [[...]]}``, and writes the texts as a JSON list. A tokenizer is named
by its directory or its files: GPT-2's ``vocab.json`` and ``merges.txt``, a ``tokenizer.json`` of Hugging
Face, or a SentencePiece model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.common.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.corpus.tokenizers import files_in, kind_of, load_bpe, load_fast, load_pieces


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
    files = [file for path in paths for file in (files_in(path) if path.is_dir() else [path])]
    kind = kind_of(files) if len(files) in (1, 2) and all(map(Path.is_file, files)) else None
    if kind == "sentencepiece":
        processor = load_pieces(files[0])
        return Decoder(processor.get_piece_size(), lambda ids: str(processor.decode(list(ids))))
    if kind is not None:
        return _of_tokenizers(load_bpe(files) if kind == "gpt2" else load_fast(files[0]))
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
