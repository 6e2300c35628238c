"""Encode text files with several single-threaded processes.

Two such processes were 1.4 times as fast as the library's own threads on two cores. The worker side imports
neither torch nor megatron-core.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data import bpe
from trainer.data.corpus import TextFile, read_text

_CHUNK_BYTES = 1_000_000
_REPORT_SECONDS = 3.0

_worker: dict[str, Any] = {}


@dataclass(frozen=True)
class Chunk:
    """The documents of some consecutive files: all their tokens, each document's length, files left out."""

    tokens: npt.NDArray[np.int32]
    lengths: list[int]
    skipped: int
    size: int


def encode(
    files: Sequence[TextFile], tokenizer: Path, workers: int, say: Callable[[str], None]
) -> Iterator[Chunk]:
    """Yield the files' documents in order, whatever the number of workers.

    Parameters
    ----------
    files
        One document each; a file that is empty or not UTF-8 is skipped.
    tokenizer
        Directory with ``vocab.json`` and ``merges.txt``.
    workers
        Number of processes.
    say
        Called with a line of progress every few seconds.
    """
    # The environment is how tokenizers is told; a spawned worker inherits it.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("spawn")
    total = sum(file.size for file in files)
    done, reported = 0, time.monotonic()
    with context.Pool(workers, initializer=_start_worker, initargs=(tokenizer,)) as pool:
        for chunk in pool.imap(_encode_chunk, _chunks(files)):
            yield chunk
            done += chunk.size
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                say(f"tokenizing: {done:,} of {total:,} bytes ({100 * done / max(total, 1):.0f} %)")


def _chunks(files: Sequence[TextFile]) -> Iterator[list[TextFile]]:
    chunk: list[TextFile] = []
    size = 0
    for file in files:
        chunk.append(file)
        size += file.size
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _start_worker(tokenizer: Path) -> None:
    _worker["tokenizer"] = bpe.load(tokenizer)
    _worker["end_of_text"] = bpe.sizes(tokenizer)[1]


def _encode_chunk(files: list[TextFile]) -> Chunk:
    contents = [read_text(file.path) for file in files]
    texts = [text for text in contents if text]
    # Encoding one by one keeps memory small; a batch gains nothing without threads.
    documents = [[*_worker["tokenizer"].encode(text).ids, _worker["end_of_text"]] for text in texts]
    tokens = np.fromiter((token for document in documents for token in document), dtype=np.int32)
    return Chunk(
        tokens=tokens,
        lengths=[len(document) for document in documents],
        skipped=len(files) - len(texts),
        size=sum(file.size for file in files),
    )
