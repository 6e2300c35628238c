"""Tokenizer files as ``AutoTokenizer.from_pretrained`` reads them, from those that a training used.

GPT-2's and BERT's vocabularies and SentencePiece models become a ``tokenizer.json``; a directory of Hugging
Face's is copied. The ids from transformers with these files are compared with those from the training's
library, on texts on which such readings differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipway.arithmetic.probe_texts import probe_texts
from slipway.arithmetic.vocabulary import END_OF_TEXT
from slipway.common.errors import UserError, first_line
from slipway.common.files import write_atomic
from slipway.trainer import requirements
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.checkpoint.files import read_inside, read_mapping
from slipway.trainer.config.tokenizer import WORDPIECES
from slipway.trainer.conversion.sentencepiece_tokenizer import CONTROL, PieceModel
from slipway.trainer.data.identity import TOKENIZER, InputFile, identify, tokenizer_names
from slipway.trainer.logs import LOGGER

FAST, OPTIONS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
PAIR, PIECES, LINES = ("vocab.json", "merges.txt"), ("tokenizer.model", "spiece.model"), "vocab.txt"
# A T5's sentinels, as transformers and the paper's code name them.
_SENTINEL = "<extra_id_{}>"
_LOWER = "BertWordPieceLowerCase"
# Takes all of a tokenizer.json as it is.
_CLASS = "PreTrainedTokenizerFast"
_SHOWN = 24


def write_tokenizer(directory: Path, description: Description, tokenizer_dir: Path | None) -> list[str]:
    """Write the tokenizer's files into a model's directory; return their names.

    Parameters
    ----------
    tokenizer_dir
        Where its files are, unless they are where the training had them.

    Returns
    -------
    list
        Empty if there are no files, as after a training on mock data.

    Raises
    ------
    UserError
        If `tokenizer_dir` has no files, or they are malformed, or have more tokens than the model, or the
        training's files changed since.
    """
    is_t5 = description.encoder is not None
    files = _files_in(tokenizer_dir, is_t5) if tokenizer_dir else _files_of(description)
    if not files:
        LOGGER.warning(
            "the model has no tokenizer files: those of the training are not here; "
            "conversion.tokenizer_dir=/path names a directory with them"
        )
        return []
    if tokenizer_dir is None:
        _check_unchanged(files, description)
    for name, path in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(read_inside(path, root=path.parents[name.count("/")]))
    # A directory of Hugging Face's is whole: its options say what its vocabulary does not.
    if FAST not in files and OPTIONS not in files:
        _complete(directory, description, set(files))
    return tokenizer_names(directory)


def check_tokenizer(directory: Path, description: Description, tokenizer_dir: Path | None) -> None:
    """Compare the ids from transformers with the written files to those from the training's library.

    Raises
    ------
    UserError
        With a text that has other ids, or if a library is missing or cannot read the files.
    """
    is_t5 = description.encoder is not None
    files = _files_in(tokenizer_dir, is_t5) if tokenizer_dir else _files_of(description)
    if not files:
        return
    encode, added, pieces = _reference(directory, set(files), description)
    # The reference does not know the sentinels.
    skipped = _SENTINEL.partition("{")[0] if description.vocabulary.sentinels else None
    texts = [text for text in probe_texts(added) if skipped is None or skipped not in text]
    problem = _problem(directory, encode, texts, pieces)
    path = directory / OPTIONS
    # Some classes of transformers take the vocabulary alone from the file, others are custom code.
    # transformers 5 always takes Qwen2's class unless the file names code, which is not run.
    for auto_map in ({}, {"auto_map": {"AutoTokenizer": [None, _CLASS]}}):
        if not problem or not (auto_map or FAST in files):
            continue
        options = read_mapping(path) if path.exists() else {}
        LOGGER.warning(
            "%s has %s in place of %s: %s", OPTIONS, _CLASS, options.get("tokenizer_class"), problem
        )
        options.pop("auto_map", None)
        content = {**options, "tokenizer_class": _CLASS, **auto_map}
        write_atomic(path, json.dumps(content, indent=2) + "\n")
        problem = _problem(directory, encode, texts, pieces)
    if problem:
        raise UserError(
            f"the tokenizer is not the training's any more once transformers reads it: {problem}; expected "
            f"conversion.tokenizer_dir=/path, a directory with a {FAST} of the same ids"
        )


_Encode = Callable[[str], list[int]]


def _reference(
    directory: Path, names: set[str], description: Description
) -> tuple[_Encode, list[str], PieceModel | None]:
    """Return how the training's library encodes, and the tokens that a text may spell."""
    pieces = next((name for name in PIECES if name in names), None)
    if FAST in names:
        tokenizer = _build(lambda kinds: kinds.Tokenizer.from_file(str(directory / FAST)))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        options = read_mapping(directory / OPTIONS) if OPTIONS in names else {}
        tokenizer.encode_special_tokens = bool(options.get("split_special_tokens"))
    elif names >= set(PAIR):
        tokenizer = _byte_pairs(directory)
    elif pieces is None:
        tokenizer = _word_pieces(directory, description.tokenizer.name == _LOWER)
    else:
        model = PieceModel(directory / pieces)
        return model.processor.encode, model.named(), model
    added = [END_OF_TEXT, *(token.content for token in tokenizer.get_added_tokens_decoder().values())]
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, added, None


