"""A byte-level BPE in GPT-2's two files, trained and used with Hugging Face's ``tokenizers``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arithmetic.vocabulary import END_OF_TEXT
from trainer.data.corpus import TextFile, read_text
from trainer.errors import UserError

VOCAB = "vocab.json"
MERGES = "merges.txt"
# The 256 bytes and the end-of-text token.
SMALLEST_VOCABULARY = 257
# More text hardly changes the merges of a small vocabulary, and training time grows with it.
_TRAINING_BYTES = 20_000_000


def exists(directory: Path) -> bool:
    """Return whether both files are there.

    Raises
    ------
    UserError
        If only one is: the pair would not be consistent.
    """
    present = [(directory / name).is_file() for name in (VOCAB, MERGES)]
    if any(present) and not all(present):
        raise UserError(f"--tokenizer-dir {directory}: only one of {VOCAB} and {MERGES} is there; remove it")
    return all(present)


def train(directory: Path, files: Sequence[TextFile], vocabulary: int) -> None:
    """Train on the first files, 20 MB at most, and write ``vocab.json`` and ``merges.txt`` atomically."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer: Any = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _training_texts(files),
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


def load(directory: Path) -> Any:
    """Open the tokenizer of a directory."""
    from tokenizers import ByteLevelBPETokenizer

    try:
        return ByteLevelBPETokenizer(str(directory / VOCAB), str(directory / MERGES))
    except Exception as error:
        raise UserError(f"--tokenizer-dir {directory}: not a GPT-2 tokenizer: {error}") from None


def sizes(directory: Path) -> tuple[int, int]:
    """Return the vocabulary's size and the end-of-text token's id."""
    entries = json.loads((directory / VOCAB).read_text(encoding="utf-8"))
    if END_OF_TEXT not in entries:
        raise UserError(f"--tokenizer-dir {directory}: {VOCAB} lacks the token {END_OF_TEXT}")
    return len(entries), int(entries[END_OF_TEXT])


def _training_texts(files: Sequence[TextFile]) -> Iterator[str]:
    total = 0
    for file in files:
        text = read_text(file.path)
        if text is None:
            continue
        yield text
        total += file.size
        if total >= _TRAINING_BYTES:
            return
