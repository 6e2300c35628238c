"""Tokenizers: an existing one, local or fetched, or a byte-level BPE trained on the sources.

Three kinds: GPT-2's ``vocab.json`` and ``merges.txt``, Hugging Face's ``tokenizer.json``, and a SentencePiece
model. All encode without special tokens, as megatron-core does (``include_special_tokens=False`` in
``huggingface_tokenizer.py``, ``encode_as_ids`` in ``sentencepiece_tokenizer.py``): no token begins a
document, and the one that ends it is appended to the ids.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slipway.arithmetic.vocabulary import END_OF_TEXT
from slipway.common.errors import UserError
from slipway.common.files import sha256_of, write_atomic
from slipway.common.sections import TokenizerSource
from slipway.corpus.errors import BadRecord, missing_library, place, refusal
from slipway.corpus.fetching import Download, Policy, fetch_all
from slipway.corpus.formats import FAST, MERGES, PIECES, VOCAB
from slipway.corpus.progress import Progress, heartbeat, say
from slipway.corpus.readers import read
from slipway.corpus.remotes import public_name, remote
from slipway.corpus.spec import Preparation
from slipway.corpus.units import Piece, SourceFile

_UNFINISHED = ".unfinished-training"
# In `work_dir`: the size that a new tokenizer is to have, which a short text does not fill.
_TRAINED = "trained.json"
_VOCABULARY = 2048
# Tokens that end a document, by the names that published tokenizers give them.
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>")
# More text hardly changes the merges of a small vocabulary, and training time grows with it.
_TRAINING_BYTES = 20_000_000

BatchEncoder = Callable[[list[str]], list[Any]]


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer.

    Attributes
    ----------
    kind
        ``gpt2``, ``tokenizer.json`` or ``sentencepiece``.
    paths
        Local files.
    sha256
        Of their bytes, one after the other.
    vocabulary_size
        Number of tokens.
    end_of_document
        Id of the token that ends a document.
    """

    kind: str
    paths: tuple[Path, ...]
    sha256: str
    vocabulary_size: int
    end_of_document: int


def obtain(
    preparation: Preparation, files: Sequence[SourceFile], policy: Policy | None = None
) -> TokenizerFiles:
    """Return the tokenizer, after it was fetched or trained if it is not there yet.

    Parameters
    ----------
    files
        Sources that a new BPE is trained on: the first 20 MB of text.

    Raises
    ------
    UserError
        If a file is missing, malformed, of another SHA-256 than it must be, or not the one that is there.
    OutsideError
        If the network or the disk failed.
    """
    source, directory = preparation.tokenizer, preparation.tokenizer_dir
    if source.vocab_url is not None and source.merges_url is not None:
        wanted = [
            (source.vocab_url, source.vocab_sha256, VOCAB),
            (source.merges_url, source.merges_sha256, MERGES),
        ]
        _fetch(preparation, wanted, policy)
    elif source.url is not None:
        _fetch(preparation, [(source.url, source.sha256, None)], policy)
    elif source.file is None and not _find_files(preparation):
        size = preparation.vocab_size or _VOCABULARY
        say(f"training a byte-level BPE of {size:,} tokens on the first text of the sources")
        write_atomic(preparation.work_dir / _TRAINED, json.dumps({str(directory): size}))
        with heartbeat("training the tokenizer"):
            _train(directory, _sample(files, preparation.on_error), size)
    elif source.file is None:
        # A run that was killed behind the last file has left it.
        with contextlib.suppress(OSError):
            (directory / _UNFINISHED).unlink(missing_ok=True)
    tokenizer = describe(preparation)
    _check_size(preparation, tokenizer)
    say(
        f"tokenizer {', '.join(map(str, tokenizer.paths))}: {tokenizer.vocabulary_size:,} tokens, documents "
        f"end with {tokenizer.end_of_document}"
    )
    return tokenizer


