"""Small files that would become large: what is read of them is bounded, and the key is named."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from slipway.corpus import formats, readers, tars
from slipway.corpus.documents import Document
from slipway.corpus.errors import BadRecord
from slipway.corpus.readers import read
from slipway.corpus.units import Piece
from tests.corpus.preparing import text
from tests.corpus.test_readers import COMPRESS, lines, source

MIB = 1 << 20
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let any file become 1 MiB, instead of 64."""
    for module in (formats, readers, tars):
        monkeypatch.setattr(module, "FREE_BYTES", MIB)
    return MIB


def reasons(path: Path, **limits: int) -> list[str]:
    file = replace(source(path), **limits)
    records = [record for record in read(Piece(0), file) if isinstance(record, BadRecord)]
    return [record.reason for record in records]


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def pax_member(**headers: str) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo("a.txt")
    member.pax_headers = {name.replace("_", "."): value for name, value in headers.items()}
    return member, b"12\n0\n12\n" + b"text" * 400


def gnu_sparse(size: int) -> bytes:
    """Return an archive with one member of the old GNU form: 512 bytes at its end, and a hole before."""
    header = bytearray(tarfile.TarInfo("a.txt").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"00000001000\0"
    header[156:157] = tarfile.GNUTYPE_SPARSE
    number = b"\x80" + (size - 512).to_bytes(11, "big")
    header[386:410] = number + b"00000001000\0"
    header[483:495] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + b"x" * 512 + bytes(1024)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", bytes(8 * MIB)),
        ("a.jsonl", b'{"text": "' + b"a" * 8 * MIB + b'"}\n'),
        ("b.jsonl", (b'{"text": "' + b"a" * 999 + b'"}\n') * (8 << 10)),
        ("a.xml", b"<mediawiki><page><ns>0</ns><revision><text>" + b"a" * 8 * MIB),
        ("a.tar", tar((tarfile.TarInfo("a.txt"), bytes(8 * MIB)))),
    ],
    ids=["text", "line", "lines", "page", "member"],
)
def test_decompressed_bytes_are_bounded(
    tmp_path: Path, free: int, compression: str, name: str, content: bytes
) -> None:
    path = tmp_path / f"{name}.{compression}"
    path.write_bytes(COMPRESS[compression](content))
    *_, reason = reasons(path)
    assert "(data_preparation.max_expansion=100): the rest of it is not read" in reason
    assert not reasons(path, max_expansion=1_000_000)[1:]


@pytest.mark.parametrize("compression", COMPRESS)
def test_ordinary_compression_is_within_the_default(tmp_path: Path, free: int, compression: str) -> None:
    path = tmp_path / f"a.jsonl.{compression}"
    chance = random.Random(1)
    content = lines([text(chance) for _ in range(8_000)])
    path.write_bytes(COMPRESS[compression](content))
    assert path.stat().st_size < free < len(content)
    assert len(list(read(Piece(0), source(path)))) == 8_000


def test_zstd_takes_a_time_that_grows_as_the_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b" " * (256 * MIB) + b'\n{"text": "a"}'))
    assert path.stat().st_size < 1 << 14
    *_, document = read(Piece(0), replace(source(path), max_expansion=1_000_000))
    assert isinstance(document, Document)
    assert document.text == "a"


@pytest.mark.parametrize("size", [2 * MIB, 1 << 30, 1 << 40, 1 << 60])
def test_holes_of_a_sparse_member_are_bounded(tmp_path: Path, free: int, size: int) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(gnu_sparse(size))
    assert "max_expansion=100" in reasons(path)[0]


def test_a_sparse_member_within_the_limit_is_read(tmp_path: Path, free: int) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(gnu_sparse(4096))
    [document] = read(Piece(0), source(path))
    assert isinstance(document, Document)
    assert document.text == "\0" * 3584 + "x" * 512


@pytest.mark.parametrize(
    "headers",
    [
        {"GNU_sparse_map": "a,b", "GNU_sparse_size": "9"},
        {"GNU_sparse_map": "0", "GNU_sparse_size": "9"},
        {"GNU_sparse_major": "1", "GNU_sparse_minor": "0", "GNU_sparse_realsize": "x"},
        {"GNU_sparse_size": "9" * 5000},
        {"size": "-1024"},
        {"size": "9" * 5000},
        {"size": "²"},
        {"mtime": "1e999", "uid": "9" * 5000},
    ],
    ids=lambda headers: " ".join(headers),
)
def test_headers_that_the_library_cannot_read_are_damage(tmp_path: Path, headers: dict[str, str]) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(pax_member(**headers), (tarfile.TarInfo("b.txt"), b"b")))
    assert all("damaged tar data" in reason or "not UTF-8" in reason for reason in reasons(path))


