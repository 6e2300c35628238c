"""gigatoken beside the reference: same ids for each kind of tokenizer, and the fallback if they differ."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import slipway.corpus.fast_encoding
from slipway.arithmetic.probe_texts import probe_texts
from slipway.corpus.fast_encoding import DifferentIdsError, FastEncoder, UnsupportedError

CODE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path("slipway/corpus").glob("*.py")))
PROBES = probe_texts(["<|endoftext|>"])
KINDS = ("gpt2", "tokenizer.json", "llama.json")


def random_text(draw: random.Random) -> str:
    """Return characters of all planes, ASCII and white space more often than others."""
    ranges = [
        (32, 127),
        (9, 14),
        (32, 33),
        (0xA0, 0x300),
        (0x300, 0xD800),
        (0xE000, 0x20000),
        (0x20000, 0x110000),
    ]
    return "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(1, 60)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small tokenizer of each kind."""
    target = tmp_path_factory.mktemp("tokenizers")
    lines = [*CODE.splitlines(), *PROBES]
    special = ["<|endoftext|>"]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size=900, special_tokens=special, show_progress=False)
    bpe.save_model(str(target))
    bpe.save(str(target / "tokenizer.json"))
    # The words of GPT-4 and Llama 3.
    llama = tokenizers.Tokenizer(tokenizers.models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    llama.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    llama.train_from_iterator(
        lines,
        tokenizers.trainers.BpeTrainer(
            vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    llama.save(str(target / "llama.json"))
    return target


def open_reference(kind: str, directory: Path) -> tuple[str, list[Path], Any]:
    """Return kind, files and reference of a tokenizer."""
    if kind == "gpt2":
        paths = [directory / "vocab.json", directory / "merges.txt"]
        tokenizer: Any = tokenizers.ByteLevelBPETokenizer(*map(str, paths))
    else:
        paths = [directory / kind]
        tokenizer = tokenizers.Tokenizer.from_file(str(paths[0]))
        kind = "tokenizer.json"

    def reference(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    return kind, paths, reference


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_reference(kind: str, directory: Path) -> None:
    name, paths, reference = open_reference(kind, directory)
    draw = random.Random(1)
    texts = [*PROBES, CODE, *(random_text(draw) for _ in range(500))]
    encoder = FastEncoder(name, paths, reference)
    assert [ids.tolist() for ids in encoder.encode(texts)] == reference(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_characters_of_newer_editions_of_unicode_have_the_ids_of_the_reference(
    kind: str, directory: Path
) -> None:
    name, paths, reference = open_reference(kind, directory)
    encoder = FastEncoder(name, paths, reference)
    new = [chr(n) for n in range(0x34000) if unicodedata.category(chr(n)) == "Cn"]
    texts = [f"{c}'ll go {c}1{c}\n {c}'s" for c in ["\U00016ebb", "\U000323b0", *new[::7]]]
    assert [ids.tolist() for ids in encoder.encode(texts)] == reference(texts)


def test_documents_without_new_characters_do_not_go_to_the_reference(directory: Path) -> None:
    name, paths, reference = open_reference("gpt2", directory)
    seen: list[str] = []

    def record_texts(texts: list[str]) -> list[Any]:
        seen.extend(texts)
        return list(reference(texts))

    encoder = FastEncoder(name, paths, record_texts)
    encoder.encode(["sampled"])
    del seen[:]
    encoder.encode(["Ünïcödé, 日本語, 🙂 «Что» 👩‍👩‍👧‍👦", "\U00016ebb is new", CODE[:1000]])
    assert seen == ["\U00016ebb is new"]


@pytest.mark.parametrize("token", ["<|im_start|>", "<new>"])
def test_other_ids_of_an_added_token_are_seen_at_the_start(
    directory: Path, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads((directory / "llama.json").read_text())
    content["added_tokens"] += [{**content["added_tokens"][0], "id": 900, "content": token}]
    (tmp_path / "added.json").write_text(json.dumps(content))
    name, paths, reference = open_reference("added.json", tmp_path)
    FastEncoder(name, paths, reference)
    without = FastEncoder(*open_reference("llama.json", directory))
    monkeypatch.setattr(slipway.corpus.fast_encoding, "_open", lambda *_: without._fast)
    with pytest.raises(UnsupportedError, match="ids differ"):
        FastEncoder(name, paths, reference)


def test_difference_in_an_awkward_text_is_seen_at_the_start(directory: Path) -> None:
    name, paths, reference = open_reference("gpt2", directory)

    def encode_differently(texts: list[str]) -> list[list[int]]:
        return reference([text.replace("😀", "").replace("ǅ", "x") for text in texts])

    with pytest.raises(UnsupportedError, match="ids differ from the reference's for 'e"):
        FastEncoder(name, paths, encode_differently)


def test_difference_is_seen_in_the_sample_and_sample_follows_from_the_key(directory: Path) -> None:
    name, paths, reference = open_reference("gpt2", directory)
    sampled: list[str] = []

    def record_texts(texts: list[str]) -> list[Any]:
        sampled.extend(texts)
        ids: list[Any] = reference(texts)
        return [
            [*values, 0] if "sabotage" in text else values for text, values in zip(texts, ids, strict=True)
        ]

    encoder = FastEncoder(name, paths, record_texts)
    documents = [f"document {number} " * 200 for number in range(2000)]
    samples = []
    for key in ("a", "b", "a"):
        del sampled[:]
        encoder.start(key)
        for first in range(0, 2000, 100):
            encoder.encode(documents[first : first + 100])
        samples.append(tuple(sampled))
    assert samples[0] == samples[2] != samples[1]
    assert all(len(texts) >= 2 for texts in samples)
    encoder.start("c")
    with pytest.raises(DifferentIdsError, match="for 'sabotage"):
        encoder.encode(["sabotage of a document"] * 10)


def test_long_document_is_compared_in_part(directory: Path) -> None:
    name, paths, reference = open_reference("gpt2", directory)
    lengths: list[int] = []

    def record_lengths(texts: list[str]) -> list[Any]:
        lengths.extend(map(len, texts))
        return list(reference(texts))

    encoder = FastEncoder(name, paths, record_lengths)
    del lengths[:]
    encoder.encode([CODE])
    assert lengths == [2048]


def test_tokenizer_that_gigatoken_cannot_take_is_unsupported(directory: Path, tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="gigatoken cannot take this tokenizer"):
        FastEncoder("tokenizer.json", [tmp_path / "tokenizer.json"], lambda texts: [])
    with pytest.raises(UnsupportedError, match="otherwise than SentencePiece"):
        FastEncoder("sentencepiece", [tmp_path / "tokenizer.model"], lambda texts: [])


def test_fast_path_is_unsupported_without_gigatoken(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(UnsupportedError, match="gigatoken is not installed"):
        FastEncoder(*open_reference("gpt2", directory))


def test_failure_of_gigatoken_is_a_difference(directory: Path) -> None:
    encoder = FastEncoder(*open_reference("gpt2", directory))
    with pytest.raises(DifferentIdsError, match="gigatoken failed"):
        encoder.encode([1])  # type: ignore[list-item]