def _problem(directory: Path, encode: _Encode, texts: list[str], pieces: PieceModel | None) -> str:
    """Return which text has other ids with transformers; empty if none has."""
    requirements.check(("transformers",), extra="conversion")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        return f"AutoTokenizer cannot read it: {first_line(error)}"
    ties = 0
    # A single word says more than the text that it is in.
    for text in (part for whole in texts for part in (*whole.split(), whole)):
        old = _ids(encode, text)
        new = _ids(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], text)
        if old is None or old == new:
            continue
        if pieces is None or new is None or not pieces.is_tie(old, new):
            return f"{text[:_SHOWN]!r} is {(new or [])[:_SHOWN]}, and {old[:_SHOWN]} in the training"
        ties += 1
    if ties:
        LOGGER.warning(
            "%d texts of %d are cut otherwise into pieces of the same probability", ties, len(texts)
        )
    return ""


def _ids(encode: _Encode, text: str) -> list[int] | None:
    """Return a text's ids; None where tokenizers breaks off (a panic in its normalization)."""
    try:
        return list(encode(text))
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return None


def tokenizer_digest(directory: Path | None) -> str | None:
    """Return a short digest of the tokenizer's files in a directory, for a record; None without one.

    Raises
    ------
    UserError
        If the directory has no tokenizer.
    """
    if directory is None:
        return None
    files = sorted(_files_in(directory, is_t5=False).items())
    found = identify([InputFile(TOKENIZER, name, name, str(path)) for name, path in files])
    return hashlib.sha256(repr([(file.name, file.checksum) for file in found]).encode()).hexdigest()[:12]


def _check_unchanged(files: Mapping[str, Path], description: Description) -> None:
    """Refuse files that are not those of the training any more."""
    for file in identify([InputFile(TOKENIZER, name, str(path), str(path)) for name, path in files.items()]):
        expected = description.checksums.get(file.name, file.checksum)
        if file.checksum != expected:
            raise UserError(
                f"{file.name} changed since the training: {expected} then, {file.checksum} now; expected "
                "conversion.tokenizer_dir=/path, a directory with the tokenizer to use"
            )


def _complete(directory: Path, description: Description, names: set[str]) -> None:
    """Write the files that transformers needs in addition to those of other programs."""
    if names >= set(PAIR):
        _write_fast(directory, description, _byte_pairs(directory), END_OF_TEXT)
    elif LINES in names:
        lower = description.tokenizer.name == _LOWER
        _write_fast(directory, description, _word_pieces(directory, lower), "[SEP]")
    else:
        model = PieceModel(directory / PIECES[description.encoder is not None])
        ends = model.pieces[description.vocabulary.end_of_text :]
        end = ends[0].piece if ends else "</s>"
        _write_fast(directory, description, model.fast_tokenizer(), end, model.named(CONTROL))


