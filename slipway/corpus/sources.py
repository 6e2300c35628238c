"""Sources: from the entries of `inputs` to local files in their final order, recorded in ``sources.json``."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slipway.arithmetic.globs import split_glob
from slipway.common.errors import UserError
from slipway.common.files import open_regular, sha256_of, write_atomic
from slipway.common.sections import Input
from slipway.corpus.errors import LeftOut, OutsideError, list_omitted
from slipway.corpus.fetching import Download, Fetched, Policy, fetch_all, file_name
from slipway.corpus.formats import find_auxiliary, recognize
from slipway.corpus.progress import Progress, say
from slipway.corpus.readers import parquet_row_groups
from slipway.corpus.remotes import Remote, S3File, TransientError, list_s3, remote
from slipway.corpus.spec import Preparation
from slipway.corpus.units import SourceFile

_VERSION = 1
_GLOB = "*?["
_TIMEOUT = 60.0
# Of one kind: a log is no list of files.
_LINES = 20


@dataclass(frozen=True)
class Source:
    """File that an entry of `inputs` names, before it is fetched.

    Attributes
    ----------
    name
        For logs and the manifest: without secrets.
    place
        Absolute path, as it was named or found, or file on a server.
    size
        In bytes; None if only the server knows it.
    entry
        The entry that names it.
    """

    name: str
    place: Path | Remote
    size: int | None
    entry: Input

    @property
    def identity(self) -> tuple[int, tuple[str, ...]]:
        """Return the same for two names of one file, to sort by: local files first, by path without links."""
        if isinstance(self.place, Path):
            return 0, self.place.resolve().parts
        return 1, tuple(self.place.name.split("/"))


def sources_file(preparation: Preparation) -> Path:
    """Return the path of the list of sources."""
    return preparation.work_dir / "sources.json"


def read_sources(preparation: Preparation) -> list[SourceFile]:
    """Return the sources that `collect` recorded.

    Raises
    ------
    UserError
        If there is no such list.
    """
    path = sources_file(preparation)
    try:
        return [SourceFile.from_record(record) for record in json.loads(path.read_bytes())["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise UserError(f"{path}: {reason}; `python -m slipway.corpus fetch` writes it") from None


def read_left_out(preparation: Preparation) -> list[LeftOut]:
    """Return the files that `collect` left out; `read_sources` checks the list."""
    record = json.loads(sources_file(preparation).read_bytes())
    return [LeftOut(*entry) for entry in record.get("left_out", ())]


def collect(preparation: Preparation, policy: Policy | None = None) -> list[SourceFile]:
    """Find all sources, fetch those on servers, and record name, size and SHA-256 of each.

    Returns
    -------
    list of SourceFile
        In their final order: sorted, then shuffled by the seed, so that the last documents, which are often
        held out, are as the others.

    Raises
    ------
    UserError
        If an entry names nothing, or a file is empty, or of another format or SHA-256 than it must be.
    OutsideError
        If the network or the disk failed.
    """
    left_out: list[LeftOut] = []
    sources = discover(preparation, left_out)
    fetched = _local_files(sources, preparation, policy)
    files = [
        _source_file(number, source, local, preparation)
        for number, (source, local) in enumerate(zip(sources, fetched, strict=True))
    ]
    _say_changes(files, preparation)
    _check_copies(files, preparation)
    records = {"version": _VERSION, "files": [file.record() for file in files]}
    records["left_out"] = [[entry.name, entry.reason] for entry in left_out]
    preparation.work_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(sources_file(preparation), json.dumps(records, indent=1) + "\n")
    return files


def discover(preparation: Preparation, left_out: list[LeftOut] | None = None) -> list[Source]:
    """Return the sources in their final order; none has been read.

    Parameters
    ----------
    left_out
        Gets the files that the entries name and that are no sources.

    Raises
    ------
    UserError
        If an entry is not valid or names nothing.
    """
    found: dict[tuple[int, tuple[str, ...]], Source] = {}
    left_out = [] if left_out is None else left_out
    for entry in preparation.inputs:
        matches = list(_matches(entry, preparation.pattern, left_out))
        if len(matches) != 1 and (entry.sha256 or entry.name):
            key = "sha256" if entry.sha256 else "name"
            raise UserError(
                f"inputs: {entry.location}: `{key}` is of one file, and this names {len(matches)}"
            )
        for source in matches:
            same = found.setdefault(source.identity, source)
            if same.place != source.place and not isinstance(source.place, Path):
                raise UserError(
                    f"inputs: {source.name}: two addresses differ only in a part that is kept secret here; "
                    "name one of them"
                )
            former = same.entry
            if (former.format, former.text_key) != (entry.format, entry.text_key):
                raise UserError(f"inputs: {source.name}: named twice, with another `format` or `text_key`")
            if entry.sha256 and former.sha256 is None:
                found[source.identity] = source
    taken = {source.name for source in found.values()}
    left_out[:] = [entry for entry in dict.fromkeys(left_out) if entry.name not in taken]
    names = Counter(source.name for source in found.values())
    if names and names.most_common(1)[0][1] > 1:
        raise UserError(
            f"inputs: {names.most_common(1)[0][0]}: two files have this name; `name` gives others"
        )
    sources = [found[identity] for identity in sorted(found)]
    random.Random(preparation.seed).shuffle(sources)
    return list(_limit(sources, preparation.max_files, preparation.max_bytes))


def _matches(entry: Input, pattern: str, left_out: list[LeftOut]) -> Iterable[Source]:
    scheme, separator, rest = entry.location.partition("://")
    if not separator:
        return _local_matches(entry, pattern, left_out)
    if scheme == "s3":
        bucket, _, key = rest.partition("/")
        if key.endswith("/") or not key or any(character in key for character in _GLOB):
            return _s3_matches(entry, bucket, key, pattern, left_out)
    place = remote(entry.location)
    if scheme != "s3" and (not place.file_name or "*" in place.file_name):
        raise UserError(
            f"inputs: {place.name}: name each file; directories and globs are for paths and s3://"
        )
    return (Source(entry.name or place.name, place, None, entry),)


def _local_matches(entry: Input, pattern: str, left_out: list[LeftOut]) -> Iterator[Source]:
    place, wildcards = split_glob(entry.location)
    location = Path(place)
    if not wildcards and not location.is_dir():
        yield _find_local(entry, location)
        return
    matches = [""]
    if wildcards:
        # Path.glob would leave out hidden files unsaid.
        matches = glob.glob(wildcards, root_dir=place, recursive=True, include_hidden=True)  # noqa: PTH207
    names: set[str] = set()
    for match in matches:
        if not (location / match).is_dir():
            names.add(match)
            continue
        files = _select_matching(search(location / match), pattern, location / match, left_out)
        names |= {str(Path(match, name)) for name in files}
    taken = choose(sorted(names), wildcards or pattern, location, left_out)
    if not taken:
        what = "matches" if wildcards else f"in {place} matches pattern={pattern!r}"
        raise UserError(f"inputs: {entry.location}: no file {what}{_add_left_out(left_out)}")
    yield from (_find_local(entry, location / name) for name in taken)


def search(directory: Path) -> list[str]:
    """Return all files below a directory, relative to it, and links to directories, which are not followed.

    Raises
    ------
    UserError
        If a directory cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror}") from None

    files = []
    for parent, directories, names in os.walk(directory, onerror=refuse):
        links = [name for name in directories if Path(parent, name).is_symlink()]
        files += [str(Path(parent, name).relative_to(directory)) for name in (*names, *links)]
    return files


