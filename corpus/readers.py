"""Readers of source files: documents, and the records that are none, in the order of the file.

All of them stream: a file is never in memory as a whole but a text file, which is one document.
"""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO
from xml.etree import ElementTree

from corpus.documents import Document
from corpus.errors import NO_KEY, BadRecord, UserError, missing_library, suggest
from corpus.formats import FREE_BYTES, DamagedError, ExpansionError, open_stream
from corpus.units import Piece, SourceFile
from corpus.wikitext import plain_text

Record = Document | BadRecord

# A longer line is no document of anyone: it would be held in memory.
_LONGEST_LINE = 1 << 26
# Rows that are read together, and the bytes that they may have if each is as large as its column.
_ROWS, _ROWS_BYTES = 256, 1 << 28
_PART = 1 << 20
# Begins and ends of elements within a page, each of which is held in memory.
_PAGE_EVENTS = 1 << 21
_NAMED_KEYS = 8
_BOM = b"\xef\xbb\xbf"


def read(piece: Piece, file: SourceFile) -> Iterator[Record]:
    """Yield the documents of a piece of a file.

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
        yield from _READERS[file.format](piece, file)
    except ExpansionError:
        reason = (
            f"more than {file.max_expansion:,} bytes for each byte of the file "
            f"(data_preparation.max_expansion={file.max_expansion}): the rest of it is not read"
        )
        yield BadRecord(file.number, 0, reason)


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
    kind = str(schema.field(text_key).type)
    if "string" not in kind:
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


def _decoded(content: bytearray, file: SourceFile, offset: int) -> Record:
    """Return a text with the newlines of Unix, as Python reads text files."""
    if len(content) > file.max_document_bytes:
        return _too_large(file, offset)
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
                    yield BadRecord(file.number, begin, f"line longer than {_LONGEST_LINE:,} bytes")
                    continue
                if begin == 0:
                    line = line.removeprefix(_BOM)
                if not line.isspace():
                    yield parse(line, begin)
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


def _object_parser(file: SourceFile) -> Callable[[bytes | bytearray, int], Record]:
    """Return the function that makes a document of a JSON object."""
    try:
        from orjson import JSONDecodeError, loads
    except ImportError:
        raise missing_library("orjson", f"reading {file.name}") from None
    number, key = file.number, file.text_key or "text"

    def parse(content: bytes | bytearray, offset: int) -> Record:
        if len(content) > file.max_document_bytes:
            return _too_large(file, offset)
        try:
            record = loads(content)
        except JSONDecodeError:
            return BadRecord(number, offset, "not JSON" if _is_utf8(content) else "not UTF-8")
        if not isinstance(record, dict):
            return BadRecord(number, offset, "not a JSON object")
        if key not in record:
            return BadRecord(number, offset, _no_key(key, record))
        text, name = record[key], record.get("id")
        if not isinstance(text, str):
            return BadRecord(number, offset, f"'{key}' is no text")
        return Document(text, number, offset, None if name is None else str(name))

    return parse


def _no_key(key: str, record: Mapping[str, object]) -> str:
    keys = sorted(record)
    shown = ", ".join(keys[:_NAMED_KEYS]) + (", ..." if len(keys) > _NAMED_KEYS else "")
    return f"{NO_KEY} '{key}' among {shown or 'none'}{suggest(key, keys)}"


def _is_utf8(content: bytes | bytearray) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


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

    key = file.text_key or "text"
    groups = range(piece.start, table.num_row_groups if piece.end is None else piece.end)
    row = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
    columns = [key, "id"] if "id" in table.schema_arrow.names else [key]
    # A text that is there once can be that of all rows.
    largest = max([_column_bytes(table.metadata.row_group(group), columns) for group in groups], default=0)
    rows = max(1, min(_ROWS, _ROWS_BYTES // max(1, largest)))
    sizes = [table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)]
    allowed = max(FREE_BYTES, file.max_expansion * file.size)
    if sum(sizes) > allowed:
        raise ExpansionError
    left = max(_PART, allowed * sum(sizes[group] for group in groups) // max(1, sum(sizes)))
    try:
        for batch in table.iter_batches(rows, row_groups=list(groups), columns=columns, use_threads=False):
            ids = batch.column("id").to_pylist() if "id" in columns else itertools.repeat(None)
            for text, name in zip(_texts(batch.column(key)), ids, strict=False):
                if isinstance(text, str):
                    left -= len(text)
                    if left < 0:
                        raise ExpansionError
                    yield Document(text, file.number, row, None if name is None else str(name))
                else:
                    yield BadRecord(file.number, row, "not UTF-8" if text is False else f"'{key}' is null")
                row += 1
    except (pyarrow.ArrowException, OSError):
        yield BadRecord(file.number, row, "damaged Parquet data: the rest of its row group is not read")


def _column_bytes(group: Any, names: Sequence[str]) -> int:
    """Return the bytes of the largest of some columns of a row group, as it lies there uncompressed."""
    columns = (group.column(number) for number in range(group.num_columns))
    return max((one.total_uncompressed_size for one in columns if one.path_in_schema in names), default=0)


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
    except DamagedError:
        yield _damaged(file, number)
    except (ElementTree.ParseError, StopIteration):
        yield BadRecord(file.number, number, "not well-formed XML: the rest of the file is not read")


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _article(page: ElementTree.Element, file: int, number: int) -> Document | None:
    fields = {_tag(child): child for child in page}
    if "redirect" in fields or "ns" not in fields or (fields["ns"].text or "").strip() != "0":
        return None
    texts = [child.text or "" for child in fields.get("revision", ()) if _tag(child) == "text"]
    name = fields["id"].text if "id" in fields else None
    return Document(plain_text("".join(texts)), file, number, name)


def _read_tar(piece: Piece, file: SourceFile) -> Iterator[Record]:
    """Yield the texts of a shard: members ``*.txt``, and ``*.json`` where a sample has no ``*.txt``.

    A sample is the members of one name up to its first dot, one after the other, as in WebDataset; `offset`
    is the number of the member.
    """
    parse = _object_parser(file)
    members = 0
    try:
        with (
            open_stream(file.path, file.compression, file.max_expansion) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_WholeMember) as archive,
        ):
            for _, sample in itertools.groupby(_members(archive, file), key=lambda member: member[1]):
                texts = [(number, suffix, content) for number, _, suffix, content in sample]
                members += len(texts)
                kinds = {suffix for _, suffix, _ in texts}
                for number, suffix, content in texts:
                    if suffix == "txt":
                        yield _decoded(content, file, number)
                    elif "txt" not in kinds:
                        yield parse(content, number)
    except (DamagedError, tarfile.TarError):
        yield BadRecord(file.number, members, "damaged tar data: the rest of the file is not read")
        return
    if not members:
        yield BadRecord(file.number, 0, "no member *.txt or *.json")


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


def _members(archive: tarfile.TarFile, file: SourceFile) -> Iterator[tuple[int, str, str, bytearray]]:
    """Yield number, name, suffix and content of the members with text."""
    left = max(FREE_BYTES, file.max_expansion * file.size)
    for number, member in enumerate(archive):
        path = Path(member.name)
        name, _, suffix = path.name.partition(".")
        if not member.isfile() or suffix not in ("txt", "json"):
            continue
        # Holes have no bytes in the archive.
        left -= member.size if member.issparse() else 0
        if left < 0:
            raise ExpansionError
        content = archive.extractfile(member)
        assert content is not None
        yield number, str(path.with_name(name or ".")), suffix, _content(content, file)


def _damaged(file: SourceFile, offset: int) -> BadRecord:
    return BadRecord(
        file.number, offset, f"damaged {file.compression} data: the rest of the file is not read"
    )


_READERS: dict[str, Callable[[Piece, SourceFile], Iterator[Record]]] = {
    "txt": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_parquet,
    "wikipedia": _read_wikipedia,
    "tar": _read_tar,
}
