"""A case: sources and a tokenizer, what is right, and the process in which the preparation is tried.

A case runs in a process of its own with bounds on memory and processor time, as some sources are bombs. Ids
are compared with those of the library that made the tokenizer, for texts that the case has read by itself.
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Encode = Callable[[Sequence[str]], list[list[int]]]

# What a generated source may take at most: memory that is in use, and processor time of its process.
MEMORY = 2 << 30
SECONDS = 30
BOUNDED = ("source", "bomb")


@dataclass(frozen=True)
class Reference:
    """The tokenizer of a case: the keys that name it, the library's encoder, and the token of the end."""

    options: Mapping[str, Any]
    encode: Encode
    end: int


@dataclass(frozen=True)
class Expected:
    """The right outcome of a preparation.

    Attributes
    ----------
    inputs
        Entries of `data_preparation.inputs`.
    documents
        Texts in any order, without empty ones; None if the preparation is refused.
    words
        Of the refusal, or of what is said and recorded beside the data; alternatives are separated by ``|``.
    refusal
        Words of a refusal that is as right as the documents.
    tokenizer
        None is a small one of GPT-2's form.
    options
        Further keys of `data_preparation`.
    is_bomb
        Whatever is said is right, if it is said within the bounds.
    """

    inputs: Sequence[Any]
    documents: Sequence[str] | None = None
    words: Sequence[str] = ()
    refusal: Sequence[str] | None = None
    tokenizer: Reference | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_bomb: bool = False


@dataclass(frozen=True)
class Case:
    """A case by its name; `build` writes its files into a directory and returns what is right."""

    name: str
    group: str
    build: Callable[[Path], Expected | Outcome]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    `state` is `equal`, `refused`, `taken` (a bomb), `surprise`, or `absent` where its package is not there.
    """

    state: str
    why: str = ""
    documents: int = 0
    tokens: int = 0
    seconds: float = 0.0


def try_case(case: Case, directory: Path) -> Outcome:
    """Try a case in this process; return the outcome."""
    source = directory / "source"
    source.mkdir(parents=True)
    expected = case.build(source)
    if isinstance(expected, Outcome):
        return expected
    tokenizer = expected.tokenizer or small_tokenizer(directory / "bpe")
    before, began = time.process_time(), time.monotonic()
    code, said = prepare(directory, expected, tokenizer)
    seconds, processor = time.monotonic() - began, time.process_time() - before
    written = _documents(directory / "out" / "x") if code == 0 else None
    why = judge(expected, tokenizer, code, said, written)
    if case.group in BOUNDED and processor > SECONDS:
        why = why or f"it took {processor:.0f} s of processor time"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if case.group in BOUNDED and memory > MEMORY:
        why = why or f"it had {memory >> 20:,} MiB in memory"
    if why:
        return Outcome("surprise", f"{why}\n{said[-2000:]}", seconds=seconds)
    if written is None:
        return Outcome("refused", said.strip().splitlines()[-1], seconds=seconds)
    return Outcome(
        "taken" if expected.is_bomb else "equal", "", len(written), sum(map(len, written)), seconds
    )


def prepare(directory: Path, expected: Expected, tokenizer: Reference) -> tuple[int, str]:
    """Prepare the data as ``python -m slipway.corpus run`` does; return the exit code and the output."""
    import yaml

    from slipway.corpus.__main__ import main

    node = {
        "inputs": [str(entry) if isinstance(entry, Path) else entry for entry in expected.inputs],
        "output_prefix": str(directory / "out" / "x"),
        "tokenizer_dir": str(directory / "tokenizer"),
        "workers": 1,
        **tokenizer.options,
        **expected.options,
    }
    (directory / "preparation.yaml").write_text(yaml.safe_dump({"data_preparation": node}))
    arguments = ["run", "--config-path", str(directory), "--config-name", "preparation.yaml"]
    with tempfile.TemporaryFile("w+") as said:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code = main(arguments)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
                code = 1
        said.seek(0)
        return code, said.read()


def judge(
    expected: Expected, tokenizer: Reference, code: int, said: str, written: list[list[int]] | None
) -> str:
    """Return what is wrong with the outcome of a preparation; nothing if it is right."""
    if "Traceback" in said:
        return "a traceback"
    if expected.is_bomb and code in (0, 1, 2):
        return ""
    if written is None:
        words = expected.refusal if expected.documents is not None else expected.words
        if words is None or code not in (1, 2):
            return f"exit code {code}"
        return _missing(words, said)
    if expected.documents is None:
        return f"{len(written)} documents were taken, and the source was to be refused"
    ids = [[*document, tokenizer.end] for document in tokenizer.encode(expected.documents)]
    if sorted(ids) != sorted(written):
        return _difference(expected.documents, ids, written)
    return _missing(expected.words, said)


def _missing(words: Iterable[str], said: str) -> str:
    text = said.lower()
    missing = [word for word in words if not any(choice in text for choice in word.lower().split("|"))]
    return f"not said: {', '.join(missing)}" if missing else ""


def _difference(documents: Sequence[str], ids: list[list[int]], written: list[list[int]]) -> str:
    there = set(map(tuple, written))
    lost = [number for number, document in enumerate(ids) if tuple(document) not in there]
    first = f"; the first: {documents[lost[0]][:100]!r}: {ids[lost[0]][:20]}" if lost else ""
    more = [document for document in written if document not in ids]
    instead = f"; instead: {more[0][:20]}" if more else ""
    return (
        f"{len(written)} documents, expected {len(ids)}; {len(lost)} are not there with these ids"
        f"{first}{instead}"
    )


def _documents(prefix: Path) -> list[list[int]] | None:
    from tests.trainer.indexed_files import read

    if not prefix.with_suffix(".manifest.json").exists():
        return None
    (index,) = prefix.parent.glob("*.idx")
    return [
        [token for part in document for token in part] for document in read(index.with_suffix("")).documents
    ]


def small_tokenizer(directory: Path) -> Reference:
    """Train a small tokenizer of GPT-2's form; the same each time."""
    from tokenizers import ByteLevelBPETokenizer

    from benchmarks.torture.texts import TRAINING

    tokenizer: Any = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        TRAINING, vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_model(str(directory))
    return pair_reference(directory / "vocab.json", directory / "merges.txt")


def pair_reference(vocab: Path, merges: Path) -> Reference:
    """Return GPT-2's two files as the library reads them; special tokens in a text are text."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer: Any = ByteLevelBPETokenizer(str(vocab), str(merges))
    return Reference(
        {"tokenizer_dir": str(vocab.parent)},
        lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(list(texts))],
        tokenizer.token_to_id("<|endoftext|>"),
    )