def describe(preparation: Preparation) -> TokenizerFiles:
    """Return the tokenizer that `obtain` has left.

    Raises
    ------
    UserError
        If it is missing or malformed.
    """
    paths = _find_files(preparation)
    if not paths:
        raise UserError(f"tokenizer_dir={preparation.tokenizer_dir}: no tokenizer is there; run fetch")
    try:
        contents = [path.read_bytes() for path in paths]
    except OSError as error:
        raise UserError(f"tokenizer: {error.filename}: {error.strerror}") from None
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    source = preparation.tokenizer
    if source.file is not None and source.sha256 not in (None, digest):
        raise UserError(f"tokenizer.file={source.file}: its sha256 is {digest}, expected {source.sha256}")
    kind = kind_of(paths)
    if kind == "gpt2":
        size, end = _read_vocab(paths[0], contents[0], source.end_of_document)
    elif kind == "tokenizer.json":
        size, end = _read_fast(paths[0], source.end_of_document)
    else:
        size, end = _read_pieces(paths[0], contents[0], source.end_of_document)
    return TokenizerFiles(kind, paths, digest, size, end)


def _check_size(preparation: Preparation, tokenizer: TokenizerFiles) -> None:
    """Raise UserError if another size is wished for than that of the BPE that is there; say it of others."""
    size = tokenizer.vocabulary_size
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        sizes = json.loads((preparation.work_dir / _TRAINED).read_bytes())
        size = max(size, int(sizes[str(preparation.tokenizer_dir)]))
    if preparation.vocab_size in (None, size):
        return
    message = (
        f"data_preparation.vocab_size={preparation.vocab_size}: the tokenizer {tokenizer.paths[0]} is one of "
        f"{size:,} tokens"
    )
    source = preparation.tokenizer
    if tokenizer.kind == "gpt2" and source == TokenizerSource(end_of_document=source.end_of_document):
        raise UserError(f"{message}; vocab_size=null takes it, and another tokenizer_dir gets a new one")
    say(f"{message}, and is used")


def open_tokenizer(files: TokenizerFiles) -> BatchEncoder:
    """Return the function that encodes texts to ids, without special tokens."""
    if files.kind == "sentencepiece":
        processor = load_pieces(files.paths[0])
        return lambda texts: list(processor.encode(texts, out_type=int))
    tokenizer = load_fast(files.paths[0]) if files.kind == "tokenizer.json" else load_bpe(files.paths)

    def encode(texts: list[str]) -> list[Any]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return encode


@dataclass(frozen=True)
class Decoder:
    """A tokenizer that is read backwards.

    Attributes
    ----------
    size
        Number of tokens.
    decode
        Returns the text of ids; special tokens stay in it.
    """

    size: int
    decode: Callable[[Sequence[int]], str]


def open_decoder(paths: Sequence[Path]) -> Decoder:
    """Open a tokenizer.

    Parameters
    ----------
    paths
        Its directory, or its files.

    Raises
    ------
    UserError
        If it or its library is missing, or it cannot be read.
    """
    files = [file for path in paths for file in (files_in(path) if path.is_dir() else [path])]
    kind = kind_of(files) if len(files) in (1, 2) and all(map(Path.is_file, files)) else None
    if kind == "sentencepiece":
        processor = load_pieces(files[0])
        return Decoder(processor.get_piece_size(), lambda ids: str(processor.decode(list(ids))))
    if kind is not None:
        return _make_decoder(load_bpe(files) if kind == "gpt2" else load_fast(files[0]))
    raise UserError(
        f"tokenizer {', '.join(map(str, paths))}: expected vocab.json and merges.txt, a tokenizer.json, or a "
        "SentencePiece model (*.model), or the directory of one of these"
    )


def _make_decoder(tokenizer: Any) -> Decoder:
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return Decoder(size, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))


def files_in(directory: Path) -> tuple[Path, ...]:
    """Return the files of the tokenizer in a directory, none without one.

    A ``tokenizer.json`` is taken before the others, as by Hugging Face: ``vocab.json`` and ``merges.txt`` do
    not say how a text is split into words, nor which tokens were added.
    """
    choices = ([directory / FAST], [directory / VOCAB, directory / MERGES], [directory / PIECES])
    others = [[path] for path in sorted(directory.glob("*.model"))]
    return next((tuple(paths) for paths in (*choices, *others) if all(map(Path.is_file, paths))), ())


def kind_of(paths: Sequence[Path]) -> str:
    """Return the kind of a tokenizer: two files are GPT-2's, one is read."""
    if len(paths) == 2:
        return "gpt2"
    with paths[0].open("rb") as stream:
        return "tokenizer.json" if _is_json(stream.read(256)) else "sentencepiece"


