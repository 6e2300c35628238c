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

from corpus.errors import EXIT_OK, EXIT_USER_ERROR, UserError, missing_library

_GPT2 = ("vocab.json", "merges.txt")
_WHOLE = "tokenizer.json"


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
    vocabulary, merges, whole, model = _find(paths)
    try:
        if vocabulary and merges:
            return _gpt2(vocabulary, merges)
        if whole:
            return _hugging_face(whole)
        if model:
            return _sentencepiece(model)
    except UserError:
        raise
    except Exception as error:  # the libraries raise Exception itself
        raise UserError(f"tokenizer {', '.join(map(str, paths))}: it cannot be read: {error}") from None
    raise UserError(
        f"tokenizer {', '.join(map(str, paths))}: expected vocab.json and merges.txt, a tokenizer.json, or a "
        "SentencePiece model (*.model), or the directory of one of these"
    )


def _find(paths: Sequence[Path]) -> tuple[Path | None, Path | None, Path | None, Path | None]:
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    files = [file for file in files if file.is_file()]
    # A vocabulary may have another name where it is named itself.
    vocabulary = next((file for file in files if file.name.endswith(_GPT2[0])), None)
    merges = next((file for file in files if file.suffix == ".txt"), None)
    whole = next((file for file in files if file.name.endswith(_WHOLE)), None)
    model = next((file for file in files if file.suffix == ".model"), None)
    return vocabulary, merges, whole, model


def _gpt2(vocabulary: Path, merges: Path) -> Decoder:
    tokenizer = _tokenizers().ByteLevelBPETokenizer(str(vocabulary), str(merges))
    return _of_tokenizers(tokenizer)


def _hugging_face(file: Path) -> Decoder:
    return _of_tokenizers(_tokenizers().Tokenizer.from_file(str(file)))


def _of_tokenizers(tokenizer: Any) -> Decoder:
    return Decoder(
        tokenizer.get_vocab_size(), lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    )


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise missing_library("tokenizers", "decoding") from None
    return tokenizers


def _sentencepiece(file: Path) -> Decoder:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise missing_library("sentencepiece", "decoding") from None
    model = SentencePieceProcessor(model_file=str(file))
    return Decoder(model.vocab_size(), lambda ids: str(model.decode(list(ids))))


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
