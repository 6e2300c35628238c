"""Generated tokenizers of every kind, each next to the library that reads it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.torture.cases import Case, Expected, Reference, pair_reference, small_tokenizer
from benchmarks.torture.texts import AWKWARD, TRAINING, every_block

CASES: list[Case] = []
_END = "<|endoftext|>"
_PAIR = ("vocab.json", "merges.txt")


def enter(
    name: str,
    make: Callable[[Path], Reference],
    *,
    refusal: Sequence[str] | None = None,
    is_refused: bool = False,
) -> None:
    """Enter a tokenizer as a case, by the function that writes it into a directory."""

    def build(directory: Path) -> Expected:
        place = directory.parent / "tokenizer"
        place.mkdir()
        reference = make(place)
        texts = [*AWKWARD, *every_block()]
        source = directory / "a.jsonl"
        source.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
        documents = None if is_refused else texts
        return Expected([source], documents, refusal or (), refusal, reference)

    CASES.append(Case(name, "tokenizer", build))


# --- tokenizer.json


def fast_reference(path: Path, **options: Any) -> Reference:
    """Return a ``tokenizer.json`` as the library reads it, without special tokens around a text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Reference(
        {"tokenizer": {"file": str(path), "end_of_document": _END}, **options},
        lambda texts: [
            encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ],
        tokenizer.token_to_id(_END),
    )


def train_fast(directory: Path, parts: Callable[[Any], dict[str, Any]], model: str = "BPE") -> Path:
    """Train a ``tokenizer.json`` with a normalizer, a pre-tokenizer and so on."""
    import tokenizers

    kinds = {
        "BPE": {},
        "WordPiece": {"unk_token": "[UNK]"},
        "WordLevel": {"unk_token": "[UNK]"},
        "Unigram": {},
    }
    tokenizer = tokenizers.Tokenizer(getattr(tokenizers.models, model)(**kinds[model]))
    for name, part in parts(tokenizers).items():
        setattr(tokenizer, name, part)
    special = [_END, "[UNK]", "<|im_start|>"]
    options: dict[str, Any] = {"vocab_size": 500, "special_tokens": special, "show_progress": False}
    if model == "Unigram":
        options["unk_token"] = "[UNK]"
    if model == "BPE":
        options["initial_alphabet"] = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = getattr(tokenizers.trainers, {"BPE": "BpeTrainer"}.get(model, f"{model}Trainer"))(**options)
    tokenizer.train_from_iterator(TRAINING, trainer)
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def _sequence(kinds: Any, *parts: Any) -> dict[str, Any]:
    byte_level = kinds.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {"pre_tokenizer": kinds.pre_tokenizers.Sequence([*parts, byte_level])}


_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "byte level": lambda kinds: {"pre_tokenizer": kinds.pre_tokenizers.ByteLevel(add_prefix_space=False)},
    "byte level, space before": lambda kinds: {"pre_tokenizer": kinds.pre_tokenizers.ByteLevel()},
    "single digits": lambda kinds: _sequence(
        kinds, kinds.pre_tokenizers.Digits(individual_digits=True), kinds.pre_tokenizers.ByteLevel(False)
    ),
    "split as Llama 3": lambda kinds: _sequence(
        kinds, kinds.pre_tokenizers.Split(kinds.Regex(_LLAMA), "isolated")
    ),
    "split as Qwen": lambda kinds: (
        _sequence(kinds, kinds.pre_tokenizers.Split(kinds.Regex(_LLAMA.replace("{1,3}", "")), "isolated"))
        | {"normalizer": kinds.normalizers.NFC()}
    ),
    "NFKC": lambda kinds: {
        "pre_tokenizer": kinds.pre_tokenizers.ByteLevel(False),
        "normalizer": kinds.normalizers.NFKC(),
    },
    "lower case, accents stripped": lambda kinds: {
        "pre_tokenizer": kinds.pre_tokenizers.ByteLevel(False),
        "normalizer": kinds.normalizers.Sequence(
            [kinds.normalizers.NFD(), kinds.normalizers.StripAccents(), kinds.normalizers.Lowercase()]
        ),
    },
    "no pre-tokenizer": lambda kinds: {},
    "Metaspace": lambda kinds: {"pre_tokenizer": kinds.pre_tokenizers.Metaspace()},
    "punctuation": lambda kinds: _sequence(kinds, kinds.pre_tokenizers.Punctuation()),
}
for part, make in PARTS.items():
    enter(
        f"tokenizer.json: {part}",
        partial(lambda make, directory: fast_reference(train_fast(directory, make)), make),
    )
