"""The vocabulary of a tokenizer: its size and special tokens, which are all that a training needs of it.

Read from GPT-2's JSON, BERT's ``vocab.txt``, a SentencePiece model or a Hugging Face directory. Of a
SentencePiece model, a protocol buffer (``sentencepiece_model.proto`` of github.com/google/sentencepiece), so
little is needed that the library would be a dependency for thirty lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipway.arithmetic.parameters import VOCABULARIES
from slipway.arithmetic.vocabulary import END_OF_TEXT, GPT2_END_OF_TEXT, GPT2_SIZE, WAYS_TO_A_VOCABULARY
from slipway.common.errors import UserError
from slipway.trainer.config.tokenizer import WORDPIECES, Tokenizer
from slipway.trainer.data.files import explain_missing

# Touvron et al. 2023 (arXiv 2302.13971 and 2307.09288), section 2.1: 32,000 pieces.
LLAMA_SIZE = 32000
LLAMA_END_OF_TEXT = 2
# Llama team 2024 (arXiv 2407.21783), section 3.2: 128,000 tokens, and 256 special ones in its tokenizer.json.
LLAMA3_SIZE = 128256
LLAMA3_END_OF_TEXT = 128001
LLAMA3_NAMES = ("meta-llama/Meta-Llama-3-", "meta-llama/Meta-Llama-3.1-", "meta-llama/Llama-3.1-")
_WITHOUT_FILES = "mock data without tokenizer files"


@dataclass(frozen=True)
class Vocabulary:
    """Number of tokens, the end-of-document token's id, and their origin, for messages.

    A tokenizer may have separate tokens for the start of a text and for padding. The last `sentinels` tokens
    replace the spans that were taken out of a text.
    """

    size: int
    end_of_text: int
    origin: str
    start: int | None = None
    padding: int | None = None
    sentinels: int = 0

    @property
    def first_sentinel(self) -> int:
        """Return the id of `<extra_id_0>`; as in NeMo, it follows the tokenizer's tokens."""
        return self.size - self.sentinels

    @property
    def start_or_end(self) -> int:
        """Return the id of the token that starts a text: a separate one, or the one that ends it."""
        return self.end_of_text if self.start is None else self.start

    @property
    def padding_or_end(self) -> int:
        """Return the id of the token that pads a text: a separate one, or the one that ends it."""
        return self.end_of_text if self.padding is None else self.padding

    def add_sentinels(self, count: int) -> Vocabulary:
        """Return the vocabulary followed by as many sentinels."""
        return replace(self, size=self.size + count, sentinels=count)


def read_vocabulary(tokenizer: Tokenizer, mock: bool) -> Vocabulary:
    """Read the tokenizer's size. Training needs no more of it: the text was tokenized beforehand.

    Parameters
    ----------
    mock
        Whether the data are made up: they do without its files.

    Raises
    ------
    UserError
        If a file that real data needs is not set, missing or malformed, or the tokenizer has more tokens than
        ``model.override_vocab_size``.
    """
    kind = "wordpiece" if tokenizer.name in WORDPIECES else tokenizer.library
    vocabulary = _READERS[kind](tokenizer, mock)
    override = tokenizer.override_size
    if override is None:
        return vocabulary
    if override < vocabulary.size and vocabulary.origin.endswith(_WITHOUT_FILES):
        return Vocabulary(override, override - 1, "model.override_vocab_size")
    if override < vocabulary.size:
        raise UserError(
            f"model.override_vocab_size={override}: expected at least the tokenizer's {vocabulary.size} "
            f"tokens ({vocabulary.origin})"
        )
    return replace(vocabulary, size=override)


def _gpt2(tokenizer: Tokenizer, mock: bool) -> Vocabulary:
    for name, path in (("vocab_file", tokenizer.vocab_file), ("merge_file", tokenizer.merge_file)):
        if path is not None and not explain_missing(path):
            continue
        if mock:
            return Vocabulary(GPT2_SIZE, GPT2_END_OF_TEXT, f"GPT-2's size: {_WITHOUT_FILES}")
        raise _make_error(name, path, f"\n{WAYS_TO_A_VOCABULARY}")
    assert tokenizer.vocab_file is not None
    return _from_json(tokenizer.vocab_file)


def _from_json(path: Path) -> Vocabulary:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        size = len(entries)
        ids_are_dense = isinstance(entries, dict) and size > 0 and max(entries.values()) == size - 1
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"model.tokenizer.vocab_file={path}: not a GPT-2 vocabulary: {error}") from None
    if not ids_are_dense:
        raise UserError(f"model.tokenizer.vocab_file={path}: not a GPT-2 vocabulary: token to id, ids from 0")
    if END_OF_TEXT not in entries:
        raise UserError(f"model.tokenizer.vocab_file={path}: it lacks the token {END_OF_TEXT}")
    return Vocabulary(size, int(entries[END_OF_TEXT]), str(path))


