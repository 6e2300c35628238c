"""Checks of data sets and source files: ``python -m slipway.corpus lint PATH ...``."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipway.arithmetic import indexed
from slipway.common.errors import UserError, suggest
from slipway.common.files import sha256_of
from slipway.corpus.datasets import SUFFIXES, DataSet, open_data_set, prefix_of
from slipway.corpus.documents import Document
from slipway.corpus.errors import COUNTED, LeftOut, list_omitted
from slipway.corpus.formats import FORMATS, UnknownFormatError, recognize
from slipway.corpus.readers import parquet_row_groups, read
from slipway.corpus.sources import choose, search
from slipway.corpus.tokenizers import open_decoder
from slipway.corpus.units import Piece, SourceFile

Advance = Callable[[int], None]
Progress = Callable[[str, int, int | None], None]

# Places of each problem that are named.
_NAMED = 5
_SECONDS = 0.5
# Entries of a table, and bytes of a .bin, that are looked at together.
_ENTRIES = 1 << 16
_BYTES = 1 << 22
# Of a file's name: a sidecar of a data set, which is checked with it.
_SIDECARS = (".origins", ".json", ".idx", ".bin")


@dataclass
class Problem:
    """Something that is wrong: how often, and where first."""

    count: int = 0
    first: list[int] = field(default_factory=list)


@dataclass
class Report:
    """The result for a data set or a file.

    Attributes
    ----------
    path
        As it was named.
    kind
        ``data set``, or the format of a source file and its compression, such as ``jsonl.zst``.
    place
        The unit of the problems' places: ``document``, ``byte``, ``row``, ...; None without places.
    documents, tokens
        How many there are; None if not known.
    problems
        By reason.
    notes
        Checks that were left out, and why.
    """

    path: str
    kind: str
    place: str | None = None
    documents: int | None = None
    tokens: int | None = None
    problems: dict[str, Problem] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, reason: str, *places: int, count: int | None = None) -> None:
        """Count a problem at its places."""
        problem = self.problems.setdefault(reason, Problem())
        problem.count += count if count is not None else max(len(places), 1)
        problem.first += places[: _NAMED - len(problem.first)]


def print_reports(paths: Sequence[Path], source_format: str, text_key: str, tokenizer: Path | None) -> bool:
    """Print what :func:`lint` reports, a JSON object on each line; return True if nothing is wrong.

    Every now and then a line is ``{"progress": PATH, "done": BYTES, "total": BYTES}``.

    Raises
    ------
    UserError
        If there is no such path or tokenizer, or a format is not known.
    """
    if source_format not in ("auto", *FORMATS):
        valid = ", ".join(("auto", *FORMATS))
        raise UserError(f"--format {source_format}: valid are {valid}{suggest(source_format, FORMATS)}")
    vocabulary = open_decoder([tokenizer]).size if tokenizer else None
    is_whole = True
    for report in lint(paths, _report_progress(), source_format, text_key, vocabulary):
        print(json.dumps(asdict(report)), flush=True)
        is_whole = is_whole and not report.problems
    return is_whole


def _report_progress() -> Progress:
    last = time.monotonic()

    def report(path: str, done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            print(json.dumps({"progress": path, "done": done, "total": total}), flush=True)

    return report


def lint(
    paths: Sequence[Path],
    progress: Progress,
    source_format: str = "auto",
    text_key: str = "text",
    vocabulary: int | None = None,
) -> Iterator[Report]:
    """Yield a report for each data set and source file.

    Parameters
    ----------
    paths
        Prefixes of data sets, files, and directories to search.
    progress
        Called with a path, the bytes that are done and those in all, None if not known.
    source_format
        Format of source files, or ``auto``.
    text_key
        Key or column of the text.
    vocabulary
        Number of tokens of the tokenizer; None takes that of the manifest.

    Raises
    ------
    UserError
        If there is no such path, or a format is not known.
    """
    left_out: list[LeftOut] = []
    targets = [target for path in paths for target in _targets(path, left_out)]
    notes = [list_omitted(left_out)] if left_out else []
    sizes: dict[int, list[Path]] = {}
    for target in dict.fromkeys(targets):
        prefix = prefix_of(target)
        if prefix is not None:
            report = _lint_data_set(prefix, vocabulary, progress)
        else:
            report = _lint_source(target, source_format, text_key, progress)
        report.notes += notes
        notes = []
        is_file = prefix is None and target.is_file()
        earlier = sizes.setdefault(target.stat().st_size, []) if is_file else []
        if earlier:
            digest = sha256_of(target)
            same = next((path for path in earlier if sha256_of(path) == digest), None)
            if same is not None:
                report.add(f"the same content as {same}")
        earlier.append(target)
        yield report


def _targets(path: Path, left_out: list[LeftOut]) -> list[Path]:
    prefix = prefix_of(path)
    if prefix is not None:
        return [prefix]
    if path.is_file():
        return [path]
    if not path.is_dir():
        names = [str(other) for other in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file, directory or data set{suggest(str(path), names)}")
    files = [path / name for name in choose(search(path), "*", path, left_out)]
    data_sets = {file.with_suffix("") for file in files if file.suffix in SUFFIXES}
    others = [file for file in files if not _is_part(file, data_sets)]
    sources = [file for file in others if _is_source(file)]
    unknown = sorted(set(others).difference(sources))
    left_out += [LeftOut(str(file), "of no known format") for file in unknown]
    found = sorted(data_sets) + sources
    if not found:
        more = f"; {list_omitted(left_out)}" if left_out else ""
        raise UserError(f"{path}: neither a data set nor a source of text is in this directory{more}")
    return found


def _is_source(file: Path) -> bool:
    """Return True if the format of a file is known: in a directory, others are ignored."""
    try:
        recognize(file, str(file))
    except UnknownFormatError:
        return False
    except (UserError, OSError):
        pass  # linting the file names the defect
    return True


def _is_part(file: Path, data_sets: set[Path]) -> bool:
    """Return True for the files of a data set, its manifest and summary among them."""
    names = [str(file).removesuffix(suffix) for suffix in (".manifest.json", *_SIDECARS)]
    prefixes = {str(prefix) for prefix in data_sets}
    wholes = {prefix.rpartition("_")[0] for prefix in prefixes}
    return any(name != str(file) and name in prefixes | wholes for name in names)


# --- source files ---


def _lint_source(path: Path, source_format: str, text_key: str, progress: Progress) -> Report:
    report = Report(str(path), "unknown")
    groups: tuple[int, ...] = ()
    try:
        kind, compression = recognize(path, str(path), source_format)
        report.kind, report.place = ".".join(filter(None, (kind, compression))), COUNTED.get(kind)
        size = path.stat().st_size
        if kind == "parquet" and size:
            groups = parquet_row_groups(path, str(path), text_key)
    except UnknownFormatError:
        raise
    except (UserError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
        report.add(str(reason))
        return report
    file = SourceFile(0, str(path), path, size, "", kind, compression, text_key, groups)
    # Offsets of a compressed file are those of the text in it.
    total = size if kind == "jsonl" and compression is None else None
    ids = _Identifiers()
    report.documents = 0
    left_out: list[LeftOut] = []
    for record in read(Piece(0), file, left_out.append):
        progress(str(path), record.offset if total else report.documents, total)
        if not isinstance(record, Document):
            report.add(record.reason, record.offset)
            continue
        report.documents += 1
        if record.is_empty:
            report.add("empty text", record.offset)
        if record.id is not None:
            ids.add(record.id, record.offset)
    report.notes += [list_omitted(left_out)] if left_out else []
    for offset in ids.repeated():
        report.add("an id that an earlier record has", offset)
    return report


class _Identifiers:
    """Identifiers of records, in 16 bytes each: their hashes, and where they are."""

    def __init__(self) -> None:
        self._hashes, self._offsets = array("Q"), array("Q")

    def add(self, identifier: str, offset: int) -> None:
        digest = hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._hashes.append(int.from_bytes(digest, "little"))
        self._offsets.append(offset)

    def repeated(self) -> list[int]:
        """Return the offsets of the records that repeat an id, in order."""
        hashes = np.array(self._hashes, dtype=np.uint64)
        _, first = np.unique(hashes, return_index=True)
        is_repeated = np.ones(len(hashes), dtype=bool)
        is_repeated[first] = False
        return [self._offsets[index] for index in np.flatnonzero(is_repeated)]


# --- data sets ---


def _lint_data_set(prefix: Path, vocabulary: int | None, progress: Progress) -> Report:
    report = Report(str(prefix), "data set", "document")
    missing = [suffix for suffix in SUFFIXES if not Path(f"{prefix}{suffix}").is_file()]
    if missing:
        report.add(f"there is no {Path(f'{prefix}{missing[0]}').name}")
        return report
    try:
        data = open_data_set(prefix)
    except UserError as error:
        report.add(str(error).removeprefix(f"{prefix}: "))
        return report
    report.documents = data.documents
    report.tokens = int(data.lengths.sum(dtype=np.int64))
    _check_tables(report, data)
    manifest = _manifest(report, prefix)
    vocabulary = vocabulary or manifest.get("tokenizer", {}).get("vocabulary_size")
    size = Path(f"{prefix}.bin").stat().st_size
    expected = report.tokens * data.header.token_bytes
    if size != expected:
        report.add(f"its .idx tells of {expected:,} bytes of tokens, its .bin has {size:,}")
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(str(prefix), done, size)

    digest = _check_tokens(report, data, vocabulary, advance) if data.header.dtype[0] in "ui" else None
    _check_outputs(report, data, manifest, digest)
    _check_origins(report, data, manifest)
    return report


def _check_tables(report: Report, data: DataSet) -> None:
    """Check what Megatron takes for granted: order, and the ends of the tables."""
    if data.header.dtype[0] not in "ui":
        report.add(f"tokens are whole numbers, but these are {data.header.dtype}")
    if not len(data.boundaries) or data.boundaries[0] != 0:
        report.add("its first document does not begin at the first sequence")
    elif data.boundaries[-1] != data.header.sequences:
        report.add(f"its documents end at sequence {int(data.boundaries[-1]):,} of {data.header.sequences:,}")
    following = 0
    for start in range(0, len(data.lengths), _ENTRIES):
        sizes = data.lengths[start : start + _ENTRIES].astype(np.int64) * data.header.token_bytes
        ends = following + np.cumsum(sizes)
        wrong = np.flatnonzero((data.pointers[start : start + _ENTRIES] != ends - sizes) | (sizes < 0))
        if len(wrong):
            report.add(f"sequence {start + int(wrong[0]):,} does not begin where the one before ends")
            break
        following = int(ends[-1])
    for start in range(0, data.documents, _ENTRIES):
        steps = np.diff(data.boundaries[start : start + _ENTRIES + 1])
        wrong = np.flatnonzero(steps < 0)
        if len(wrong):
            report.add(
                "a document that ends before it begins",
                *(start + int(number) for number in wrong[:_NAMED]),
                count=len(wrong),
            )


def _check_tokens(report: Report, data: DataSet, vocabulary: int | None, advance: Advance) -> str:
    """Read the ``.bin`` once; return its SHA-256."""
    if vocabulary is None:
        report.notes.append("tokens are not compared with a vocabulary: name it with --tokenizer")
    digest, position, dtype = hashlib.sha256(), 0, np.dtype(data.header.dtype)
    with Path(f"{data.prefix}.bin").open("rb", buffering=0) as stream:
        while chunk := stream.read(_BYTES):
            digest.update(chunk)
            tokens = np.frombuffer(chunk, dtype, len(chunk) // dtype.itemsize)
            wrong = (tokens < 0) | (tokens >= vocabulary) if vocabulary is not None else tokens[:0]
            if wrong.any():
                places = position + np.flatnonzero(wrong)
                report.add(
                    f"a token of no vocabulary of {vocabulary:,}",
                    *(_document_at(data, int(place)) for place in places[:_NAMED]),
                    count=len(places),
                )
            position += len(tokens)
            advance(len(chunk))
    return digest.hexdigest()


def _document_at(data: DataSet, token: int) -> int:
    """Return the document that holds a token; the data set's tables may be wrong."""
    sequence = int(np.searchsorted(data.pointers, token * data.header.token_bytes, side="right")) - 1
    return int(np.searchsorted(data.boundaries, sequence, side="right")) - 1