for model in ("WordPiece", "WordLevel", "Unigram"):
    enter(
        f"tokenizer.json: {model}",
        partial(
            lambda model, directory: fast_reference(
                train_fast(
                    directory, lambda kinds: {"pre_tokenizer": kinds.pre_tokenizers.Whitespace()}, model
                )
            ),
            model,
        ),
    )


def edited(directory: Path, edit: Callable[[dict[str, Any]], object], parts: str = "byte level") -> Path:
    """Train a ``tokenizer.json`` and change its text."""
    path = train_fast(directory, PARTS[parts])
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content))
    return path


def _added(*tokens: str, **options: bool) -> Callable[[dict[str, Any]], object]:
    """Return the edit that adds tokens, as an Instruct model's files have them."""

    def edit(content: dict[str, Any]) -> None:
        first = 1 + max(
            *content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])
        )
        plain = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": False,
        }
        content["added_tokens"] += [
            {"id": first + number, "content": token, **plain, **options}
            for number, token in enumerate(tokens)
        ]

    return edit


_FAST_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "added tokens": _added("<tool>", "  ", "\t\t", "2024"),
    "added tokens that strip": _added("<tool>", "year", lstrip=True, rstrip=True),
    "added tokens, single words": _added("item", "the", single_word=True, normalized=True),
    "a hole in the ids": lambda content: content["added_tokens"].append(
        {**content["added_tokens"][0], "id": 900, "content": "<far>"}
    ),
    "merges as text": lambda content: content["model"].update(
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    ),
    "merges ignored for words": lambda content: content["model"].update(ignore_merges=True),
    "truncation and padding": lambda content: content.update(
        truncation={"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": _END,
        },
    ),
    "a token before each text": lambda content: content.update(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": _END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {_END: {"id": _END, "ids": [0], "tokens": [_END]}},
        }
    ),
}
for part, edit in _FAST_EDITS.items():
    enter(
        f"tokenizer.json: {part}",
        partial(lambda edit, directory: fast_reference(edited(directory, edit)), edit),
    )


def byte_fallback(directory: Path) -> Reference:
    """Write a BPE on characters with a token for each byte, as Llama 2's and Mistral's."""
    import tokenizers

    letters = sorted({letter for text in TRAINING for letter in text.replace(" ", "▁")})
    tokens = [_END, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: number for number, token in enumerate(dict.fromkeys(tokens))},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_special_tokens([_END])
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return fast_reference(path)


enter("tokenizer.json: byte fallback", byte_fallback)


def with_directory(reference: Reference, directory: Path) -> Reference:
    """Return the reference of a tokenizer that is named by its directory."""
    options = {"tokenizer_dir": str(directory), "tokenizer": {"end_of_document": _END}}
    return Reference(options, reference.encode, reference.end)


def three_files(parts: str, edit: Callable[[dict[str, Any]], object] | None, directory: Path) -> Reference:
    """Write GPT-2's pair and a ``tokenizer.json`` of the same vocabulary, as SmolLM has them."""
    path = edited(directory, edit or (lambda content: None), parts)
    model = json.loads(path.read_bytes())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return with_directory(fast_reference(path), directory)


for part in ("byte level", "single digits", "split as Llama 3", "split as Qwen", "byte level, space before"):
    enter(f"three files: {part}", partial(three_files, part, None), refusal=["tokenizer.json"])
enter(
    "three files: added tokens",
    partial(three_files, "byte level", _FAST_EDITS["added tokens"]),
    refusal=["tokenizer.json"],
)

# --- GPT-2's pair


def pair(directory: Path) -> Reference:
    """Train GPT-2's two files."""
    return small_tokenizer(directory)


def pair_without_version(directory: Path) -> Reference:
    """Write a merges.txt without its first line, with the newlines of Windows."""
    small_tokenizer(directory)
    path = directory / "merges.txt"
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1].replace(b"\n", b"\r\n"))
    return pair_reference(*(directory / name for name in _PAIR))


def broken_pair(edit: Callable[[Path], object], directory: Path) -> Reference:
    """Write GPT-2's two files and damage them."""
    reference = small_tokenizer(directory)
    edit(directory)
    return reference


def _without_end(directory: Path) -> None:
    path = directory / "vocab.json"
    vocab = json.loads(path.read_bytes())
    path.write_text(
        json.dumps({("<|end|>" if token == _END else token): number for token, number in vocab.items()})
    )


