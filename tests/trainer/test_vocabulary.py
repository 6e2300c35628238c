"""The size of the vocabulary, read from each kind of tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.config.settings import read_settings
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.data.vocabulary import Vocabulary, read_pieces, read_vocabulary

pytestmark = pytest.mark.trainer


def read(kind: str, **tokenizer: Any) -> Vocabulary:
    return read_vocabulary(Tokenizer(**tokenizer), mock=kind == "mock")


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def piece(text: str, kind: int | None = None) -> bytes:
    # The score is a float, of four bytes.
    score = varint(2 << 3 | 5) + b"\0\0\0\0"
    return field(1, field(1, text.encode()) + score + (field(3, kind) if kind else b""))


def model(*pieces: bytes, trainer: bytes = b"") -> bytes:
    # Identifiers that are not there are -1, in ten bytes.
    absent = varint(43 << 3) + b"\xff" * 9 + b"\x01"
    return b"".join(pieces) + field(2, field(4, 300) + absent + trainer) + field(3, field(1, b"nmt"))


def test_mock_data_need_no_tokenizer_and_real_data_do(tmp_path: Path) -> None:
    missing = tmp_path / "vocab.json"
    assert read("mock", vocab_file=missing).size == 50257
    with pytest.raises(UserError, match=rf"model\.tokenizer\.vocab_file={missing}"):
        read("mmap", vocab_file=missing)
    llama = {"library": "sentencepiece", "name": "", "model": tmp_path / "no.model"}
    assert (read("mock", **llama).size, read("mock", **llama).end_of_text) == (32000, 2)
    with pytest.raises(UserError, match=r"model\.tokenizer\.model=.*no\.model: there is no such file"):
        read("mmap", **llama)


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"a": 0}', '{"a": 0, "<|endoftext|>": 7}'])
def test_file_that_is_no_vocabulary_is_refused(tmp_path: Path, text: str) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(text)
    merges.touch()
    with pytest.raises(UserError, match=str(vocab)):
        read("mmap", vocab_file=vocab, merge_file=merges)
    vocab.write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    assert read("mmap", vocab_file=vocab, merge_file=merges).end_of_text == 1


def test_sentencepiece_model_has_its_pieces_and_the_one_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "llama.model"
    path.write_bytes(model(piece("<unk>", 2), piece("<s>", 3), piece("</s>", 3), *map(piece, "abcd")))
    vocabulary = read("mmap", library="sentencepiece", name="", model=path)
    assert (vocabulary.size, vocabulary.end_of_text, vocabulary.origin) == (7, 2, str(path))
    # Another name of the end, which its trainer's settings tell; a normal piece is not it.
    pieces = [piece("</s>"), piece("<end>", 3)]
    path.write_bytes(model(*pieces, trainer=field(47, b"<end>")))
    assert read_pieces(path) == (2, 1)
    path.write_bytes(model(*pieces))
    with pytest.raises(UserError, match="lacks a piece that ends a document"):
        read("mmap", library="sentencepiece", name="", model=path)


@pytest.mark.parametrize("content", [b"", b"\x0a\x7f", b"\x08", b"#!/bin/sh\n", b"\x0b\x01", field(1, 5)])
def test_file_that_is_no_sentencepiece_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "llama.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a SentencePiece model"):
        read("mmap", library="sentencepiece", name="", model=path)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """Return a directory as Hugging Face's ``save_pretrained`` writes it, with a token beyond the model's."""
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer: Any = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.add_special_tokens([AddedToken("<|end_of_text|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_text|>"}))
    return tmp_path


def test_directory_of_hugging_face_is_read(tokenizer_dir: Path) -> None:
    vocabulary = read("mmap", library="huggingface", name=str(tokenizer_dir))
    assert (vocabulary.size, vocabulary.end_of_text) == (4, 3)
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "ab"}}))
    assert read("mmap", library="huggingface", name=str(tokenizer_dir)).end_of_text == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", "{}", "eos_token None"),
        ("tokenizer_config.json", "[]", "not a mapping"),
        ("tokenizer_config.json", '{"eos_token": ["a"]}', r"eos_token \['a'\]"),
        ("tokenizer.json", "{", "not JSON"),
        ("tokenizer.json", "{}", "has no vocabulary"),
        ("tokenizer.json", '{"model": {"vocab": {}}}', "is empty"),
    ],
)
def test_directory_without_a_valid_tokenizer_is_refused(
    tokenizer_dir: Path, name: str, text: str, message: str
) -> None:
    (tokenizer_dir / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read("mmap", library="huggingface", name=str(tokenizer_dir))
    (tokenizer_dir / name).unlink()
    with pytest.raises(UserError, match=rf"{name}: No such file"):
        read("mmap", library="huggingface", name=str(tokenizer_dir))


def test_a_name_on_the_hub_is_known_or_refused() -> None:
    vocabulary = read("mmap", library="huggingface", name="meta-llama/Meta-Llama-3.1-70B")
    assert (vocabulary.size, vocabulary.end_of_text) == (128256, 128001)
    with pytest.raises(UserError, match=r"model\.tokenizer\.type='a/b': there is no such directory"):
        read("mmap", library="huggingface", name="a/b")
    with pytest.raises(UserError, match=r"override_vocab_size for mock data"):
        read("mock", library="huggingface", name="a/b")
    with pytest.raises(UserError, match=r"there is no such directory"):
        read("mmap", library="huggingface", name="a" * 1000)
    assert read("mock", library="huggingface", name="a/b", override_size=1000).size == 1000


def test_given_size_is_that_of_the_model(tmp_path: Path, configuration: Any) -> None:
    from slipway.trainer.config.load import flatten

    keys = {"exp_manager.explicit_log_dir": str(tmp_path), "model.data.data_impl": "mock"}
    flat = flatten(configuration({**keys, "model.override_vocab_size": 400}))
    settings = read_settings(flat)
    assert settings.data.tokenizer.override_size == 400
    # NeMo's model has so many rows, and no padding.
    assert settings.architecture.vocab_divisor == 1
    assert read("mock", override_size=400).size == 400
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    merges.touch()
    vocabulary = read("mmap", vocab_file=vocab, merge_file=merges, override_size=400)
    assert (vocabulary.size, vocabulary.end_of_text) == (400, 1)
    with pytest.raises(UserError, match="at least the tokenizer's 2 tokens"):
        read("mmap", vocab_file=vocab, merge_file=merges, override_size=1)
