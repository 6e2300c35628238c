"""Documents, and bad records: the content of a source's bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from slipway.common.errors import escape, suggest
from slipway.corpus.errors import NO_KEY, BadRecord
from slipway.corpus.formats import detect_pointer
from slipway.corpus.units import SourceFile

BOM = b"\xef\xbb\xbf"
_NO_JSON = "not JSON"
UNREADABLE = (_NO_JSON, "not UTF-8")
_PART = 1 << 20
_NAMED_KEYS = 8
# The first line of JSON that has more of them.
_OPEN_JSON = re.compile(rb"\s*[\[{](?:.*[\[{,])?\s*", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Document:
    """Text of one document, and its place in the sources.

    Attributes
    ----------
    text
        Empty, or of white space alone, if the source has no text; such a document is dropped.
    file
        Number of the source file.
    offset
        Byte offset of the line in the uncompressed file; number of the row, page or member otherwise; 0 if
        the file is the document.
    id
        Identifier within the source, if it has one.
    """

    text: str
    file: int
    offset: int
    id: str | None = None

    @property
    def is_empty(self) -> bool:
        """Return True if it has no text."""
        return not self.text or self.text.isspace()


Record = Document | BadRecord
Parser = Callable[[bytes | bytearray, int], Record]


def read_content(stream: IO[bytes], file: SourceFile) -> bytearray:
    """Return all that a stream has; a byte more than the limit if it has more than a document may."""
    content, left = bytearray(), file.max_document_bytes + 1
    while part := stream.read(min(left, _PART)):
        content += part
        left -= len(part)
    return content


def decode(content: bytes | bytearray, file: SourceFile, offset: int) -> Record:
    """Return a text with the newlines of Unix, as Python reads text files."""
    if len(content) > file.max_document_bytes:
        return report_too_large(file, offset)
    if (defect := detect_pointer(content)) is not None:
        return BadRecord(file.number, offset, defect, is_loss=True)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return BadRecord(file.number, offset, "not UTF-8")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Document(text, file.number, offset)


def report_too_large(file: SourceFile, offset: int) -> BadRecord:
    """Return the defect of a document of more bytes than are allowed."""
    limit = f"data_preparation.max_document_bytes={file.max_document_bytes}"
    return BadRecord(file.number, offset, f"more bytes than {limit}")


def report_damaged(file: SourceFile, offset: int, what: str | None = None) -> BadRecord:
    """Return the loss of the rest of a file, due to broken compression or `what`."""
    reason = f"damaged {what or file.compression} data: the rest of the file is not read"
    return BadRecord(file.number, offset, reason, is_loss=True)


def object_parser(file: SourceFile) -> Parser:
    """Return the function that makes a document of a JSON object."""
    try:
        from orjson import loads as strict_loads
    except ImportError:  # in an image: Python's json reads the same, and takes longer
        strict_loads = None  # type: ignore[assignment]
    number, key = file.number, file.text_key or "text"

    def parse(content: bytes | bytearray, offset: int) -> Record:
        # Files that were joined have one at the beginning of a line.
        if content.startswith(BOM):
            content = content.removeprefix(BOM)
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
                return _report_no_json(content, number, offset)
        if isinstance(record, list) and any(isinstance(item, dict | str) for item in record):
            return BadRecord(
                number, offset, "a JSON array instead of lines: `jq -c '.[]'` makes them", is_loss=True
            )
        if not isinstance(record, dict):
            return BadRecord(number, offset, "not a JSON object")
        if key not in record:
            return BadRecord(number, offset, _explain_missing_key(key, record))
        text, name = record[key], record.get("id")
        if not isinstance(text, str):
            return BadRecord(number, offset, f"'{key}' is no text")
        if not is_strict and _SURROGATE.search(text):
            return BadRecord(number, offset, f"'{key}' has half of a surrogate pair")
        return Document(text, number, offset, None if name is None else str(name))

    return parse


def _explain_missing_key(key: str, record: Mapping[str, object]) -> str:
    keys = sorted(map(escape, record))
    shown = ", ".join(keys[:_NAMED_KEYS]) + (", ..." if len(keys) > _NAMED_KEYS else "")
    return f"{NO_KEY} '{key}' among {shown or 'none'}{suggest(key, keys)}"


def _report_no_json(content: bytes | bytearray, file: int, offset: int) -> BadRecord:
    """Return the defect of a text that is no JSON."""
    defect = detect_pointer(content)
    if defect is None and b"\0" in content:
        defect = "zero bytes instead of text"
    if defect is None and offset == 0 and _OPEN_JSON.fullmatch(content):
        defect = "JSON over several lines instead of one for each document: `jq -c .` makes them"
    return BadRecord(file, offset, defect or _NO_JSON, is_loss=defect is not None)
