"""The tokenizer that made the tokens, from NeMo's ``model.tokenizer.*`` keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from slipway.trainer.config.values import Values

_NODE = "model.tokenizer"
Library = Literal["megatron", "sentencepiece", "huggingface"]
WORDPIECES = ("BertWordPieceCase", "BertWordPieceLowerCase")
MEGATRON_TYPES = ("GPT2BPETokenizer", *WORDPIECES)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, of which a training needs the number of tokens and the id of the end of a document.

    Attributes
    ----------
    library
        NeMo's name of what reads the files.
    name
        Megatron's type, or for Hugging Face a name on the hub or a directory.
    model
        SentencePiece's file.
    vocab_file, merge_file
        GPT-2's two files; of BERT's there is the first.
    override_size
        The size of the model's vocabulary, whatever the tokenizer's: padded to no more than what tensor
        parallelism divides.
    """

    library: Library = "megatron"
    name: str = "GPT2BPETokenizer"
    model: Path | None = None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    override_size: int | None = None


def read_tokenizer(values: Values) -> Tokenizer:
    """Read the node; no file is opened.

    Raises
    ------
    UserError
        If a value is invalid.
    """
    library = values.choice(f"{_NODE}.library", get_args(Library), "megatron")
    override = "model.override_vocab_size"
    return Tokenizer(
        library=cast(Library, library),
        name=_name(values, library),
        model=_path(values, f"{_NODE}.model"),
        vocab_file=_path(values, f"{_NODE}.vocab_file"),
        merge_file=_path(values, f"{_NODE}.merge_file"),
        override_size=values.integer(override, minimum=1) if values.is_set(override) else None,
    )


def _name(values: Values, library: str) -> str:
    key = f"{_NODE}.type"
    if library == "megatron":
        return values.choice(key, MEGATRON_TYPES, "GPT2BPETokenizer")
    if library == "huggingface":
        return values.text(key)
    return ""


def _path(values: Values, key: str) -> Path | None:
    return Path(values.text(key)) if values.is_set(key) else None