def _manifest(report: Report, prefix: Path) -> dict[str, Any]:
    path = indexed.manifest_path(prefix)
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("expected an object")
    except FileNotFoundError:
        report.notes.append("no manifest: its digest and sources are not known")
        return {}
    except (OSError, ValueError) as error:
        report.add(f"{path.name}: not a manifest: {error}")
        return {}
    return content


def _check_outputs(report: Report, data: DataSet, manifest: dict[str, Any], digest: str | None) -> None:
    """Compare the files with the manifest."""
    for output in manifest.get("outputs", ()):
        path = data.prefix.with_name(Path(output["path"]).name)
        if path.name == f"{data.prefix.name}.bin" and digest is not None:
            found = digest
        elif path.name in (f"{data.prefix.name}.idx", indexed.origins_path(data.prefix).name):
            found = sha256_of(path) if path.is_file() else "none"
        else:
            continue
        if found != output["sha256"]:
            report.add(f"{path.name}: its sha256 is {found}, in the manifest it is {output['sha256']}")
        for name, count in (("documents", report.documents), ("tokens", report.tokens)):
            if output.get(name) not in (None, count):
                report.add(f"{path.name}: {count:,} {name}, in the manifest there are {output[name]:,}")


def _check_origins(report: Report, data: DataSet, manifest: dict[str, Any]) -> None:
    path = indexed.origins_path(data.prefix)
    if not path.is_file():
        if manifest:
            report.add(f"there is no {path.name}")
        return
    size, expected = path.stat().st_size, data.documents * indexed.ORIGIN.size
    if size != expected:
        report.add(f"{path.name}: {size:,} bytes, and {data.documents:,} documents have {expected:,}")
        return
    if not manifest or not size:
        return
    files = np.memmap(path, [("file", "<u4"), ("offset", "<u8")], mode="r")["file"]
    wrong = np.flatnonzero(files >= len(manifest.get("sources", ())))
    if len(wrong):
        report.add("a source that is not in the manifest", *map(int, wrong[:_NAMED]), count=len(wrong))
