"""Readers of source files: documents, and the records that are none, in the order of the file.

All of them stream: a file is never in memory as a whole but a text file, which is one document.
"""

from __future__ import annotations

import itertools
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO
from xml.etree import ElementTree

from slipway.common.errors import UserError, escape, suggest
from slipway.corpus.documents import Document
from slipway.corpus.errors import LONG_LINE, NO_KEY, BadRecord, LeftOut, missing_library
from slipway.corpus.formats import (
    FORMATS_BY_SUFFIX,
    FREE_BYTES,
    DamagedError,
    ExpansionError,
    auxiliary,
    open_stream,
    pointer,
)
from slipway.corpus.units import Piece, SourceFile
from slipway.corpus.wikitext import plain_text

Record = Document | BadRecord
LeaveOut = Callable[[LeftOut], None]
Parser = Callable[[bytes | bytearray, int], Record]

# A longer line is no document of anyone: it would be held in memory.
_LONGEST_LINE = 1 << 26
# Rows that are read together, and the bytes that they may have if each is as large as its column.
_ROWS, _ROWS_BYTES = 256, 1 << 28
# What a row counts for besides its text.
_ROW_BYTES = 16
_PART = 1 << 20
# Begins and ends of elements within a page, each of which is held in memory.
_PAGE_EVENTS = 1 << 21
_NAMED_KEYS = 8
_BOM = b"\xef\xbb\xbf"
_TEXT_TYPES = ("string", "large_string", "string_view")
# The first line of JSON that has more of them; and a part of a document of several parts.
_OPEN_JSON = re.compile(rb"\s*[\[{](?:.*[\[{,])?\s*", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_JSON = "not JSON"
_UNREADABLE = (_NO_JSON, "not UTF-8")
_NUMBERED = re.compile(r"((?:.*/)?[^./]+)\.(0|[1-9]\d*)\.\w+")


def read(piece: Piece, file: SourceFile, leave_out: LeaveOut = lambda entry: None) -> Iterator[Record]:
    """Yield the documents of a piece of a file.

    Parameters
    ----------
    piece, file
        What is read.
    leave_out
        Called with each member of a tar shard that is not read.

    Raises
    ------
    UserError
        If the file is gone, has another size than when it was listed, or a library is missing.
    """
    try:
        size = file.path.stat().st_size
    except OSError as error:
        raise UserError(f"{file.name}: {file.path}: {error.strerror}; `fetch` has listed it") from None
    if size != file.size:
        raise UserError(
            f"{file.name}: it has {size:,} bytes, and had {file.size:,} when `fetch` listed it: fetch again"
        )
    if size == 0:
        is_text = file.format == "txt"
        yield Document("", file.number, 0) if is_text else BadRecord(file.number, 0, "empty file")
        return
    try:
        is_tar, limit = file.format == "tar", file.max_document_bytes
        for record in _read_tar(file, leave_out) if is_tar else _READERS[file.format](piece, file):
            # A character has four bytes at most.
            if isinstance(record, Document) and len(record.text) > limit // 4:
                is_too_large = len(record.text.encode()) > limit
                yield _too_large(file, record.offset) if is_too_large else record
            else:
                yield record
    except ExpansionError:
        reason = (
            f"more than {file.max_expansion:,} bytes for each byte of the file "
            f"(data_preparation.max_expansion={file.max_expansion}): the rest of it is not read"
        )
        yield BadRecord(file.number, 0, reason, is_loss=True)


def parquet_row_groups(path: Path, name: str, text_key: str) -> tuple[int, ...]:
    """Return the bytes of each row group.

    Raises
    ------
    UserError
        If the file is no Parquet, or has no column of texts named `text_key`.
    """
    file = _open_parquet(path, name)
    schema = file.schema_arrow
    if text_key not in schema.names:
        raise UserError(
            f"{name}: no column '{text_key}'; it has {', '.join(schema.names)}: choose one with "
            "data_preparation.text_key"
        )
    from pyarrow.types import is_dictionary

    kind = schema.field(text_key).type
    if str(kind.value_type if is_dictionary(kind) else kind) not in _TEXT_TYPES:
        raise UserError(f"{name}: its column '{text_key}' holds {kind}, not texts: choose another text_key")
    metadata = file.metadata
    return tuple(metadata.row_group(row).total_byte_size for row in range(metadata.num_row_groups))


def _read_text(piece: Piece, file: SourceFile) -> Iterator[Record]:
    try:
        with open_stream(file.path, file.compression, file.max_expansion) as stream:
            content = _content(stream, file)
    except DamagedError:
        yield _damaged(file, 0)
        return
    yield _decoded(content, file, 0)


def _content(stream: IO[bytes], file: SourceFile) -> bytearray:
    """Return all that a stream has; a byte more than the limit if it has more than a document may."""
    content, left = bytearray(), file.max_document_bytes + 1
    while part := stream.read(min(left, _PART)):
        content += part
        left -= len(part)
    return content


def _decoded(content: bytes | bytearray, file: SourceFile, offset: int) -> Record:
    """Return a text with the newlines of Unix, as Python reads text files."""
    if len(content) > file.max_document_bytes:
        return _too_large(file, offset)
    if (defect := pointer(content)) is not None:
        return BadRecord(file.number, offset, defect, is_loss=True)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return BadRecord(file.number, offset, "not UTF-8")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Document(text, file.number, offset)


def _too_large(file: SourceFile, offset: int) -> BadRecord:
    limit = f"data_preparation.max_document_bytes={file.max_document_bytes}"
    return BadRecord(file.number, offset, f"more bytes than {limit}")


def _read_lines(piece: Piece, file: SourceFile) -> Iterator[Record]:
    parse = _object_parser(file)
    offset = piece.start
    try:
        with open_stream(file.path, file.compression, file.max_expansion) as stream:
            if piece.start:
                stream.seek(piece.start - 1)
                offset += _skip_line(stream) - 1
            while piece.end is None or offset < piece.end:
                line = stream.readline(_LONGEST_LINE)
                if not line:
                    return
                begin, offset = offset, offset + len(line)
                if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    offset += _skip_line(stream)
                    yield BadRecord(file.number, begin, f"{LONG_LINE} {_LONGEST_LINE:,} bytes", is_loss=True)
                    continue
                if not line.removeprefix(_BOM).strip():
                    continue
                record = parse(line, begin)
                if isinstance(record, BadRecord) and record.reason in _UNREADABLE and line[-1:] != b"\n":
                    reason = f"{record.reason}, and the file ends within this line"
                    record = BadRecord(file.number, begin, reason, is_loss=True)
                yield record
                if begin == 0 and isinstance(record, BadRecord) and record.is_loss:
                    return
    except DamagedError:
        yield _damaged(file, offset)


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of a line, however long; return the bytes."""
    size = 0
    while part := stream.readline(_LONGEST_LINE):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _object_parser(file: SourceFile) -> Parser:
    """Return the function that makes a document of a JSON object."""
    try:
        from orjson import loads as strict_loads
    except ImportError:  # in an image: Python's json reads the same, and takes longer
        strict_loads = None  # type: ignore[assignment]
    number, key = file.number, file.text_key or "text"

    def parse(content: bytes | bytearray, offset: int) -> Record:
        # Files that were joined have one at the beginning of a line.
        if content.startswith(_BOM):
            content = content.removeprefix(_BOM)
        is_strict = True
        try:
            if strict_loads is None:
                raise ValueError
            record = strict_loads(content)
        except ValueError:
            is_strict = False
            try:
                # NaN, Infinity and half of a surrogate pair: Python's json writes them.
                record = json.loads(content.decode())
            except UnicodeDecodeError:
                return BadRecord(number, offset, "not UTF-8")
            except (ValueError, RecursionError) as error:
                if getattr(error, "msg", None) == "Extra data":
                    return BadRecord(number, offset, "data follow the JSON value of a line", is_loss=True)
                return _no_json(content, number, offset)
        if isinstance(record, list) and any(isinstance(item, dict | str) for item in record):
            return BadRecord(
                number, offset, "a JSON array instead of lines: `jq -c '.[]'` makes them", is_loss=True
            )
        if not isinstance(record, dict):
            return BadRecord(number, offset, "not a JSON object")
        if key not in record:
            return BadRecord(number, offset, _no_key(key, record))
        text, name = record[key], record.get("id")
        if not isinstance(text, str):
            return BadRecord(number, offset, f"'{key}' is no text")
        if not is_strict and _SURROGATE.search(text):
            return BadRecord(number, offset, f"'{key}' has half of a surrogate pair")
        return Document(text, number, offset, None if name is None else str(name))

    return parse


def _no_key(key: str, record: Mapping[str, object]) -> str:
    keys = sorted(map(escape, record))
    shown = ", ".join(keys[:_NAMED_KEYS]) + (", ..." if len(keys) > _NAMED_KEYS else "")
    return f"{NO_KEY} '{key}' among {shown or 'none'}{suggest(key, keys)}"


def _no_json(content: bytes | bytearray, file: int, offset: int) -> BadRecord:
    """Return the defect of a text that is no JSON."""
    defect = pointer(content)
    if defect is None and b"\0" in content:
        defect = "zero bytes instead of text"
    if defect is None and offset == 0 and _OPEN_JSON.fullmatch(content):
        defect = "JSON over several lines instead of one for each document: `jq -c .` makes them"
    return BadRecord(file, offset, defect or _NO_JSON, is_loss=defect is not None)


def _open_parquet(path: Path, name: str) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_library("pyarrow", f"reading {name}") from None
    try:
        # Without a buffer of its own, it would read the column of a whole row group at once.
        return parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{name}: not a Parquet file, or not a whole one: {str(error).splitlines()[0]}"
        ) from None


def _read_parquet(piece: Piece, file: SourceFile) -> Iterator[Record]:
    table = _open_parquet(file.path, file.name)
    import pyarrow
    from pyarrow.types import is_nested

    key, schema = file.text_key or "text", table.schema_arrow
    has_ids = "id" in schema.names and not is_nested(schema.field("id").type)
    columns = [key, "id"] if has_ids else [key]
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    chosen = groups[piece.start : piece.end]
    row = sum(group.num_rows for group in groups[: piece.start])
    # A text that is there once can be that of all rows.
    parts = [group.column(number) for group in chosen for number in range(group.num_columns)]
    sizes = [part.total_uncompressed_size for part in parts if part.path_in_schema in columns]
    rows = max(1, min(_ROWS, _ROWS_BYTES // max([1, *sizes])))
    size = sum(group.total_byte_size for group in groups)
    allowed = max(FREE_BYTES, file.max_expansion * file.size)
    if size > allowed:
        raise ExpansionError
    left = max(_PART, allowed * sum(group.total_byte_size for group in chosen) // max(1, size))
    numbers = list(range(len(groups)))[piece.start : piece.end]
    try:
        for batch in table.iter_batches(rows, row_groups=numbers, columns=columns, use_threads=False):
            ids = batch.column("id").to_pylist() if has_ids else itertools.repeat(None)
            for text, name in zip(_texts(batch.column(key)), ids, strict=False):
                # A row takes its time, however short.
                left -= _ROW_BYTES + sum(len(value) for value in (text, name) if isinstance(value, str))
                if left < 0:
                    raise ExpansionError
                if isinstance(text, str):
                    yield Document(text, file.number, row, None if name is None else str(name))
                else:
                    yield BadRecord(file.number, row, "not UTF-8" if text is False else f"'{key}' is null")
                row += 1
    except (pyarrow.ArrowException, OSError):
        reason = "damaged Parquet data: the rest of its row group is not read"
        yield BadRecord(file.number, row, reason, is_loss=True)


def _texts(column: Any) -> list[str | bool | None]:
    """Return the texts of a column: None for a null, False for bytes that are not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        pass
    texts: list[str | bool | None] = []
    for value in column:
        try:
            texts.append(value.as_py())
        except UnicodeDecodeError:
            texts.append(False)
    return texts


def _read_wikipedia(piece: Piece, file: SourceFile) -> Iterator[Record]:
    """Yield the articles: pages of namespace 0 that redirect nowhere; `offset` counts all pages."""
    number = elements = 0
    try:
        with open_stream(file.path, file.compression, file.max_expansion) as stream:
            events = ElementTree.iterparse(stream, events=("start", "end"))
            _, root = next(events)
            for event, element in events:
                elements += 1
                if elements > _PAGE_EVENTS:
                    raise ElementTree.ParseError("no end of a page")
                if event == "end" and _tag(element) == "page":
                    document = _article(element, file.number, number)
                    number, elements = number + 1, 0
                    # All that was parsed would stay in memory.
                    root.clear()
                    if document is not None:
                        yield document
        if not number:
            yield BadRecord(file.number, 0, "no page of a dump of Wikipedia", is_loss=True)
    except DamagedError:
        yield _damaged(file, number)
    except (ElementTree.ParseError, StopIteration):
        reason = "not well-formed XML: the rest of the file is not read"
        yield BadRecord(file.number, number, reason, is_loss=True)


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _article(page: ElementTree.Element, file: int, number: int) -> Document | None:
    fields = {_tag(child): child for child in page}
    if "redirect" in fields or "ns" not in fields or (fields["ns"].text or "").strip() != "0":
        return None
    texts = [child.text or "" for child in fields.get("revision", ()) if _tag(child) == "text"]
    name = fields["id"].text if "id" in fields else None
    return Document(plain_text("".join(texts)), file, number, name)


def _read_tar(file: SourceFile, leave_out: LeaveOut) -> Iterator[Record]:
    """Yield the texts of a shard; `offset` is the number of the member.

    A sample is the members of one name up to its first dot, one after the other, as in WebDataset.
    """
    parse = _object_parser(file)
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
                reason = "damaged tar data, or archives that were joined: what is behind the end is not read"
                yield BadRecord(file.number, following, reason, is_loss=True)
    except (DamagedError, tarfile.TarError):
        yield _damaged(file, following, "tar")
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
    """Yield the texts of a sample; ``NAME.0.txt``, ``NAME.1.txt``, ... are one, ``*.json`` is beside them."""
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
            parts.append((int(match[2]), member.content.removeprefix(_BOM)))
        else:
            has_text = True
            yield _decoded(member.content, file, member.number)
    if parts:
        contents = [content for _, content in sorted(parts, key=lambda part: part[0])]
        # A pointer is none of the others' text.
        yield _decoded(next(filter(pointer, contents), b"\n\n".join(contents)), file, first)
    for member in objects:
        if parts or has_text:
            leave_out(LeftOut(f"{file.name}: {escape(member.name)}", "beside the text of its sample"))
        else:
            yield from _read_objects(member, file, parse)


def _read_objects(member: _Member, file: SourceFile, parse: Parser) -> Iterator[Record]:
    """Yield the objects of a member: one, or one in each line."""
    if len(member.content) > file.max_document_bytes:
        yield replace(_too_large(file, member.number), is_loss=True)
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
        reason = auxiliary([name]).get(name)
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
        yield _Member(number, name, suffix, _content(content, file))


def _damaged(file: SourceFile, offset: int, what: str | None = None) -> BadRecord:
    reason = f"damaged {what or file.compression} data: the rest of the file is not read"
    return BadRecord(file.number, offset, reason, is_loss=True)


_READERS: dict[str, Callable[[Piece, SourceFile], Iterator[Record]]] = {
    "txt": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_parquet,
    "wikipedia": _read_wikipedia,
}