def test_headers_behind_headers_are_damage(tmp_path: Path) -> None:
    long = tarfile.TarInfo("x")
    long.type = tarfile.GNUTYPE_LONGNAME
    path = tmp_path / "a.tar"
    path.write_bytes(long.tobuf() * 20_000)
    assert "damaged tar data" in reasons(path)[0]


@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY", "PLAIN"])
@pytest.mark.parametrize("groups", [1, 16])
def test_texts_of_parquet_are_bounded(tmp_path: Path, free: int, encoding: str, groups: int) -> None:
    table = pyarrow.table({"text": ["a" * (MIB // 8)] * 256})
    path = tmp_path / "a.parquet"
    is_dictionary = encoding == "dictionary"
    parquet.write_table(
        table,
        path,
        compression="zstd",
        row_group_size=256 // groups,
        use_dictionary=is_dictionary,
        column_encoding=None if is_dictionary else {"text": encoding},
    )
    assert path.stat().st_size < 1 << 14
    file = source(path)
    for piece in (Piece(0), *(Piece(0, row, row + 1) for row in range(groups))):
        read_records = list(read(piece, file))
        assert sum(len(record.text) for record in read_records if isinstance(record, Document)) <= MIB
        if piece.end is None:
            assert isinstance(read_records[-1], BadRecord)
            assert "max_expansion=100" in read_records[-1].reason


def test_rows_are_read_in_parts_that_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_ROWS_BYTES", 4 * MIB)
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * MIB] * 64}), path)
    before = pyarrow.total_allocated_bytes()
    for record in read(Piece(0), replace(source(path), max_expansion=1_000_000)):
        assert isinstance(record, Document)
        assert pyarrow.total_allocated_bytes() - before < 32 * MIB


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.tar"])
def test_the_bytes_of_a_document_are_bounded(tmp_path: Path, name: str) -> None:
    path, content = tmp_path / name, b"x" * 1000
    if path.suffix == ".tar":
        content = tar((tarfile.TarInfo("a.txt"), content))
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    assert reasons(path, max_document_bytes=1000) == []
    assert reasons(path, max_document_bytes=999) == [
        "more bytes than data_preparation.max_document_bytes=999"
    ]


def test_rows_of_parquet_and_their_ids_are_bounded(tmp_path: Path, free: int) -> None:
    path = tmp_path / "a.parquet"
    for texts, ids in (
        ([""] * 100_000, []),
        ([None] * 100_000, []),
        (["a"] * 100, ["x" * (MIB // 32)] * 100),
    ):
        columns = {"text": pyarrow.array(texts, pyarrow.string())} | ({"id": ids} if ids else {})
        parquet.write_table(pyarrow.table(columns), path, compression="zstd")
        assert "max_expansion=100" in reasons(path)[-1]
    # Of lists, a few bytes can be any number.
    parquet.write_table(pyarrow.table({"text": ["a"], "id": [["x"]]}), path)
    assert reasons(path) == []


@pytest.mark.parametrize("name", ["a.xml", "a.parquet", "a.jsonl", "a.tar"])
def test_the_bytes_of_a_text_are_bounded_in_each_format(tmp_path: Path, name: str) -> None:
    path, word = tmp_path / name, "é" * 400
    if name == "a.parquet":
        parquet.write_table(pyarrow.table({"text": [word]}), path)
    elif name == "a.tar":
        members = [(tarfile.TarInfo(f"a.{part}.txt"), ("é" * 199).encode()) for part in range(2)]
        path.write_bytes(tar(*members))
    elif name == "a.xml":
        page = f"<mediawiki><page><ns>0</ns><revision><text>{word}</text></revision></page></mediawiki>"
        path.write_text(page)
    else:
        path.write_text(json.dumps({"text": word, "other": "x" * 1000}) + "\n")
    size = 798 if name == "a.tar" else 800
    assert reasons(path, max_document_bytes=size) == []
    assert reasons(path, max_document_bytes=size - 1) == [
        f"more bytes than data_preparation.max_document_bytes={size - 1}"
    ]


def test_json_in_a_tar_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar((tarfile.TarInfo("a.json"), json.dumps({"text": "x" * 1000}).encode())))
    assert "max_document_bytes" in reasons(path, max_document_bytes=500)[0]


@pytest.mark.parametrize("part", [b"<a/>", b"<a>"], ids=["many", "nested"])
def test_elements_outside_of_pages_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(readers, "_PAGE_EVENTS", 100)
    path, page = tmp_path / "a.xml", b"<page><ns>0</ns><revision><text>a</text></revision></page>"
    path.write_bytes(b"<mediawiki>" + page * 50 + part * 200)
    *documents, bad = read(Piece(0), source(path))
    assert len(documents) == 50
    assert isinstance(bad, BadRecord)