enter("GPT-2's pair", pair)
enter("GPT-2's pair: no version line, CRLF", pair_without_version, refusal=["merges.txt"])
BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "vocab.json alone": (lambda place: (place / "merges.txt").unlink(), ["merges.txt"]),
    "merges.txt alone": (lambda place: (place / "vocab.json").unlink(), ["vocab.json"]),
    "no end of text": (_without_end, [_END, "end_of_document"]),
    "a pointer of Git LFS": (
        lambda place: (place / "vocab.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        ["vocab.json"],
    ),
    "a page of a web server": (
        lambda place: (place / "merges.txt").write_text("<!DOCTYPE html>\n<html>"),
        ["merges"],
    ),
    "a list": (lambda place: (place / "vocab.json").write_text("[1, 2]"), ["vocab"]),
    "ids with a hole": (
        lambda place: (place / "vocab.json").write_text(f'{{"{_END}": 0, "a": 7}}'),
        ["vocab"],
    ),
    "a link to a FIFO": (lambda place: _fifo(place / "vocab.json"), ["vocab.json"]),
}


def _fifo(path: Path) -> None:
    import os

    path.unlink()
    os.mkfifo(path)


for part, (damage, words) in BROKEN.items():
    enter(f"GPT-2's pair: {part}, refused", partial(broken_pair, damage), refusal=words, is_refused=True)


def not_a_tokenizer(content: str, directory: Path) -> Reference:
    """Write a file that is no ``tokenizer.json``."""
    reference = small_tokenizer(directory / "other")
    (directory / "tokenizer.json").write_text(content)
    return Reference({"tokenizer": {"file": str(directory / "tokenizer.json")}}, reference.encode, 0)


for part, text in {
    "tekken.json": '{"config": {"pattern": "x", "num_vocab_tokens": 3}, "vocab": []}',
    "empty": "",
    "a page of a web server": "<!DOCTYPE html><html></html>",
    "a pointer of Git LFS": "version https://git-lfs.github.com/spec/v1\n",
    "nested 100,000 deep": "[" * 100_000,
}.items():
    enter(
        f"no tokenizer: {part}, refused",
        partial(not_a_tokenizer, text),
        refusal=["tokenizer"],
        is_refused=True,
    )

# --- SentencePiece


def pieces(directory: Path, name: str = "tokenizer.model", **options: Any) -> Path:
    """Train a SentencePiece model."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TRAINING * 3 for line in text.splitlines()]),
        model_writer=model,
        **{"vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, **options},
    )
    path = directory / name
    path.write_bytes(model.getvalue())
    return path


def pieces_reference(path: Path) -> Reference:
    """Return a SentencePiece model as its library reads it."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return Reference(
        {"tokenizer": {"file": str(path)}}, lambda texts: processor.encode(list(texts)), processor.eos_id()
    )


PIECES: dict[str, dict[str, Any]] = {
    "unigram, defaults": {},
    "BPE, defaults": {"model_type": "bpe"},
    "BPE as Llama 2": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 500,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    },
    "BPE as Gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 500,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<x>", "  ", "\t"],
    },
    "unigram, byte fallback": {"byte_fallback": True, "vocab_size": 500},
    "unigram, NFKC, lower case": {"normalization_rule_name": "nfkc_cf"},
    "no prefix": {"model_type": "bpe", "add_dummy_prefix": False},
    "spaces as suffixes": {"treat_whitespace_as_suffix": True},
    "user's and control symbols": {
        "user_defined_symbols": ["<x>", "2024"],
        "control_symbols": ["<c>", "<s2>"],
    },
    "characters": {"model_type": "char"},
    "words": {"model_type": "word", "vocab_size": 30},
    "T5's ids": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
for part, options in PIECES.items():
    enter(
        f"SentencePiece: {part}",
        partial(lambda options, directory: pieces_reference(pieces(directory, **options)), options),
    )
enter(
    "SentencePiece: tokenizer.model.v1",
    lambda directory: pieces_reference(pieces(directory, "tokenizer.model.v1", model_type="bpe")),
)


def cut_pieces(directory: Path) -> Reference:
    """Write half a SentencePiece model."""
    path = pieces(directory)
    reference = pieces_reference(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return reference


enter("SentencePiece: cut, refused", cut_pieces, refusal=["tokenizer.model"], is_refused=True)


def endless(directory: Path) -> Reference:
    """Train a SentencePiece model without a piece that ends a document."""
    return pieces_reference(pieces(directory, eos_id=-1))


enter("SentencePiece: no end, refused", endless, refusal=["end_of_document"], is_refused=True)


def copies(directory: Path) -> Reference:
    """Write a directory with a ``tokenizer.json`` and a SentencePiece model of another vocabulary."""
    pieces(directory)
    path = train_fast(directory, PARTS["byte level"])
    shutil.copy(path, directory / "copy.json")
    return with_directory(fast_reference(path), directory)


enter("tokenizer.json beside another SentencePiece model", copies, refusal=["tokenizer.json|tokenizer.model"])
