"""Data sets of small tokenizers of each kind, and these as a training names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.data.tokenized import TokenizerRecord, read_data_tokenizer
from tests.corpus.preparing import prepare, write_lines

TEXTS = ["the river and the stone of 1234 items", "water light <|im_end|> of the running river"] * 40
OTHER_TEXTS = [text[::-1] for text in TEXTS]


class TokenizedSet:
    """A data set of a tokenizer, and the tokenizer as a training names it."""

    def __init__(self, directory: Path, kind: str, texts: list[str] = TEXTS, **options: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.prefix = directory, directory / "out" / "x"
        write_lines(directory / "text.jsonl", texts)
        write_tokenizer(directory / "tokenizer", kind, texts)
        node = {
            "inputs": [str(directory / "text.jsonl")],
            "output_prefix": str(self.prefix),
            "tokenizer_dir": str(directory / "tokenizer"),
            "workers": 1,
        }
        prepare(node | options)
        self.tokenizer = tokenizer_of(directory / "tokenizer", kind)

    @property
    def record(self) -> TokenizerRecord:
        record = read_data_tokenizer(self.prefix)
        assert record is not None
        return record


def write_tokenizer(directory: Path, kind: str, texts: list[str]) -> None:
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer

    directory.mkdir()
    if kind == "sentencepiece":
        model = {"model_prefix": str(directory / "tokenizer"), "vocab_size": 60, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), hard_vocab_limit=False, **model
        )
        return
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=300, special_tokens=["<|endoftext|>", "<|im_end|>"])
    if kind == "gpt2":
        tokenizer.save_model(str(directory))
    else:
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def tokenizer_of(directory: Path, kind: str) -> Tokenizer:
    if kind == "sentencepiece":
        return Tokenizer("sentencepiece", "", model=directory / "tokenizer.model")
    if kind == "huggingface":
        return Tokenizer("huggingface", str(directory))
    return Tokenizer(vocab_file=directory / "vocab.json", merge_file=directory / "merges.txt")
