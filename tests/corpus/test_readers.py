"""Documents and bad records of each format, whole, compressed, divided and broken."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from slipway.common.errors import UserError
from slipway.corpus.documents import Document
from slipway.corpus.errors import BadRecord
from slipway.corpus.formats import recognize
from slipway.corpus.readers import parquet_row_groups, read
from slipway.corpus.units import Piece, SourceFile, divide

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: zstandard.compress(data[:100]) + zstandard.compress(data[100:]),
}
TEXTS = [f"Document {number}: " + "späte Wörter " * (number % 7) for number in range(60)]
WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">
<siteinfo><sitename>W</sitename></siteinfo>
<page><title>A</title><ns>0</ns><id>12</id><revision><id>1</id><text>'''Anna''' is a [[given name|name]].
{{Infobox|a={{b}}}}&lt;ref name="x"&gt;[http://x y]&lt;/ref&gt;
== Life ==
* born [[Ulm]]&amp;nbsp;1 [[File:a.jpg|thumb|In [[Ulm]]]]</text></revision></page>
<page><title>B</title><ns>1</ns><id>13</id><revision><text>talk</text></revision></page>
<page><title>C</title><ns>0</ns><id>14</id><redirect title="A" /><revision><text>x</text></revision></page>
<page><title>D</title><ns>0</ns><id>15</id><revision><text>Second.</text></revision></page>
</mediawiki>
"""


def source(path: Path, **more: Any) -> SourceFile:
    kind, compression = recognize(path, path.name)
    return SourceFile(0, path.name, path, path.stat().st_size, "", kind, compression, "text", **more)


def records(path: Path, piece: Piece | None = None) -> list[Document | BadRecord]:
    return list(read(piece or Piece(0), source(path)))


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "id": at}).encode() + b"\n" for at, text in enumerate(texts))