def _select_matching(names: Sequence[str], pattern: str, place: object, left_out: list[LeftOut]) -> list[str]:
    """Return the names below a place that fit the pattern; the others are left out."""
    patterns = _parts_of(pattern)
    others = {name: f"not {pattern}" for name in names if not _fits(name.split("/"), patterns)}
    return _leave_out(names, others, place, left_out)


def choose(names: Sequence[str], pattern: str, place: Path | str, left_out: list[LeftOut]) -> list[str]:
    """Return those of the names below a directory, or another place, that are sources, in order.

    The others are left out. A link that leads nowhere is a source, which cannot be read.
    """
    reasons = {}
    for path, name in [(place / name, name) for name in names] if isinstance(place, Path) else ():
        if path.exists() and not path.is_file():
            reasons[name] = "a link to a directory" if path.is_dir() else "no regular file"
    return _leave_out(names, reasons | find_auxiliary(names, pattern), place, left_out)


def _leave_out(
    names: Sequence[str], reasons: dict[str, str], place: object, left_out: list[LeftOut]
) -> list[str]:
    for name, reason in sorted(reasons.items()):
        left_out.append(LeftOut(f"{place}/{name}".removeprefix("./"), reason))
    return sorted(set(names).difference(reasons))


def _add_left_out(left_out: Sequence[LeftOut]) -> str:
    return f"; {list_omitted(left_out)}" if left_out else ""


