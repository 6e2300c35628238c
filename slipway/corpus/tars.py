"""The reader of tar shards: the texts of their members, sample by sample, as in WebDataset."""

from __future__ import annotations

import itertools
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from slipway.common.errors import escape
from slipway.corpus.documents import (
    BOM,
    Document,
    Parser,
    Record,
    decode,
    object_parser,
    read_content,
    report_damaged,
    report_too_large,
)
from slipway.corpus.errors import BadRecord, LeftOut
from slipway.corpus.formats import (
    FORMATS_BY_SUFFIX,
    FREE_BYTES,
    DamagedError,
    ExpansionError,
    detect_pointer,
    find_auxiliary,
    open_stream,
)
from slipway.corpus.units import SourceFile

LeaveOut = Callable[[LeftOut], None]

# A part of a document of several parts.
_NUMBERED = re.compile(r"((?:.*/)?[^./]+)\.(0|[1-9]\d*)\.\w+")


def read_tar(file: SourceFile, leave_out: LeaveOut) -> Iterator[Record]:
    """Yield the texts of a shard; `offset` is the number of the member.

    A sample is the members of one name up to its first dot, one after the other, as in WebDataset.
    """
    parse = object_parser(file)
    following = 0
    try:
        with (
            open_stream(file.path, file.compression, file.max_expansion) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_WholeMember) as archive,
        ):
            for _, sample in itertools.groupby(_members(archive, file), key=lambda member: member.key):
                for record in _read_sample(sample, file, parse, leave_out):
                    following = record.offset + 1
                    yield record
            # Zeros end an archive: those in place of a header, too, and those of archives that were joined.
            end: Any = archive.fileobj
            if any(part.strip(b"\0") for part in iter(lambda: end.read(tarfile.RECORDSIZE), b"")):
                reason = "damaged tar data, or archives that were joined: bytes after the end are not read"
                yield BadRecord(file.number, following, reason, is_loss=True)
    except (DamagedError, tarfile.TarError):
        yield report_damaged(file, following, "tar")
        return
    if not following:
        yield BadRecord(file.number, 0, "no member *.txt or *.json")


@dataclass(frozen=True)
class _Member:
    """Member of a tar shard; `left_out` is why it is no text."""

    number: int
    name: str
    suffix: str
    content: bytes | bytearray = b""
    left_out: str | None = None

    @property
    def key(self) -> str:
        path = PurePath(self.name)
        return str(path.with_name(path.name.partition(".")[0] or path.name))


def _read_sample(
    members: Iterable[_Member], file: SourceFile, parse: Parser, leave_out: LeaveOut
) -> Iterator[Record]:
    """Yield the texts of a sample; ``NAME.0.txt``, ``NAME.1.txt``, ... are one, ``*.json`` goes with them."""
    name, has_text, first = None, False, 0
    parts: list[tuple[int, bytes | bytearray]] = []
    objects: list[_Member] = []
    for member in members:
        match = _NUMBERED.fullmatch(member.name)
        if match and match[2] == "0":
            name = match[1]
        if member.left_out is not None:
            leave_out(LeftOut(f"{file.name}: {escape(member.name)}", member.left_out))
        elif member.suffix == ".json":
            objects.append(member)
        elif FORMATS_BY_SUFFIX[member.suffix] == "jsonl":
            yield from _read_objects(member, file, parse)
        elif match and match[1] == name:
            first = first if parts else member.number
            parts.append((int(match[2]), member.content.removeprefix(BOM)))
        else:
            has_text = True
            yield decode(member.content, file, member.number)
    if parts:
        contents = [content for _, content in sorted(parts, key=lambda part: part[0])]
        # A pointer is not part of the others' text.
        yield decode(next(filter(detect_pointer, contents), b"\n\n".join(contents)), file, first)
    for member in objects:
        if parts or has_text:
            leave_out(LeftOut(f"{file.name}: {escape(member.name)}", "beside the text of its sample"))
        else:
            yield from _read_objects(member, file, parse)


def _read_objects(member: _Member, file: SourceFile, parse: Parser) -> Iterator[Record]:
    """Yield the objects of a member: one, or one in each line."""
    if len(member.content) > file.max_document_bytes:
        yield replace(report_too_large(file, member.number), is_loss=True)
        return
    lines = [line for line in member.content.split(b"\n") if line and not line.isspace()]
    if member.suffix == ".json" and not (len(lines) > 1 and isinstance(parse(lines[0], 0), Document)):
        lines = [member.content]
    for line in lines or [member.content]:
        yield parse(line, member.number)


class _WholeMember(tarfile.TarInfo):
    """Header of a member; a file that ends without the blocks of zeros that end an archive is cut short.

    The library takes it for whole, and the members that are missing for none. Numbers and maps of holes that
    it cannot read are damage, too.
    """

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _WholeMember:
        """Read a member's headers."""
        try:
            return super().fromtarfile(tarfile)
        except (ValueError, LookupError, ArithmeticError, RecursionError):
            raise DamagedError("a header that cannot be read") from None

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _WholeMember:
        """Read a header."""
        if len(buf) != tarfile.BLOCKSIZE:
            raise DamagedError("no end of the archive")
        return super().frombuf(buf, encoding, errors)


def _members(archive: tarfile.TarFile, file: SourceFile) -> Iterator[_Member]:
    """Yield the members but directories; those with text have their content."""
    left = max(FREE_BYTES, file.max_expansion * file.size)
    for number, header in enumerate(archive):
        if header.isdir():
            continue
        path = PurePath(header.name)
        name, suffix = str(path), path.suffix.lower()
        reason = find_auxiliary([name]).get(name)
        if reason is None and not header.isfile():
            reason = "a link, or no file"
        if reason is None and FORMATS_BY_SUFFIX.get(suffix) not in ("txt", "jsonl"):
            reason = "no text"
        if reason is not None:
            yield _Member(number, name, suffix, left_out=reason)
            continue
        # Holes have no bytes in the archive.
        left -= header.size if header.issparse() else 0
        if left < 0:
            raise ExpansionError
        content = archive.extractfile(header)
        assert content is not None
        yield _Member(number, name, suffix, read_content(content, file))
