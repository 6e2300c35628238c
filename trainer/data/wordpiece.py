"""The vocabulary of BERT's WordPiece tokenizers: ``vocab.txt``, a token in each line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WordPieces:
    """Number of tokens, and the ids of those that NeMo's T5 takes for start, end and padding."""

    size: int
    start: int
    end: int
    padding: int


# Of bert-base-cased and -uncased (Devlin et al. 2019, arXiv 1810.04805).
PUBLISHED = {
    "BertWordPieceCase": WordPieces(28996, start=101, end=102, padding=0),
    "BertWordPieceLowerCase": WordPieces(30522, start=101, end=102, padding=0),
}


def read_wordpieces(path: Path) -> WordPieces:
    """Read ``vocab.txt``: a token's id is the number of its line.

    NeMo's tokenizer has no other start and end than ``[CLS]`` and ``[SEP]`` (auto_tokenizer.py).

    Raises
    ------
    ValueError
        If one of BERT's special tokens is not there.
    OSError
        If the file cannot be read.
    """
    # Not splitlines: tokens may be characters at which that splits too.
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    ids = {token: number for number, token in enumerate(lines)}
    missing = [token for token in ("[CLS]", "[SEP]", "[PAD]") if token not in ids]
    if missing:
        raise ValueError(f"it lacks the token {missing[0]}")
    return WordPieces(len(lines), start=ids["[CLS]"], end=ids["[SEP]"], padding=ids["[PAD]"])