def _find_local(entry: Input, path: Path) -> Source:
    try:
        return Source(entry.name or str(path), path.absolute(), path.stat().st_size, entry)
    except FileNotFoundError:
        what = f"it links to {path.readlink()}, and there" if path.is_symlink() else "there"
        raise UserError(f"inputs: {path}: {what} is no such file or directory") from None
    except OSError as error:
        raise UserError(f"inputs: {path}: {error.strerror}") from None


def _s3_matches(
    entry: Input, bucket: str, key: str, pattern: str, left_out: list[LeftOut]
) -> Iterator[Source]:
    is_prefix = not key or key.endswith("/")
    prefix = key if is_prefix else re.split(r"[*?\[]", key, maxsplit=1)[0]
    try:
        objects = {name: size for name, size in list_s3(bucket, prefix) if not name.endswith("/")}
    except TransientError as error:
        raise OutsideError(f"inputs: {entry.location}: {error}") from None
    start = prefix if is_prefix else ""
    place = f"s3://{bucket}/{start}".rstrip("/")
    if is_prefix:
        names = _select_matching([name.removeprefix(start) for name in objects], pattern, place, left_out)
    else:
        names = [name for name in objects if name == key or _fits(name.split("/"), key.split("/"))]
    # An object of this very name is no glob.
    names = [key] if key in objects else choose(names, pattern if is_prefix else key, place, left_out)
    for name in names:
        file = S3File(bucket, start + name)
        yield Source(entry.name or file.name, file, objects[file.key], entry)
    if not names:
        what = f"matches pattern={pattern!r}" if is_prefix else "matches"
        raise UserError(f"inputs: {entry.location}: no object {what}{_add_left_out(left_out)}")


def _parts_of(pattern: str) -> list[str]:
    """Return the components of a pattern for names of files, at any depth."""
    parts = pattern.split("/")
    if any("**" in part and part != "**" for part in parts) or not all(parts):
        raise UserError(
            f"pattern={pattern!r}: expected a glob for file names, such as *.jsonl; `**` is one component, "
            "and it is relative"
        )
    return ["**", *parts]


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return True if the components of a path match those of a glob, where `**` is any number."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_fits(parts[start:], patterns[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _fits(parts[1:], patterns[1:])


def _limit(sources: Sequence[Source], max_files: int | None, max_bytes: int | None) -> Iterator[Source]:
    total = 0
    for number, source in enumerate(sources):
        if max_bytes is not None:
            total += _size(source)
        too_many = max_files is not None and number >= max_files
        too_large = max_bytes is not None and total > max_bytes and number > 0
        if too_many or too_large:
            return
        yield source


def _size(source: Source) -> int:
    """Return the size of a source, asking a web server if needed; 0 if it is unknown."""
    if source.size is not None or isinstance(source.place, Path):
        return source.size or 0
    try:
        body = source.place.open(0, None, _TIMEOUT)
    except TransientError:
        return 0
    assert body is not None
    body.close()
    return body.version.size or 0


def _local_files(sources: Sequence[Source], preparation: Preparation, policy: Policy | None) -> list[Fetched]:
    """Fetch and hash; return the local files of the sources, in their order."""
    files: dict[Path | Remote, Fetched] = {}
    remotes = [(source.place, source) for source in sources if not isinstance(source.place, Path)]
    if remotes:
        with Progress("fetching", 0, len(remotes), "files") as progress:
            for place, source in remotes:
                if source.size is not None:
                    progress.expect(file_name(place), source.size)
            downloads = [Download(place, source.entry.sha256) for place, source in remotes]
            timeout = preparation.download_timeout
            results = fetch_all(downloads, preparation.downloads_dir, progress, policy, timeout)
        files.update(zip((place for place, _ in remotes), results, strict=True))
    paths = [source.place for source in sources if isinstance(source.place, Path)]
    size = sum(source.size or 0 for source in sources if isinstance(source.place, Path))
    with (
        Progress("hashing", size, len(paths), "files") as progress,
        ThreadPoolExecutor(preparation.workers) as pool,
    ):
        files.update(zip(paths, pool.map(_hasher(progress), paths), strict=True))
    return [files[source.place] for source in sources]