def _wordpiece(tokenizer: Tokenizer, mock: bool) -> Vocabulary:
    """Read BERT's ``vocab.txt``, where a token's id is the number of its line.

    NeMo's tokenizer has no other start and end than ``[CLS]`` and ``[SEP]`` (auto_tokenizer.py).
    """
    path = tokenizer.vocab_file
    if path is None or explain_missing(path):
        if mock:
            # The ids are those of bert-base-cased and -uncased (Devlin et al. 2019, arXiv 1810.04805).
            origin = f"the size of BERT's: {_WITHOUT_FILES}"
            return Vocabulary(VOCABULARIES[tokenizer.name], 102, origin, start=101, padding=0)
        raise _make_error("vocab_file", path, "; BERT's vocab.txt has a token in each line")
    try:
        # Not splitlines: tokens may be characters at which that splits too.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (ValueError, OSError) as error:
        raise UserError(f"model.tokenizer.vocab_file={path}: not BERT's vocab.txt: {error}") from None
    ids = {token: number for number, token in enumerate(lines)}
    if missing := [token for token in ("[CLS]", "[SEP]", "[PAD]") if token not in ids]:
        raise UserError(
            f"model.tokenizer.vocab_file={path}: not BERT's vocab.txt: it lacks the token {missing[0]}"
        )
    return Vocabulary(len(lines), ids["[SEP]"], str(path), start=ids["[CLS]"], padding=ids["[PAD]"])


def _sentencepiece(tokenizer: Tokenizer, mock: bool) -> Vocabulary:
    path = tokenizer.model
    if path is None or explain_missing(path):
        if mock:
            return Vocabulary(LLAMA_SIZE, LLAMA_END_OF_TEXT, f"Llama's size: {_WITHOUT_FILES}")
        raise _make_error("model", path, "")
    try:
        size, end = read_pieces(path)
    except (ValueError, OSError) as error:
        raise UserError(f"model.tokenizer.model={path}: not a SentencePiece model: {error}") from None
    if end is None:
        raise UserError(f"model.tokenizer.model={path}: it lacks a piece that ends a document, such as </s>")
    return Vocabulary(size, end, str(path))


def _huggingface(tokenizer: Tokenizer, mock: bool) -> Vocabulary:
    directory = Path(tokenizer.name)
    if _is_directory(directory):
        return _read_directory(directory)
    if tokenizer.name.startswith(LLAMA3_NAMES):
        return Vocabulary(LLAMA3_SIZE, LLAMA3_END_OF_TEXT, f"the known size of {tokenizer.name}")
    size = tokenizer.override_size
    if mock and size is not None:
        return Vocabulary(size, size - 1, "model.override_vocab_size")
    raise UserError(
        f"model.tokenizer.type={tokenizer.name!r}: there is no such directory, and nothing is downloaded; "
        "expected a directory with tokenizer.json and tokenizer_config.json, or the name of Llama 3's or "
        f"3.1's{', or model.override_vocab_size for mock data' if mock else ''}"
    )


def _read_directory(directory: Path) -> Vocabulary:
    """Read what Hugging Face's ``save_pretrained`` writes: the size is the highest id's, added tokens too."""
    ids = _tokens(directory / "tokenizer.json")
    config = _json(directory / "tokenizer_config.json")
    end = config.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if not isinstance(end, str) or end not in ids:
        raise UserError(
            f"model.tokenizer.type={directory}: the eos_token {end!r} of its tokenizer_config.json is not in "
            "its tokenizer.json"
        )
    return Vocabulary(max(ids.values()) + 1, ids[end], str(directory / "tokenizer.json"))


def _tokens(path: Path) -> dict[str, int]:
    content = _json(path)
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):
            # A unigram model's: pairs of piece and score.
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
        ids = {str(token): int(number) for token, number in {**vocabulary, **added}.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"model.tokenizer.type={path.parent}: {path.name} has no vocabulary: {error!r}"
        ) from None
    if not ids:
        raise UserError(f"model.tokenizer.type={path.parent}: the vocabulary of {path.name} is empty")
    return ids


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"model.tokenizer.type={path.parent}: {path.name}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"model.tokenizer.type={path.parent}: {path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"model.tokenizer.type={path.parent}: {path.name} is not a mapping")
    return content


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _make_error(name: str, path: Path | None, way_out: str) -> UserError:
    problem = "it is not set" if path is None else explain_missing(path)
    return UserError(f"model.tokenizer.{name}={path}: {problem}{way_out}")


_READERS = {
    "megatron": _gpt2,
    "wordpiece": _wordpiece,
    "sentencepiece": _sentencepiece,
    "huggingface": _huggingface,
}


# Of ModelProto: the pieces, and how they were trained; of a piece: its text and type; of the latter: the name
# of the piece that ends a sentence.
_PIECES, _TRAINER = 1, 2
_TEXT, _TYPE = 1, 3
_EOS_PIECE = 47
_CONTROL = 3


def read_pieces(path: Path) -> tuple[int, int | None]:
    """Return the number of pieces and the id of the end-of-sentence piece, None without one.

    Raises
    ------
    ValueError
        If the file is not a SentencePiece model.
    OSError
        If it cannot be read.
    """
    control: dict[bytes, int] = {}
    size, end = 0, b"</s>"
    for number, value in _fields(memoryview(path.read_bytes())):
        if number == _PIECES:
            piece = dict(_fields(_message(value)))
            if piece.get(_TYPE) == _CONTROL and _TEXT in piece:
                control[bytes(_message(piece[_TEXT]))] = size
            size += 1
        elif number == _TRAINER:
            end = bytes(_message(dict(_fields(_message(value))).get(_EOS_PIECE, memoryview(end))))
    if not size:
        raise ValueError("it has no pieces")
    return size, control.get(end)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field: a whole number, or the bytes of anything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"it has a field of the unknown kind {kind}")
        if at + length > len(data):
            raise ValueError("it ends in the middle of a field")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("it ends in the middle of a field")
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it has a number where a message belongs")
    return value
