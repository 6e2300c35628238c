"""Tokenizers: found, or trained on the sources; opened for encoding."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus.documents import Document
from corpus.errors import UserError, missing_library
from corpus.readers import read
from corpus.spec import Preparation
from corpus.units import Piece, SourceFile

END_OF_TEXT = "<|endoftext|>"
VOCAB, MERGES = "vocab.json", "merges.txt"
# More text hardly changes the merges of a small vocabulary, and training time grows with it.
_TRAINING_BYTES = 20_000_000

BatchEncoder = Callable[[list[str]], list[Any]]


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer.

    Attributes
    ----------
    kind
        ``gpt2``, ``tokenizer.json`` or ``sentencepiece``.
    paths
        Local files.
    sha256
        Of their bytes, one after the other.
    vocabulary_size
        Number of tokens.
    end_of_document
        Id of the token that ends a document.
    """

    kind: str
    paths: tuple[Path, ...]
    sha256: str
    vocabulary_size: int
    end_of_document: int


def obtain(preparation: Preparation, files: Sequence[SourceFile]) -> TokenizerFiles:
    """Return the tokenizer of `tokenizer_dir`; train a byte-level BPE there if there is none."""
    directory = preparation.tokenizer_dir
    if not (directory / VOCAB).is_file():
        _train(directory, files, preparation.vocab_size)
    return describe(preparation)


def describe(preparation: Preparation) -> TokenizerFiles:
    """Return the tokenizer that `obtain` has left.

    Raises
    ------
    UserError
        If there is none.
    """
    paths = (preparation.tokenizer_dir / VOCAB, preparation.tokenizer_dir / MERGES)
    try:
        contents = [path.read_bytes() for path in paths]
    except OSError as error:
        raise UserError(f"tokenizer: {error.filename}: {error.strerror}; run fetch") from None
    entries = json.loads(contents[0])
    if END_OF_TEXT not in entries:
        raise UserError(f"tokenizer_dir: {paths[0]} lacks the token {END_OF_TEXT}")
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    return TokenizerFiles("gpt2", paths, digest, len(entries), int(entries[END_OF_TEXT]))


def open_tokenizer(files: TokenizerFiles) -> BatchEncoder:
    """Return the function that encodes texts, without special tokens."""
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError:
        raise missing_library("tokenizers", "encoding") from None
    tokenizer = ByteLevelBPETokenizer(*map(str, files.paths))

    def encode(texts: list[str]) -> list[Any]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return encode


def _train(directory: Path, files: Sequence[SourceFile], vocabulary: int) -> None:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer: Any = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _sample(files),
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    directory.mkdir(parents=True, exist_ok=True)
    prefix = f".unfinished-{os.getpid()}"
    written = tokenizer.save_model(str(directory), prefix)
    # vocab.json last: a directory that has it has both.
    for path in sorted(map(Path, written)):
        path.replace(directory / path.name.removeprefix(f"{prefix}-"))


def _sample(files: Sequence[SourceFile]) -> Iterator[str]:
    total = 0
    for file in files:
        for record in read(Piece(file.number), file):
            if isinstance(record, Document):
                yield record.text
                total += len(record.text)
            if total >= _TRAINING_BYTES:
                return
