"""Tokenizer files as ``AutoTokenizer.from_pretrained`` reads them, from those that a training used.

GPT-2's and BERT's vocabularies become a ``tokenizer.json``; a directory of Hugging Face's is copied; a
SentencePiece model is copied, and transformers converts it when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from arithmetic.vocabulary import END_OF_TEXT
from trainer.checkpoint.description import Description
from trainer.checkpoint.files import write_synced
from trainer.config.tokenizer import WORDPIECES
from trainer.data.identity import TOKENIZER, TOKENIZER_NAMES, InputFile, identify
from trainer.errors import UserError
from trainer.logs import LOGGER

FAST, OPTIONS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
PAIR, PIECES, LINES = ("vocab.json", "merges.txt"), ("tokenizer.model", "spiece.model"), "vocab.txt"
# A T5's sentinels, as transformers and the paper's code name them.
_SENTINEL = "<extra_id_{}>"


def write_tokenizer(directory: Path, description: Description, tokenizer_dir: Path | None) -> list[str]:
    """Write the tokenizer's files into a model's directory; return their names.

    Parameters
    ----------
    directory
        Of the model.
    description
        What the checkpoint says of its tokenizer.
    tokenizer_dir
        Where its files are, unless they are where the training had them.

    Returns
    -------
    list
        None if there are no files, as after a training on mock data.

    Raises
    ------
    UserError
        If `tokenizer_dir` has none, or they are malformed, or have more tokens than the model, or the
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
        shutil.copyfile(path, directory / name)
    # A directory of Hugging Face's is whole: its options say what its vocabulary does not.
    if FAST not in files and OPTIONS not in files:
        _complete(directory, description, set(files))
    return sorted(path.name for path in directory.iterdir() if path.name in (*TOKENIZER_NAMES, OPTIONS))


def tokenizer_digest(directory: Path | None) -> str | None:
    """Return a short digest of the tokenizer's files in a directory, for a record; None without one.

    Raises
    ------
    UserError
        If the directory has none.
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
    """Write what transformers needs beside the files of other programs."""
    if names >= set(PAIR):
        _write_fast(directory, description, _byte_pairs(directory), END_OF_TEXT)
    elif LINES in names:
        lower = description.tokenizer.name == "BertWordPieceLowerCase"
        _write_fast(directory, description, _word_pieces(directory, lower), "[SEP]")
    else:
        _write_pieces_options(directory, description)


def _files_in(directory: Path, is_t5: bool) -> dict[str, Path]:
    """Return the files of a directory by the names that transformers looks for."""
    if not directory.is_dir():
        raise UserError(f"conversion.tokenizer_dir={directory}: there is no such directory")
    files = {name: directory / name for name in TOKENIZER_NAMES if (directory / name).is_file()}
    for path in sorted(directory.glob("*.model"))[:1] if not files else []:
        files = {PIECES[is_t5]: path}
    if not files:
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
    files = {name: path for name, path in named.items() if path is not None and path.is_file()}
    return files if len(files) == len(named) else {}


def _byte_pairs(directory: Path) -> Any:
    return _built(lambda kinds: kinds.ByteLevelBPETokenizer(*(str(directory / name) for name in PAIR)))


def _word_pieces(directory: Path, lower: bool) -> Any:
    return _built(lambda kinds: kinds.BertWordPieceTokenizer(str(directory / LINES), lowercase=lower))


def _built(build: Callable[[Any], Any]) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "the library tokenizers is missing: pip install 'PATH[conversion]' brings it, where PATH is"
            " Slipway's checkout or wheel"
        ) from None
    try:
        return build(tokenizers)
    except Exception as error:
        raise UserError(f"the tokenizer's files cannot be read: {error}") from None


def _write_fast(directory: Path, description: Description, tokenizer: Any, end: str) -> None:
    """Write ``tokenizer.json`` and what tells its special tokens."""
    words = description.vocabulary
    if tokenizer.token_to_id(end) != words.end_of_text:
        raise UserError(
            f"the tokenizer has {end} as {tokenizer.token_to_id(end)}, and the model's documents end with "
            f"{words.end_of_text}: conversion.tokenizer_dir names another tokenizer than the training's"
        )
    sentinels = [_SENTINEL.format(number) for number in range(words.sentinels)]
    special = [end, *sentinels]
    tokenizer.add_special_tokens(special)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > words.size:
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
    more = {"additional_special_tokens": sentinels} if sentinels else {}
    _write_options(directory, description, "PreTrainedTokenizerFast", {**named, **more})
    write_synced(directory / SPECIAL, json.dumps({**named, **more}, indent=2) + "\n")


def _write_pieces_options(directory: Path, description: Description) -> None:
    is_t5 = description.encoder is not None
    options: dict[str, Any] = {"add_bos_token": False, "add_eos_token": False, "legacy": False}
    if is_t5:
        options = {"extra_ids": description.vocabulary.sentinels, "legacy": False}
    kind = "T5Tokenizer" if is_t5 else "LlamaTokenizer"
    _write_options(directory, description, kind, options)


def _write_options(directory: Path, description: Description, kind: str, options: dict[str, Any]) -> None:
    content = {
        "tokenizer_class": kind,
        "model_max_length": description.decoder.max_positions,
        "clean_up_tokenization_spaces": False,
        **options,
    }
    write_synced(directory / OPTIONS, json.dumps(content, indent=2) + "\n")
