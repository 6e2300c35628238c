"""The tokenizer that made the tokens, from NeMo's ``model.tokenizer.*`` keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

from slipway.trainer.config.rows import SIZE, Row, optional, path
from slipway.trainer.config.values import Values

_NODE = "model.tokenizer"
Library = Literal["megatron", "sentencepiece", "huggingface"]
WORDPIECES = ("BertWordPieceCase", "BertWordPieceLowerCase")
MEGATRON_TYPES = ("GPT2BPETokenizer", *WORDPIECES)


def _name(values: Values, key: str) -> str:
    library = values.raw(f"{_NODE}.library") or "megatron"
    if library == "megatron":
        return values.choice(key, MEGATRON_TYPES, "GPT2BPETokenizer")
    return values.text(key) if library == "huggingface" else ""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer; a training needs its number of tokens and the id of its end of a document.

    Attributes
    ----------
    library
        NeMo's name of the library that reads the files.
    name
        Megatron's type, or for Hugging Face a name on the hub or a directory.
    model
        SentencePiece's file.
    vocab_file, merge_file
        GPT-2's two files; of BERT's there is the first.
    override_size
        The size of the model's vocabulary instead of the tokenizer's: padded to no more than a multiple for
        tensor parallelism.
    """

    library: Annotated[
        Library,
        Row(f"{_NODE}.library", partial(Values.choice, valid=get_args(Library), default="megatron")),
    ] = "megatron"
    name: Annotated[str, Row(f"{_NODE}.type", _name)] = "GPT2BPETokenizer"
    model: Annotated[Path | None, Row(f"{_NODE}.model", optional(path))] = None
    vocab_file: Annotated[Path | None, Row(f"{_NODE}.vocab_file", optional(path))] = None
    merge_file: Annotated[Path | None, Row(f"{_NODE}.merge_file", optional(path))] = None
    override_size: Annotated[int | None, Row("model.override_vocab_size", optional(SIZE))] = None
