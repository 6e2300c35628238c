"""``<prefix>.json``: what a tokenized data set holds and what it was made from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Summary:
    """Counts of a data set.

    Attributes
    ----------
    documents, tokens
        What was written.
    bytes
        Size of the files that were read, those left out included.
    skipped
        Files left out: empty, or not UTF-8.
    vocabulary_size
        Tokens in the vocabulary.
    unigram_entropy
        Of all tokens, in nats per token.
    tokenizer_sha256
        Of ``vocab.json`` and ``merges.txt``.
    request
        The options and a fingerprint of the inputs.
    """

    documents: int
    tokens: int
    bytes: int
    skipped: int
    vocabulary_size: int
    unigram_entropy: float
    tokenizer_sha256: str
    request: dict[str, Any]

    def line(self, prefix: Path) -> str:
        """Return the summary in one line."""
        return (
            f"{prefix}: {self.documents:,} documents, {self.tokens:,} tokens of a vocabulary of "
            f"{self.vocabulary_size:,}, {self.bytes:,} bytes, {self.skipped:,} files skipped, "
            f"unigram entropy {self.unigram_entropy:.4f} nats per token"
        )

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_summary(prefix: Path) -> Summary | None:
    """Return the summary of a complete data set, or None if any of its files is missing or unreadable."""
    if not all(Path(f"{prefix}{suffix}").is_file() for suffix in (".bin", ".idx", ".json")):
        return None
    try:
        return Summary(**json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
