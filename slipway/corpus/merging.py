"""The phase `merge`: shards become data sets; each byte of them is read once, and written once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.arithmetic import indexed
from slipway.common.errors import UserError
from slipway.common.files import sync_path, write_atomic
from slipway.corpus import duplicates
from slipway.corpus.cleaning import DropCounts
from slipway.corpus.manifest import data_manifest, is_complete, publishing_file, summary
from slipway.corpus.plan import Plan
from slipway.corpus.progress import Progress, heartbeat, say
from slipway.corpus.shards import ShardPaths, find_abandoned, make_temporary_path, token_type, write_index
from slipway.corpus.tokenizing import check_bad

_CHUNK = 1 << 22
# Number of documents' lengths in memory at a time.
_DOCUMENTS = 1 << 20
_DROPPED, _NONE = -1, -2


def merge(plan: Plan) -> None:
    """Deduplicate, and write the outputs and the manifest; then remove the shards.

    Raises
    ------
    UserError
        If units are missing, there are more bad records than allowed, or no document at all.
    """
    preparation = plan.preparation
    if is_complete(plan):
        say(f"merge: {preparation.output_prefix} is there already, from the same inputs and options")
        shutil.rmtree(preparation.units_dir, ignore_errors=True)
        return
    records = _read_records(plan)
    check_bad(plan, records)
    shards = [plan.shard(unit) for unit in plan.units]
    counts = [int(record["documents"]) for record in records]
    drops = DropCounts()
    for record in records:
        drops.merge(record["drops"])
    kept = _deduplicate(plan, shards, counts, drops)
    with contextlib.ExitStack() as stack:
        outputs, per_file = _write(plan, shards, counts, kept, stack)
        manifest = data_manifest(
            plan,
            records,
            drops,
            [entry for output in outputs for entry in output.record()],
            per_file,
            np.sum([output.histogram for output in outputs], axis=0),
        )
        if not manifest["counts"]["documents"]:
            raise UserError(f"no document: {summary(plan, manifest)}")
        _publish(plan, outputs, manifest)
    say(summary(plan, manifest))
    shutil.rmtree(preparation.units_dir, ignore_errors=True)


def _read_records(plan: Plan) -> list[dict[str, Any]]:
    records, missing = [], []
    for unit in plan.units:
        record = plan.shard(unit).read_record(plan.unit_key(unit))
        if record is None:
            missing.append(unit.number)
        else:
            records.append(record)
    if missing:
        numbers = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise UserError(
            f"{len(missing):,} of {len(plan.units):,} units are not tokenized ({numbers}): run `tokenize` "
            "again; it does only these"
        )
    return records


def _deduplicate(
    plan: Plan, shards: Sequence[ShardPaths], counts: Sequence[int], drops: DropCounts
) -> npt.NDArray[np.bool_] | None:
    """Return True for each document that stays; None if all do. Count the others."""
    preparation = plan.preparation
    if not preparation.deduplicate.exact and preparation.deduplicate.minhash is None:
        return None
    say(f"merge: looking for duplicates among {sum(counts):,} documents")
    with heartbeat("merge: looking for duplicates"):
        repeated = duplicates.find(
            counts,
            [shard.path(".hashes") for shard in shards] if preparation.deduplicate.exact else None,
            [shard.path(".minhash") for shard in shards] if preparation.deduplicate.minhash else None,
            preparation.deduplicate.minhash,
            preparation.work_dir / "duplicates",
            preparation.workers,
        )
    starts = np.concatenate([[0], np.cumsum(counts)])

    def place(number: int) -> tuple[int, int]:
        unit = int(np.searchsorted(starts, number, side="right")) - 1
        with shards[unit].path(".origins").open("rb") as stream:
            stream.seek((number - int(starts[unit])) * indexed.ORIGIN.size)
            file, offset = indexed.ORIGIN.unpack(stream.read(indexed.ORIGIN.size))
        return file, offset

    repeated.count(drops, place)
    kept = np.ones(sum(counts), bool)
    kept[repeated.numbers] = False
    return kept


def _write(
    plan: Plan,
    shards: Sequence[ShardPaths],
    counts: Sequence[int],
    kept: npt.NDArray[np.bool_] | None,
    stack: contextlib.ExitStack,
) -> tuple[list[Output], npt.NDArray[np.int64]]:
    """Write the outputs under temporary names; return them, and the documents of each source file.

    At the end, `stack` removes those that were not published.
    """
    preparation = plan.preparation
    dtype = token_type(plan.tokenizer.vocabulary_size)
    names: list[str | None] = list(preparation.splits or ()) or [None]
    preparation.output_prefix.parent.mkdir(parents=True, exist_ok=True)
    for path in find_abandoned(preparation.output_prefix.parent, preparation.output_prefix.name):
        path.unlink(missing_ok=True)
    outputs = [Output(preparation.prefix_of(name), dtype, name) for name in names]
    for output in outputs:
        stack.callback(output.discard)
    per_file = np.zeros(len(plan.files), np.int64)
    size = sum(shard.path(".bin").stat().st_size for shard in shards)
    start = 0
    with Progress("merging", size, len(shards), "units") as progress:
        for shard, count in zip(shards, counts, strict=True):
            kept_here = None if kept is None else kept[start : start + count]
            targets = _targets(plan, shard, count, kept_here)
            start += count
            origins = shard.origins()
            stays = targets != _DROPPED
            per_file += np.bincount(origins["file"][stays], minlength=len(per_file))
            _distribute(shard, origins, targets, outputs)
            progress.advance(shard.path(".bin").stat().st_size, 1)
    for output in outputs:
        output.finish()
    return outputs, per_file


def _targets(
    plan: Plan, shard: ShardPaths, count: int, kept: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.int64]:
    """Return the number of the output of each document of a shard, or `_DROPPED`."""
    targets = np.zeros(count, np.int64)
    if plan.preparation.splits:
        # Documents of the same text are in the same split, so that none is held out that was trained on.
        bounds = np.cumsum(list(plan.preparation.splits.values()))[:-1]
        shares = shard.hashes()[:, 0] / 2.0**64
        targets = np.searchsorted(bounds, shares, side="right").astype(np.int64)
    if kept is not None:
        targets[~kept] = _DROPPED
    return targets


def _distribute(
    shard: ShardPaths, origins: npt.NDArray[Any], targets: npt.NDArray[np.int64], outputs: Sequence[Output]
) -> None:
    """Copy the documents of a shard to their outputs, runs of neighbours at once."""
    lengths = shard.lengths()
    ends = np.cumsum(lengths, dtype=np.int64) * outputs[0].dtype.itemsize
    # The last document of each run; one beyond the last document, to compare with, is like none.
    lasts = np.flatnonzero(targets != np.append(targets[1:], _NONE))
    begin = 0
    with shard.path(".bin").open("rb", buffering=0) as stream:
        for last in lasts:
            end, target = int(ends[last]), int(targets[last])
            if target == _DROPPED:
                stream.seek(end)
            else:
                outputs[target].copy(stream, end - begin)
            begin = end
    for number, output in enumerate(outputs):
        chosen = targets == number
        output.add(lengths[chosen], origins[chosen])


class Output:
    """Data set under temporary names: ``.bin``, ``.idx`` and ``.origins``.

    Parameters
    ----------
    prefix
        Final path without suffix.
    dtype
        Type of the tokens.
    split
        Name of the split, if there are splits.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any], split: str | None) -> None:
        self.prefix, self.dtype, self.split = prefix, dtype, split
        self.documents = self.tokens = 0
        # By the lengths' number of bits.
        self.histogram = np.zeros(33, np.int64)
        self._files = {suffix: self._open(suffix) for suffix in (".bin", ".origins")}
        self._lengths = self._open(".lengths")

    def copy(self, stream: Any, size: int) -> None:
        """Append bytes of a stream to ``.bin``."""
        while size:
            chunk = stream.read(min(size, _CHUNK))
            if not chunk:
                raise OSError(f"{stream.name}: it ends before its index says")
            self._files[".bin"].write(chunk)
            size -= len(chunk)

    def add(self, lengths: npt.NDArray[np.int32], origins: npt.NDArray[Any]) -> None:
        """Append documents to the index and the origins."""
        self._lengths.write(lengths.tobytes())
        self._files[".origins"].write(origins.tobytes())
        self.documents += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))
        bits = np.frexp(lengths.astype(np.float64))[1]
        self.histogram += np.bincount(bits, minlength=len(self.histogram))

    def finish(self) -> None:
        """Write ``.idx``, and bring all to the disk."""
        self._lengths.close()
        self._files[".idx"] = self._open(".idx")
        write_index(self._files[".idx"], self.dtype, self.documents, self._read_lengths)
        self._lengths.path.unlink()
        for file in self._files.values():
            file.close()

    def record(self) -> list[dict[str, Any]]:
        """Return the manifest's entries of the files."""
        entries = []
        for suffix in (".bin", ".idx", ".origins"):
            file = self._files[suffix]
            entry: dict[str, Any] = {"path": f"{self.prefix.name}{suffix}", "size": file.size}
            entry |= {"sha256": file.sha256, "documents": self.documents, "tokens": self.tokens}
            entries.append(entry)
        return entries

    def publish(self) -> None:
        """Rename the files, the index last; a reader that finds an index finds its data."""
        for suffix, file in self._files.items():
            file.path.replace(f"{self.prefix}{suffix}")

    def discard(self) -> None:
        """Remove the temporary files that are still there."""
        for file in (*self._files.values(), self._lengths):
            file.discard()

    def _open(self, suffix: str) -> _HashedFile:
        return _HashedFile(_temporary(self.prefix, suffix))

    def _read_lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        with self._lengths.path.open("rb") as stream:
            while len(part := np.fromfile(stream, "<i4", _DOCUMENTS)):
                yield part


