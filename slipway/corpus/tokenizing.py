"""The phase `tokenize`: units become shards; finished ones are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from slipway.common.errors import UserError
from slipway.corpus.cleaning import Cleaner, DropCounts
from slipway.corpus.documents import Document, Record
from slipway.corpus.duplicates import Signatures
from slipway.corpus.errors import BadRecord, LeftOut, place, refusal
from slipway.corpus.fast_encoding import DifferentIdsError, FastEncoder, UnsupportedError
from slipway.corpus.manifest import NAMED, is_complete
from slipway.corpus.plan import Plan
from slipway.corpus.progress import Progress, say
from slipway.corpus.readers import read
from slipway.corpus.shards import ShardWriter, find_abandoned, token_type
from slipway.corpus.tokenizers import BatchEncoder, open_tokenizer
from slipway.corpus.units import Unit, size_of
from slipway.corpus.workers import map_unordered

# Texts that are encoded together: enough that a call costs nothing, few enough for memory.
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 18, 1024
EMPTY = "empty"


def tokenize(plan: Plan, task: int = 0, tasks: int = 1) -> None:
    """Encode the units `task`, `task` + `tasks`, ... that are not done yet.

    Raises
    ------
    UserError
        If a record is bad and `on_error` is ``raise``, or a source has changed.
    """
    preparation = plan.preparation
    if is_complete(plan):
        say(f"tokenize: {preparation.output_prefix} is there already, from the same inputs and options")
        return
    mine = plan.units[task::tasks]
    for directory in find_abandoned(preparation.units_dir):
        shutil.rmtree(directory, ignore_errors=True)
    units = []
    for unit in mine:
        record = plan.shard(unit).read_record(plan.unit_key(unit))
        if record is None:
            units.append(unit)
        else:
            check_bad(plan, [record])
    name = f"task {task + 1} of {tasks}: " if tasks > 1 else ""
    size = sum(unit_size(plan, unit) for unit in units)
    say(f"tokenize: {name}{len(mine):,} units, {len(mine) - len(units):,} of them done before")
    progress = Progress("tokenizing", size, len(units), "units")
    work: Callable[[], Callable[[Unit], dict[str, Any]]] = partial(
        _Worker, plan, units[0].number if units else 0
    )
    with progress:
        for record in map_unordered(work, units, preparation.workers):
            progress.advance(unit_size(plan, plan.units[record["unit"]]), 1)


def unit_size(plan: Plan, unit: Unit) -> int:
    """Return the bytes of the sources that a unit reads."""
    return sum(size_of(piece, plan.files[piece.file]) for piece in unit.pieces)


def check_bad(plan: Plan, records: list[dict[str, Any]]) -> None:
    """Check the bad records of units against `on_error` and `max_errors`.

    Raises
    ------
    UserError
        If there are more than allowed.
    """
    preparation = plan.preparation
    bad = sum(record["bad"] for record in records)
    if not bad:
        return
    first = next(record for record in records if record["bad"])["skipped"][0]
    if preparation.on_error == "raise":
        raise refusal(plan.files[first[0]], BadRecord(*first))
    documents = sum(record["documents"] + sum(record["drops"]["counts"].values()) for record in records)
    # A share of few documents says nothing: only the merge knows all.
    is_whole = len(records) == len(plan.units) or preparation.max_errors >= 1
    if is_whole and not preparation.allows(bad, documents):
        limit = f"{preparation.max_errors:g}"
        raise UserError(
            f"{bad:,} bad records besides {documents:,} documents are more than max_errors={limit} allows; "
            f"the first is {place(plan.files[first[0]], BadRecord(*first))}; "
            f"data_preparation.max_errors={bad} allows them"
        )


class _Worker:
    """Process that makes shards of units; that of unit `first` says how it encodes.

    It encodes by gigatoken where that gives the ids of the reference, which else does the work.
    """

    def __init__(self, plan: Plan, first: int) -> None:
        tokenizer, self._plan, self._first = plan.tokenizer, plan, first
        self._type = token_type(tokenizer.vocabulary_size)
        self._end = (tokenizer.end_of_document,) if plan.preparation.append_eod else ()
        self._cleaner = Cleaner(plan.preparation.filters)
        self._reference = open_tokenizer(tokenizer)
        self._fast: FastEncoder | str
        try:
            self._fast = FastEncoder(tokenizer.kind, tokenizer.paths, self._reference)
        except UnsupportedError as error:
            self._fast = str(error)

    def __call__(self, unit: Unit) -> dict[str, Any]:
        if isinstance(self._fast, str):
            if unit.number == self._first:
                say(f"tokenize: without the fast path: {self._fast}")
            return self._shard(unit, self._reference)
        self._fast.start(self._plan.unit_key(unit))
        try:
            return self._shard(unit, self._fast.encode)
        except DifferentIdsError as error:
            say(f"tokenize: unit {unit.number} is encoded again, without the fast path: {error}")
            return self._shard(unit, self._reference)

    def _shard(self, unit: Unit, encode: BatchEncoder) -> dict[str, Any]:
        plan, preparation = self._plan, self._plan.preparation
        drops, skipped, bad, tokens, documents = DropCounts(), [], 0, 0, 0
        left_out: list[list[str]] = []
        unread = 0

        def documents_of(records: Iterator[Record]) -> Iterator[Document]:
            nonlocal bad
            for record in records:
                if isinstance(record, BadRecord):
                    if preparation.on_error == "raise" or record.is_loss:
                        raise refusal(plan.files[record.file], record)
                    bad += 1
                    if bad <= NAMED:
                        skipped.append([record.file, record.offset, record.reason])
                elif record.is_empty:
                    drops.add(EMPTY, record.file, record.offset)
                else:
                    result = self._cleaner.clean(record)
                    if isinstance(result, str):
                        drops.add(result, record.file, record.offset, text=record.text)
                    else:
                        yield result

        def leave_out(entry: LeftOut) -> None:
            nonlocal unread
            unread += 1
            if unread <= NAMED:
                left_out.append([entry.name, entry.reason])

        records = (
            record for piece in unit.pieces for record in read(piece, plan.files[piece.file], leave_out)
        )
        minhash = preparation.deduplicate.minhash
        with ShardWriter(plan.shard(unit), self._type, preparation.needs_hashes) as shard:
            signatures = Signatures(shard.minhash, minhash) if minhash else None
            for batch in _batches(documents_of(records)):
                texts = [document.text for document in batch]
                for document, ids in zip(batch, encode(texts), strict=True):
                    text = document.text.encode() if preparation.needs_hashes else None
                    encoded = np.empty(len(ids) + len(self._end), self._type)
                    encoded[: len(ids)], encoded[len(ids) :] = ids, self._end
                    shard.add(encoded, text, document.file, document.offset)
                    if signatures is not None:
                        signatures.add(document.text)
                    tokens += len(encoded)
                documents += len(batch)
            if signatures is not None:
                signatures.close()
            record = {
                "key": plan.unit_key(unit),
                "unit": unit.number,
                "documents": documents,
                "tokens": tokens,
                "bad": bad,
                "skipped": skipped,
                "drops": drops.record(),
                "left_out": [unread, left_out],
            }
            check_bad(plan, [record])
            shard.publish(record)
        return record


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