def _find_files(preparation: Preparation) -> tuple[Path, ...]:
    """Return the files of the tokenizer that is there; none if one is to be fetched or trained."""
    source, directory = preparation.tokenizer, preparation.tokenizer_dir
    if source.file is not None:
        return (source.file,)
    pair = (directory / VOCAB, directory / MERGES)
    present = [path.is_file() for path in pair]
    if source.vocab_url is not None and all(present):
        return pair
    single = [path for path in (directory / FAST, directory / PIECES) if path.is_file()]
    if source.url is not None:
        return tuple(single[:1])
    paths = files_in(directory)
    if any(present) and not all(present) and not paths and not (directory / _UNFINISHED).exists():
        there, lost = (VOCAB, MERGES) if present[0] else (MERGES, VOCAB)
        raise UserError(f"tokenizer_dir={directory}: {there} is there without {lost}: add that, or remove it")
    return paths


def _fetch(
    preparation: Preparation, wanted: Sequence[tuple[str, str | None, str | None]], policy: Policy | None
) -> None:
    """Fetch files into `tokenizer_dir`, given URL, SHA-256 and name; the content decides a missing name."""
    directory = preparation.tokenizer_dir
    if all(_is_there(directory, name, sha256) for _, sha256, name in wanted):
        return
    downloads = [Download(remote(url), sha256) for url, sha256, _ in wanted]
    with Progress("fetching the tokenizer", 0, len(downloads), "files") as progress:
        timeout = preparation.download_timeout
        fetched = fetch_all(downloads, preparation.work_dir / "tokenizer", progress, policy, timeout)
    contents = [result.path.read_bytes() for result in fetched]
    names = [
        name or (FAST if _is_json(content) else PIECES)
        for (_, _, name), content in zip(wanted, contents, strict=True)
    ]
    for (url, _, _), result, name in zip(wanted, fetched, names, strict=True):
        target = directory / name
        if target.is_file() and sha256_of(target) != result.sha256:
            raise UserError(
                f"tokenizer_dir={directory}: {name} is there and is not that of {public_name(url)}; it is "
                "not replaced, as data may have been tokenized with it: set another tokenizer_dir, or remove "
                "the file"
            )
    directory.mkdir(parents=True, exist_ok=True)
    # vocab.json last: a directory that has it has both.
    for name, content in sorted(zip(names, contents, strict=True)):
        write_atomic(directory / name, content)
    if FAST in names:
        _write_config(directory, preparation.tokenizer.end_of_document)


def _is_there(directory: Path, name: str | None, sha256: str | None) -> bool:
    """Return True if a file of the expected SHA-256 is there, so that nothing needs to be fetched."""
    paths = [directory / choice for choice in ((name,) if name else (FAST, PIECES))]
    return sha256 is not None and any(path.is_file() and sha256_of(path) == sha256 for path in paths)


def _write_config(directory: Path, end: str | None) -> None:
    """Name the end-of-document token as Hugging Face does, so that the trainer finds it with the file."""
    path = directory / "tokenizer_config.json"
    if not path.exists():
        ids = load_fast(directory / FAST).get_vocab(with_added_tokens=True)
        token = _end_token(directory / FAST, ids, end)
        config = {"eos_token": token, "tokenizer_class": "PreTrainedTokenizerFast"}
        write_atomic(path, json.dumps(config, indent=1) + "\n")


def _read_vocab(path: Path, content: bytes, end: str | None) -> tuple[int, int]:
    """Return size and end token of GPT-2's vocabulary."""
    try:
        entries = json.loads(content)
        is_dense = sorted(entries.values()) == list(range(len(entries)))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"tokenizer: {path}: not a GPT-2 vocabulary: {error}") from None
    if not is_dense or not entries:
        raise UserError(f"tokenizer: {path}: not a GPT-2 vocabulary: expected tokens with ids from 0")
    token = end or END_OF_TEXT
    if token not in entries:
        raise UserError(
            f"tokenizer: {path} lacks the token {token}; tokenizer.end_of_document names another, and "
            f"tokenizer.file takes the {FAST} of a tokenizer that is not GPT-2's"
        )
    return len(entries), int(entries[token])