def test_without_orjson_the_same_documents_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of training frameworks need not have it."""
    path = tmp_path / "a.jsonl"
    odd = [
        b'{"text": NaN}',
        b"[1]",
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"text": "a"} {}',
        b'{"txt": 1}',
    ]
    odd += [b'{"text": 1e999}', b"[" * 5000, b""]
    path.write_bytes(lines(TEXTS) + b"\n".join(odd))
    fast = records(path)
    monkeypatch.setitem(sys.modules, "orjson", None)
    assert records(path) == fast
    assert len(fast) > len(TEXTS)


@pytest.mark.parametrize("compression", [None, *COMPRESS])
def test_lines_are_read_with_their_offsets(tmp_path: Path, compression: str | None) -> None:
    content = lines(TEXTS)
    path = tmp_path / (f"a.jsonl.{compression}" if compression else "a.jsonl")
    path.write_bytes(COMPRESS[compression](content) if compression else content)
    documents = records(path)
    assert source(path).compression == compression
    assert [document.text for document in documents if isinstance(document, Document)] == TEXTS
    for document in documents:
        line = content[document.offset :].split(b"\n")[0]
        assert isinstance(document, Document)
        assert json.loads(line)["text"] == document.text
    # By content alone, too.
    bare = tmp_path / "bare"
    bare.write_bytes(path.read_bytes())
    assert recognize(bare, "bare") == ("jsonl", compression)


@pytest.mark.parametrize("size", [5, 60, 61, 333])
def test_pieces_of_any_size_have_each_line_once(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TEXTS))
    starts = range(0, path.stat().st_size, size)
    read_twice = [record for start in starts for record in records(path, Piece(0, start, start + size))]
    assert read_twice == records(path)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_compressed_data_is_a_bad_record(tmp_path: Path, compression: str, damage: str) -> None:
    path = tmp_path / f"a.jsonl.{compression}"
    content = COMPRESS[compression](lines(TEXTS))
    broken = content[:-20] if damage == "cut" else content[:50] + b"\xff" * 30 + content[80:]
    path.write_bytes(broken)
    (bad,) = [record for record in records(path) if isinstance(record, BadRecord)][-1:]
    assert bad.reason == f"damaged {compression} data: the rest of the file is not read"


def test_broken_lines_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [
        b'{"text": "cut',
        b'{"text": "\xe9"}',
        b"[1]",
        b'{"other": "x"}',
        b'{"text": 3}',
        b'{"text": "\\ud800"}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + lines(["first"]) + b"\n".join(bad) + b"\n\n \n" + lines(["last"]))
    result = records(path)
    assert [record.text for record in result if isinstance(record, Document)] == ["first", "last"]
    assert [record.reason for record in result if isinstance(record, BadRecord)] == [
        "not JSON",
        "not UTF-8",
        "not a JSON object",
        "no key 'text' among other",
        "'text' is no text",
        "'text' has half of a surrogate pair",
    ]
    content = path.read_bytes()
    for record, line in zip(result[1:-1], bad, strict=True):
        assert content[record.offset :].startswith(line)


def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipway.corpus.readers._LONGEST_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["a"]) + b'{"text": "' + b"x" * 1000 + b'"}\n' + lines(["b"]))
    first, bad, last = records(path)
    assert isinstance(bad, BadRecord)
    assert bad.reason == "line longer than 100 bytes"
    assert [first.offset, bad.offset, last.offset] == [0, 23, 23 + 1013]


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert records(path) == [Document("one\ntwo\n", 0, 0)]
    path.write_bytes("é".encode("latin-1"))
    assert records(path) == [BadRecord(0, 0, "not UTF-8")]
    path.write_bytes(b"")
    assert records(path) == [Document("", 0, 0)]
    empty_file = SourceFile(0, "a.jsonl", path, 0, "", "jsonl")
    assert list(read(Piece(0), empty_file)) == [BadRecord(0, 0, "empty file")]


def test_row_groups_of_parquet_are_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column: list[str | None] = [*TEXTS]
    column[17] = None
    table = pyarrow.table({"id": [str(row) for row in range(60)], "text": column})
    parquet.write_table(table, path, row_group_size=7)
    groups = parquet_row_groups(path, "a", "text")
    assert len(groups) == 9
    file = source(path, row_groups=groups)
    (unit,) = divide([file], 1 << 20)
    result = [record for piece in unit.pieces for record in read(piece, file)]
    assert len(unit.pieces) == 9
    assert [record.offset for record in result] == list(range(60))
    assert result[17] == BadRecord(0, 17, "'text' is null")
    assert result[18] == Document(TEXTS[18], 0, 18, "18")
    with pytest.raises(UserError, match="no column 'content'; it has id, text"):
        parquet_row_groups(path, "a", "content")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a Parquet file, or not a whole one"):
        parquet_row_groups(path, "a", "text")


@pytest.mark.parametrize("compression", [None, "bz2"])
def test_articles_of_a_dump_are_documents(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "dump.xml"
    path.write_bytes(COMPRESS[compression](WIKI.encode()) if compression else WIKI.encode())
    assert records(path) == [
        Document("Anna is a name.\n\nLife\nborn Ulm 1", 0, 0, "12"),
        Document("Second.", 0, 3, "15"),
    ]
    if compression is None:
        path.write_bytes(WIKI.encode()[:-60])
        *_, bad = records(path)
        assert bad == BadRecord(0, 3, "not well-formed XML: the rest of the file is not read")


def test_samples_of_a_tar_shard_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    members = {
        "x/1.json": b'{"text": "metadata"}',
        "x/1.txt": b"first",
        "x/2.jpg": b"\xff",
        "x/2.json": b'{"text": "second"}',
        "x/3.txt": b"\xff",
    }
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    expected = [Document("first", 0, 1), Document("second", 0, 3), BadRecord(0, 4, "not UTF-8")]
    assert records(path) == expected
    packed = tmp_path / "a.tgz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert records(packed) == expected
    path.write_bytes(path.read_bytes()[:3000])
    # The first sample, of two members, is whole.
    *_, bad = records(path)
    assert bad == BadRecord(0, 2, "damaged tar data: the rest of the file is not read")


def test_an_unknown_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsnl"
    path.write_bytes(b"text")
    with pytest.raises(UserError, match=r"a\.jsnl: unknown format; valid are txt, .*did you mean '\.jsonl'"):
        recognize(path, "a.jsnl")
    assert recognize(path, "a.jsnl", "txt") == ("txt", None)


def test_a_file_of_another_size_than_listed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    file = source(path)
    path.write_bytes(b"texts")
    with pytest.raises(UserError, match=r"it has 5 bytes, and had 4 when `fetch` listed it"):
        list(read(Piece(0), file))
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        list(read(Piece(0), file))