def _hasher(progress: Progress) -> Callable[[Path], Fetched]:
    def hash_file(path: Path) -> Fetched:
        try:
            # Reading a file that is nearly all hole would take minutes for nothing.
            open_regular(path).close()
            sha256 = sha256_of(path, progress.advance)
            progress.advance(0, items=1)
            return Fetched(path, path.stat().st_size, sha256)
        except OSError as error:
            raise UserError(f"inputs: {path}: {error.strerror}") from None

    return hash_file


def _source_file(number: int, source: Source, local: Fetched, preparation: Preparation) -> SourceFile:
    entry = source.entry
    if entry.sha256 is not None and local.sha256 != entry.sha256:
        raise UserError(
            f"inputs: {source.name}: its sha256 is {local.sha256}, expected {entry.sha256}: it is another "
            "file than the configuration names"
        )
    place = str(source.place) if isinstance(source.place, Path) else source.place.name
    kind, compression = recognize(local.path, place, entry.format or preparation.format)
    # Trees of texts have empty files; of the other formats, such a file is a failed download.
    if not local.size and kind != "txt" and preparation.on_error == "raise":
        raise UserError(f"inputs: {source.name}: empty file; on_error=skip leaves it out and counts it")
    has_keys = kind in ("jsonl", "parquet", "tar")
    text_key = (entry.text_key or preparation.text_key) if has_keys else None
    row_groups: tuple[int, ...] = ()
    if kind == "parquet" and local.size and text_key is not None:
        row_groups = parquet_row_groups(local.path, source.name, text_key)
    known = (number, source.name, local.path, local.size, local.sha256)
    limits = (preparation.max_document_bytes, preparation.max_expansion)
    return SourceFile(*known, kind, compression, text_key, row_groups, *limits)


def _say_changes(files: Sequence[SourceFile], preparation: Preparation) -> None:
    """Say which sources are not those of the last run; their units are made again."""
    try:
        former = {file.name: file for file in read_sources(preparation)}
    except UserError:
        return
    lines = []
    for file in files:
        old = former.pop(file.name, None)
        if old is not None and old.sha256 != file.sha256:
            sizes = (
                f"{old.size:,} bytes became {file.size:,}" if old.size != file.size else "of the same size"
            )
            lines.append(f"{file.name}: changed since the last run, {sizes}: it is tokenized again")
    _say_some([*lines, *(f"{name}: no longer among the sources" for name in former)])


def _check_copies(files: Sequence[SourceFile], preparation: Preparation) -> None:
    """Name files with the same bytes: a shard that is there twice counts twice in training.

    Raises
    ------
    UserError
        If it is a shard, errors are not skipped and its documents would not be dropped.
    """
    first: dict[str, SourceFile] = {}
    copies = [file for file in files if file.size and first.setdefault(file.sha256, file) is not file]
    if not copies:
        return
    # A text file is one document, not a shard of many.
    copy = next((file for file in copies if file.format != "txt"), copies[0])
    message = f"{copy.name}: the same bytes as {first[copy.sha256].name}"
    if copy.format != "txt" and preparation.on_error == "raise" and not preparation.deduplicate.exact:
        raise UserError(
            f"inputs: {message}; leave one out, or set deduplicate.exact=True, which drops its documents, or "
            "on_error=skip, which takes them twice"
        )
    more = f", and {len(copies) - 1:,} more such files" if len(copies) > 1 else ""
    is_exact = preparation.deduplicate.exact
    hint = "their documents are dropped" if is_exact else "deduplicate.exact=True leaves them out"
    say(f"{message}{more}: {hint}")


def _say_some(lines: Sequence[str]) -> None:
    for line in lines[:_LINES]:
        say(line)
    if len(lines) > _LINES:
        say(f"... and {len(lines) - _LINES:,} more files like these")