def _files_in(directory: Path, is_t5: bool) -> dict[str, Path]:
    """Return the files of a directory by the names that transformers looks for."""
    if not directory.is_dir():
        raise UserError(f"conversion.tokenizer_dir={directory}: there is no such directory")
    files = {name: directory / name for name in tokenizer_names(directory)}
    known = {FAST, *PAIR, LINES, *PIECES}
    model = next((name for name in files if name.endswith(".model")), None)
    if model and not files.keys() & known:
        files[PIECES[is_t5]] = files.pop(model)
    if not files.keys() & known:
        raise UserError(
            f"conversion.tokenizer_dir={directory}: it has no tokenizer; expected {FAST}, "
            f"{' and '.join(PAIR)}, {LINES} or {PIECES[0]}"
        )
    return files


def _files_of(description: Description) -> dict[str, Path]:
    """Return the files that the training had, if they are here."""
    tokenizer, is_t5 = description.tokenizer, description.encoder is not None
    if tokenizer.library == "huggingface":
        path = Path(tokenizer.name)
        return _files_in(path, is_t5) if path.is_absolute() and path.is_dir() else {}
    if tokenizer.library == "sentencepiece":
        named = {PIECES[is_t5]: tokenizer.model}
    elif tokenizer.name in WORDPIECES:
        named = {LINES: tokenizer.vocab_file}
    else:
        named = dict(zip(PAIR, (tokenizer.vocab_file, tokenizer.merge_file), strict=True))
    # A training takes a link to one of these as well.
    files = {name: path.resolve() for name, path in named.items() if path is not None and path.is_file()}
    return files if len(files) == len(named) else {}


def _byte_pairs(directory: Path) -> Any:
    return _build(lambda kinds: kinds.ByteLevelBPETokenizer(*(str(directory / name) for name in PAIR)))


def _word_pieces(directory: Path, lower: bool) -> Any:
    return _build(lambda kinds: kinds.BertWordPieceTokenizer(str(directory / LINES), lowercase=lower))


def _build(build: Callable[[Any], Any]) -> Any:
    requirements.check(("tokenizers",), extra="conversion")
    import tokenizers

    try:
        return build(tokenizers)
    except Exception as error:
        raise UserError(f"the tokenizer's files cannot be read: {error}") from None


def _write_fast(
    directory: Path, description: Description, tokenizer: Any, end: str, control: Sequence[str] = ()
) -> None:
    """Write ``tokenizer.json`` and the files that name its special tokens."""
    words = description.vocabulary
    if tokenizer.token_to_id(end) != words.end_of_text:
        raise UserError(
            f"the tokenizer has {end} as {tokenizer.token_to_id(end)}, and the model's documents end with "
            f"{words.end_of_text}: conversion.tokenizer_dir names another tokenizer than the training's"
        )
    sentinels = [_SENTINEL.format(number) for number in range(words.sentinels)]
    # The training's libraries take the names of special tokens in a text as text, but for BERT's.
    is_text = end != "[SEP]"
    tokenizer.add_special_tokens([end, *control])
    from tokenizers import AddedToken

    add = tokenizer.add_tokens if is_text else tokenizer.add_special_tokens
    add([AddedToken(text, normalized=False, special=not is_text) for text in sentinels])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > words.size or (sentinels and size < words.size):
        raise UserError(
            f"the tokenizer has {size} tokens, and the model {words.size}: conversion.tokenizer_dir names "
            "another tokenizer than the training's"
        )
    tokenizer.save(str(directory / FAST))
    start = tokenizer.id_to_token(words.end_of_text if words.start is None else words.start)
    padding = tokenizer.id_to_token(words.end_of_text if words.padding is None else words.padding)
    named = {"bos_token": start, "eos_token": end, "pad_token": padding}
    if end == END_OF_TEXT:
        named["unk_token"] = end
    more: dict[str, Any] = {} if is_text or not sentinels else {"additional_special_tokens": sentinels}
    options = {**named, **more, "split_special_tokens": is_text}
    content = {
        "tokenizer_class": _CLASS,
        "model_max_length": description.decoder.max_positions,
        "clean_up_tokenization_spaces": False,
        **options,
    }
    write_atomic(directory / OPTIONS, json.dumps(content, indent=2) + "\n")
    write_atomic(directory / SPECIAL, json.dumps({**named, **more}, indent=2) + "\n")
