"""Readers of source files: documents and bad records, in the order of the file.

All of them stream: a file is never in memory as a whole but a text file, which is one document.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

from slipway.common.errors import UserError
from slipway.corpus.documents import (
    BOM,
    UNREADABLE,
    Document,
    Record,
    decode,
    object_parser,
    read_content,
    report_damaged,
    report_too_large,
)
from slipway.corpus.errors import LONG_LINE, BadRecord, missing_library
from slipway.corpus.formats import FREE_BYTES, DamagedError, ExpansionError, open_stream
from slipway.corpus.tars import LeaveOut, read_tar
from slipway.corpus.units import Piece, SourceFile
from slipway.corpus.wikitext import plain_text

# A longer line is no document of anyone: it would be held in memory.
_LONGEST_LINE = 1 << 26
# Rows that are read together, and the bytes that they may have if each is as large as its column.
_ROWS, _ROWS_BYTES = 256, 1 << 28
# A row's size besides its text.
_ROW_BYTES = 16
_PART = 1 << 20
# Begins and ends of elements within a page; each is held in memory.
_PAGE_EVENTS = 1 << 21
_TEXT_TYPES = ("string", "large_string", "string_view")


def read(piece: Piece, file: SourceFile, leave_out: LeaveOut = lambda entry: None) -> Iterator[Record]:
    """Yield the documents of a piece of a file.

    Parameters
    ----------
    piece, file
        The bytes to read, and their file.
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
        for record in read_tar(file, leave_out) if is_tar else _READERS[file.format](piece, file):
            # A character has four bytes at most.
            if isinstance(record, Document) and len(record.text) > limit // 4:
                is_too_large = len(record.text.encode()) > limit
                yield report_too_large(file, record.offset) if is_too_large else record
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
            content = read_content(stream, file)
    except DamagedError:
        yield report_damaged(file, 0)
        return
    yield decode(content, file, 0)


def _read_lines(piece: Piece, file: SourceFile) -> Iterator[Record]:
    parse = object_parser(file)
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
                if not line.removeprefix(BOM).strip():
                    continue
                record = parse(line, begin)
                if isinstance(record, BadRecord) and record.reason in UNREADABLE and line[-1:] != b"\n":
                    reason = f"{record.reason}, and the file ends within this line"
                    record = BadRecord(file.number, begin, reason, is_loss=True)
                yield record
                if begin == 0 and isinstance(record, BadRecord) and record.is_loss:
                    return
    except DamagedError:
        yield report_damaged(file, offset)


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of a line, however long; return the bytes."""
    size = 0
    while part := stream.readline(_LONGEST_LINE):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _open_parquet(path: Path, name: str) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_library("pyarrow", f"reading {name}") from None
    try:
        # Without a buffer it would read the column of a whole row group at once.
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
        yield report_damaged(file, number)
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


_READERS: dict[str, Callable[[Piece, SourceFile], Iterator[Record]]] = {
    "txt": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_parquet,
    "wikipedia": _read_wikipedia,
}
