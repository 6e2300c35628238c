"""Duplicates: exact ones by a hash of the text, near ones by datatrove's MinHash.

Each unit leaves hashes and signatures, and the merge decides over all of them at once. Of documents that are
the same, the first in the order of the sources stays. Documents have numbers here: their position among all
that the units kept, from 0.

The signatures of a unit are in one file, bucket after bucket, with rows as datatrove has them:
``hashes_per_bucket`` numbers of 8 bytes, and the document's position in the unit in 4.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipway.corpus.cleaning import DropCounts, load_datatrove, load_words
from slipway.corpus.workers import map_unordered

if TYPE_CHECKING:
    from slipway.common.sections import MinHash

EXACT, NEAR = "exact_duplicate", "near_duplicate"
# Shingles of a long document are hashed in parts: datatrove's matrix has 8 bytes per shingle and hash.
_SHINGLES = 4096
# Documents of one sorted file of signatures; datatrove opens all files of a bucket at once.
_DOCUMENTS_PER_FILE = 1_000_000
# Below this, starting processes costs more than they save.
_DOCUMENTS_FOR_PROCESSES = 100_000

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Duplicates:
    """Documents to drop.

    Attributes
    ----------
    numbers
        Numbers of the documents, ascending.
    originals
        For each, the number of the document that stays in its place.
    are_exact
        For each, True for an exact duplicate.
    """

    numbers: Numbers
    originals: Numbers
    are_exact: npt.NDArray[np.bool_]

    def count(self, drops: DropCounts, place: Callable[[int], tuple[int, int]]) -> None:
        """Count the documents as dropped; `place` maps a document to its source file and offset."""
        for number, original, is_exact in zip(self.numbers, self.originals, self.are_exact, strict=True):
            file, offset = place(int(original))
            reason = EXACT if is_exact else NEAR
            drops.add(reason, *place(int(number)), same_as={"file": file, "offset": offset})


class Signatures:
    """Writer of the signatures of one unit.

    Parameters
    ----------
    path
        File of the unit's signatures.
    options
        Shingles and buckets.
    """

    def __init__(self, path: Path, options: MinHash) -> None:
        self._path, self._options = path, options
        self._block = _signature_block(path.parent, options)
        self._row = _row(options)
        self._rows_path = path.with_name(f"{path.name}-by-document")
        self._file = self._rows_path.open("wb", buffering=1 << 20)
        self._documents = 0

    def add(self, text: str) -> None:
        """Add the next document; one that is shorter than a shingle is like no other."""
        shingles = self._block.get_shingles(text)
        if shingles.size:
            parts = range(0, len(shingles), _SHINGLES)
            hashes = [self._block.get_signature(shingles[part : part + _SHINGLES]) for part in parts]
            rows = np.empty(self._options.buckets, self._row)
            rows["hashes"] = np.array(hashes, "<u8").min(axis=0)
            rows["document"] = self._documents
            self._file.write(rows.data)
        self._documents += 1

    def close(self) -> None:
        """Write the file, and bring it to the disk."""
        self._file.close()
        count = self._rows_path.stat().st_size // self._row.itemsize
        with self._path.open("wb") as file:
            if count:
                rows = np.memmap(self._rows_path, self._row, "r").reshape(-1, self._options.buckets)
                for bucket in range(self._options.buckets):
                    np.ascontiguousarray(rows[:, bucket]).tofile(file)
            file.flush()
            os.fsync(file.fileno())
        self._rows_path.unlink()


def check(options: MinHash | None) -> None:
    """Check that near duplicates can be found.

    Raises
    ------
    UserError
        If a library is missing, or the language unknown.
    """
    if options is not None:
        _signature_block(Path(), options)


def find(
    counts: Sequence[int],
    hashes: Sequence[Path] | None,
    signatures: Sequence[Path] | None,
    options: MinHash | None,
    scratch: Path,
    workers: int = 1,
) -> Duplicates:
    """Find the documents to drop.

    Parameters
    ----------
    counts
        Number of documents of each unit.
    hashes
        File of each unit with 16 bytes per document; None does not look for exact duplicates.
    signatures
        File of each unit; None does not look for near duplicates.
    options
        As the signatures were made.
    scratch
        Directory for temporary files, removed at the end.
    """
    total = sum(counts)
    # The document that stays, for each; itself if it stays.
    original = np.arange(total)
    if hashes is not None:
        original = _find_first_equals(hashes, total)
    are_exact = original != np.arange(total)
    if signatures is not None and options is not None:
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            near = _clusters(counts, signatures, options, scratch, workers)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        # The first of a cluster is no exact duplicate: its double would be in the cluster, before it.
        for number, first in near:
            if number != first and not are_exact[number]:
                original[number] = first
    numbers = np.flatnonzero(original != np.arange(total))
    return Duplicates(numbers, original[numbers], are_exact[numbers])


def _find_first_equals(paths: Sequence[Path], total: int) -> Numbers:
    """Return for each document the number of the first one with the same hash."""
    hashes = np.empty((total, 2), "<u8")
    start = 0
    for path in paths:
        values = np.fromfile(path, "<u8").reshape(-1, 2)
        hashes[start : start + len(values)] = values
        start += len(values)
    if start != total:
        raise ValueError(f"{start:,} hashes of {total:,} documents")
    # Stable: equal hashes remain in the order of their numbers.
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    hashes = hashes[order]
    begins = np.ones(total, bool)
    begins[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    first = np.empty(total, np.int64)
    first[order] = order[begins][np.cumsum(begins) - 1] if total else order
    return first


def _clusters(
    counts: Sequence[int], paths: Sequence[Path], options: MinHash, scratch: Path, workers: int
) -> list[tuple[int, int]]:
    """Return each document that has near duplicates, with the first document of its cluster."""
    processes = workers if sum(counts) >= _DOCUMENTS_FOR_PROCESSES else 1
    # Each process makes the function for its buckets.
    work: Callable[[], Callable[[int], None]] = partial(partial, _match, counts, paths, options, scratch)
    for _ in map_unordered(work, range(options.buckets), processes):
        pass
    minhash = load_datatrove("pipeline.dedup.minhash")
    found = scratch / "clusters"
    minhash.MinhashDedupCluster(
        str(scratch / "pairs"), str(found), _config(minhash, options), save_cluster_id=True
    ).run()
    files = [np.fromfile(path, "<u4").reshape(-1, 2) for path in sorted(found.glob("*.clusters"))]
    if not files:
        return []
    members, ids = np.concatenate(files).astype(np.int64).T
    first = np.full(ids.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, ids, members)
    return list(zip(members.tolist(), first[ids].tolist(), strict=True))


def _match(
    counts: Sequence[int], paths: Sequence[Path], options: MinHash, scratch: Path, bucket: int
) -> None:
    """Find the pairs of documents that agree in a bucket, and leave them in files."""
    signatures = scratch / "signatures"
    directory = signatures / f"bucket_{bucket:03d}"
    directory.mkdir(parents=True)
    for number, rows in enumerate(_join_signatures(counts, paths, options, bucket)):
        columns = [rows["document"], *reversed(rows["hashes"].T)]
        rows[np.lexsort(columns)].tofile(directory / f"{number:05d}.minhash.sig")
    minhash = load_datatrove("pipeline.dedup.minhash")
    config = _config(minhash, options)
    minhash.MinhashDedupBuckets(
        str(signatures), str(scratch / "pairs"), config=config, lines_to_buffer=1000
    ).run(rank=bucket, world_size=options.buckets)
    shutil.rmtree(directory)


def _join_signatures(counts: Sequence[int], paths: Sequence[Path], options: MinHash, bucket: int) -> Any:
    """Yield the signatures of many units at a time, with the documents' numbers."""
    row = _row(options)
    parts: list[npt.NDArray[Any]] = []
    held = start = 0
    for count, path in zip(counts, paths, strict=True):
        each = path.stat().st_size // (row.itemsize * options.buckets)
        rows = np.fromfile(path, row, each, offset=bucket * each * row.itemsize)
        rows["document"] += start
        parts.append(rows)
        start += count
        held += count
        if held >= _DOCUMENTS_PER_FILE:
            yield np.concatenate(parts)
            parts, held = [], 0
    if parts:
        yield np.concatenate(parts)


def _signature_block(directory: Path, options: MinHash) -> Any:
    minhash = load_datatrove("pipeline.dedup.minhash")
    words = load_datatrove("utils.word_tokenizers")
    if options.language:
        tokenizer = load_words("data_preparation.deduplicate.minhash", options.language)
    else:
        # datatrove has normalized the text before: no punctuation is left. spaCy takes six times as long.
        tokenizer = words.WhitespaceTokenizer()
        tokenizer.word_tokenize = str.split
    return minhash.MinhashDedupSignature(str(directory), _config(minhash, options), tokenizer)


def _config(minhash: Any, options: MinHash) -> Any:
    return minhash.MinhashConfig(
        n_grams=options.ngram, num_buckets=options.buckets, hashes_per_bucket=options.hashes_per_bucket
    )


def _row(options: MinHash) -> np.dtype[Any]:
    return np.dtype([("hashes", "<u8", (options.hashes_per_bucket,)), ("document", "<u4")])