class _HashedFile:
    """File for writing that returns its size and SHA-256 at the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._digest = hashlib.sha256()
        self._stream = path.open("wb", buffering=1 << 20)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, content: Any) -> None:
        self._stream.write(content)
        self._digest.update(content)
        self.size += memoryview(content).nbytes

    def close(self) -> None:
        """Bring it to the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def discard(self) -> None:
        # A failed flush to a full disk does not matter.
        with contextlib.suppress(OSError):
            self._stream.close()
        self.path.unlink(missing_ok=True)


def _temporary(prefix: Path, suffix: str) -> Path:
    return make_temporary_path(prefix.parent, f"{prefix.name}{suffix}")


def _publish(plan: Plan, outputs: Sequence[Output], manifest: dict[str, Any]) -> None:
    prefix = plan.preparation.output_prefix
    path = indexed.manifest_path(prefix)
    write_atomic(publishing_file(plan), plan.key)
    # A manifest, or an index, would vouch for data that it does not describe.
    path.unlink(missing_ok=True)
    for output in outputs:
        Path(f"{output.prefix}.idx").unlink(missing_ok=True)
    for output in outputs:
        output.publish()
    sync_path(prefix.parent)
    # Under a name that the next merge knows, should this one be killed here.
    file = _HashedFile(_temporary(prefix, ".manifest.json"))
    file.write((json.dumps(manifest, indent=1) + "\n").encode())
    file.close()
    file.path.replace(path)
    sync_path(prefix.parent)