def _read_fast(path: Path, end: str | None) -> tuple[int, int]:
    """Return size and end token of a ``tokenizer.json``; the size is the highest id's, added tokens too."""
    ids: dict[str, int] = load_fast(path).get_vocab(with_added_tokens=True)
    if not ids:
        raise UserError(f"tokenizer: {path}: its vocabulary is empty")
    return max(ids.values()) + 1, ids[_end_token(path, ids, end)]


def _end_token(path: Path, ids: dict[str, int], end: str | None) -> str:
    """Return the token that ends a document: of the configuration, the file next to it, or a common one."""
    stated = end or _read_stated_end(path.with_name("tokenizer_config.json"))
    if stated is not None:
        if stated not in ids:
            raise UserError(f"tokenizer: {path} lacks the token {stated}, which is to end documents")
        return stated
    token = next((token for token in _ENDS if token in ids), None)
    if token is None:
        raise UserError(
            f"tokenizer: {path}: which token ends a document is not known: set tokenizer.end_of_document"
        )
    return token


def _read_stated_end(path: Path) -> str | None:
    try:
        token = json.loads(path.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _read_pieces(path: Path, content: bytes, end: str | None) -> tuple[int, int]:
    """Return size and end token of a SentencePiece model."""
    if not content:
        raise UserError(f"tokenizer: {path}: empty file")
    processor = load_pieces(path)
    number = processor.eos_id() if end is None else processor.piece_to_id(end)
    if number < 0 or (end is not None and processor.id_to_piece(number) != end):
        missing = f"the piece {end}" if end else "a piece that ends a document, such as </s>"
        raise UserError(f"tokenizer: {path} lacks {missing}; tokenizer.end_of_document names another")
    return processor.get_piece_size(), number


def _is_json(content: bytes) -> bool:
    return content[:256].lstrip().startswith(b"{")


def _library(name: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing_library(name, purpose) from None


def load_bpe(paths: Sequence[Path]) -> Any:
    """Load GPT-2's two files."""
    library = _library("tokenizers", "encoding")
    try:
        return library.ByteLevelBPETokenizer(*map(str, paths))
    except Exception as error:
        raise UserError(f"tokenizer: {paths[0]} and {paths[1].name}: not GPT-2's: {error}") from None


def load_fast(path: Path) -> Any:
    """Load a ``tokenizer.json``."""
    library = _library("tokenizers", "encoding")
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:
        raise UserError(f"tokenizer: {path}: not a tokenizer.json: {error}") from None
    # Those of the file are for batches of a model, and would cut documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_pieces(path: Path) -> Any:
    """Load a SentencePiece model."""
    library = _library("sentencepiece", f"reading {path}")
    try:
        return library.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        raise UserError(
            f"tokenizer: {path}: neither a tokenizer.json of Hugging Face nor a SentencePiece model"
        ) from None


def _train(directory: Path, texts: Iterator[str], vocabulary: int) -> None:
    tokenizer = _library("tokenizers", "training a tokenizer").ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts,
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    directory.mkdir(parents=True, exist_ok=True)
    # One file without the other is a mistake, unless this was killed between them.
    (directory / _UNFINISHED).touch()
    with TemporaryDirectory() as scratch:
        for path in sorted(map(Path, tokenizer.save_model(scratch))):
            write_atomic(directory / path.name, path.read_bytes())
    (directory / _UNFINISHED).unlink()


def _sample(files: Sequence[SourceFile], on_error: str) -> Iterator[str]:
    """Yield the first text of the sources.

    Raises
    ------
    UserError
        Without text: a tokenizer of bare bytes would be kept for all later runs.
    """
    total = 0
    first: BadRecord | None = None
    for file in files:
        for record in read(Piece(file.number), file):
            if isinstance(record, BadRecord):
                if on_error == "raise" or record.is_loss:
                    raise refusal(file, record)
                first = first or record
            else:
                yield record.text
                total += len(record.text.encode())
            if total >= _TRAINING_BYTES:
                return
    if not total:
        reason = f"; the first bad record is {place(files[first.file], first)}" if first else ""
        raise UserError(f"the sources have no text to train a tokenizer on{reason}")
