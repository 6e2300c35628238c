"""Nothing of a source is lost unsaid: damage stops, what is left out is named, no data set is replaced."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from slipway.common.errors import UserError
from slipway.corpus import spec
from slipway.corpus.__main__ import main
from slipway.corpus.documents import Document
from slipway.corpus.errors import BadRecord, LeftOut
from slipway.corpus.formats import recognize
from slipway.corpus.lint import lint
from slipway.corpus.readers import parquet_row_groups, read
from slipway.corpus.sources import collect, discover
from slipway.corpus.tokenizers import obtain
from slipway.corpus.units import Piece, SourceFile
from tests.corpus.preparing import configuration, results, write_configuration, write_lines, write_sources
from tests.corpus.servers import FaultyServer, faulty_server

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_sources(directory / "in")
    preparation = spec.read(configuration(directory, directory / "in", directory / "bpe"))
    obtain(preparation, collect(preparation))
    return directory / "bpe"


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


def run(directory: Path, node: dict[str, Any], phase: str = "run") -> int:
    return main([phase, *write_configuration(directory / "conf", node)])


def manifest(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "out/x.manifest.json").read_text())
    return content


def json_lines(count: int = 200, word: str = "document") -> bytes:
    return b"".join(json.dumps({"text": f"{word} {number}"}).encode() + b"\n" for number in range(count))


def table(count: int = 2000) -> bytes:
    stream = io.BytesIO()
    texts = [f"{number} {number * number}" for number in range(count)]
    parquet.write_table(pyarrow.table({"text": texts}), stream, compression="gzip")
    content = bytearray(stream.getvalue())
    content[200:400] = bytes(200)
    return bytes(content)


def archive(members: dict[str, bytes], mode: str = "w") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return stream.getvalue()


def pages() -> bytes:
    page = "<page><ns>0</ns><id>{}</id><revision><text>page {}</text></revision></page>"
    return ("<mediawiki>" + "".join(page.format(n, n) for n in range(50)) + "</mediawiki>").encode()


TEXTS = {f"{number:03}.txt": f"text {number}".encode() for number in range(20)}
LOSSES = {
    **{f"cut.jsonl.{kind}": (pack(json_lines())[:-40], "damaged ") for kind, pack in COMPRESS.items()},
    **{f"cut.txt.{kind}": (pack(json_lines())[:-40], "damaged ") for kind, pack in COMPRESS.items()},
    "quarter.jsonl.gz": (gzip.compress(json_lines(5000))[:4000], "damaged gz data"),
    "changed.jsonl.bz2": (bz2.compress(json_lines())[:200] + b"\xff" * 30, "damaged bz2 data"),
    "cut.tar": (archive(TEXTS)[:9000], "damaged tar data"),
    "ended.tar": (archive(TEXTS)[:10240], "damaged tar data"),
    "zeroed.tar": (archive(TEXTS)[:2048] + bytes(512) + archive(TEXTS)[2560:], "bytes after the end"),
    "joined.tar": (archive(TEXTS) + archive(TEXTS), "bytes after the end are not read"),
    "joined.tgz": (gzip.compress(archive(TEXTS) * 2), "bytes after the end are not read"),
    **{
        f"second stream.txt.{kind}": (pack(json_lines()) + b"?" + pack(json_lines()), f"damaged {kind} data")
        for kind, pack in COMPRESS.items()
    },
    "cut.tar.gz": (gzip.compress(archive(TEXTS))[:-30], "damaged tar data"),
    "page.parquet": (table(), "damaged Parquet data"),
    "cut.parquet": (table()[:3000], "not a Parquet file, or not a whole one"),
    "cut.xml": (pages()[:1500], "not well-formed XML"),
    "cut.jsonl": (json_lines()[:-10], "not JSON, and the file ends within this line"),
    "letter.jsonl": (json_lines() + '{"text": "ä'.encode()[:-1], "not UTF-8, and the file ends within this"),
    "zeros.jsonl": (json_lines() + bytes(500), "zero bytes instead of text"),
    "array.json": (b'[{"text": "a"}, {"text": "b"}]', "a JSON array instead of lines"),
    "pretty.json": (b'[\n {\n  "text": "a"\n }\n]\n', "JSON over several lines instead of one"),
    "object.json": (b'{"data": [\n {"text": "a"}\n]}\n', "JSON over several lines instead of one"),
    "one line.jsonl": (json_lines().replace(b"\n", b" ") + b"\n", "data follow the JSON value of a line"),
    "long.jsonl": (json_lines() + b'{"text": "' + b"x" * (1 << 20) + b'"}\n', "line longer than 1,000,000"),
    "pointer.tar": (archive({"a.txt": b"text", "b.jsonl": POINTER}), "a pointer to it: `git lfs pull`"),
    "array.tar": (archive({"a.json": b'["one", "two"]'}), "a JSON array instead of lines"),
    "page.jsonl.gz": (PAGE, "a web page instead of the data"),
    "error.jsonl": (b"<?xml version='1.0'?>\n<Error>AccessDenied</Error>\n", "a web page instead of the"),
    "feed.xml": (b"<rss><item/></rss>", "no page of a dump of Wikipedia"),
    "large.txt.zst": (zstandard.compress(bytes(65 << 20)), "more than 100 bytes for each byte of the file"),
    "large.tar.gz": (gzip.compress(archive({"a.txt": bytes(65 << 20)})), "(data_preparation.max_expansion=1"),
    "packed.jsonl.gz": (gzip.compress(PAGE), "a web page instead of the data"),
    "plain.txt.zst": (b"no such key\n", "not compressed, and its name says zst"),
    "page.parquet.": (PAGE, "a web page instead of the data"),
    **{
        f"pointer.{suffix}": (POINTER, "a pointer to it: `git lfs pull` gets the file")
        for suffix in ("txt", "jsonl", "jsonl.gz", "tar", "parquet", "xml.bz2")
    },
    "packed.txt.gz": (gzip.compress(POINTER), "a pointer to it"),
    "hawser.txt": (POINTER.replace(b"git-lfs", b"hawser"), "a pointer to it: `git lfs pull`"),
    "annex.txt": (b"/annex/objects/SHA256E-s3--ab.txt\n", "a pointer to it: `git annex get`"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_lost_documents_of_unknown_number_are_not_skipped(
    tokenizer: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("slipway.corpus.readers._LONGEST_LINE", 1_000_000)
    content, reason = LOSSES[name]
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / f"in/{number}.jsonl").write_bytes(json_lines(word=f"shard {number} document"))
    damaged = tmp_path / "in" / name.rstrip(".")
    damaged.write_bytes(content)
    node = configuration(tmp_path, tmp_path / "in", tokenizer, on_error="skip", max_errors=0.5)
    assert run(tmp_path, node) == 2
    error = capsys.readouterr().err
    assert str(damaged) in error
    assert reason in error
    assert "on_error=skip leaves" not in error
    assert not (tmp_path / "out").exists() or results(tmp_path / "out") == {}
    reports = list(lint([tmp_path / "in"], lambda path, done, total: None))
    assert [report.path for report in reports if report.problems] == [str(damaged)]
    (report,) = [report for report in reports if report.problems]
    assert any(reason in problem for problem in report.problems)


def test_damage_is_told_from_a_connection_that_breaks(
    tokenizer: Path, tmp_path: Path, server: FaultyServer, capsys: Any
) -> None:
    content = gzip.compress(json_lines(5000))
    node = configuration(tmp_path, tmp_path, tokenizer, on_error="skip", max_errors=0.5)
    url = server.put("a.jsonl.gz", content, drop_after=[1000, 3000])
    assert run(tmp_path, node | {"inputs": [url]}) == 0
    assert manifest(tmp_path)["counts"]["documents"] == 5000
    url = server.put("cut.jsonl.gz", content[:-30])
    node |= {"inputs": [url], "output_prefix": str(tmp_path / "other/x")}
    assert run(tmp_path, node) == 2
    assert f"{url}, byte " in capsys.readouterr().err


def members_of(
    members: dict[str, bytes], directory: Path
) -> tuple[list[str], list[BadRecord], list[LeftOut]]:
    """Return the texts of a shard, its bad records, and what it leaves out by name."""
    path = directory / "shard.tar"
    path.write_bytes(archive(members))
    left_out: list[LeftOut] = []
    file = SourceFile(0, "shard.tar", path, path.stat().st_size, "", "tar", None, "text")
    records = list(read(Piece(0), file, left_out.append))
    texts = [record.text for record in records if isinstance(record, Document)]
    return texts, [record for record in records if isinstance(record, BadRecord)], left_out


def test_every_member_of_a_shard_is_read_or_named(tmp_path: Path) -> None:
    names = [
        "moby.txt",
        "Dr. Jekyll.txt",
        "Dr. Moreau.txt",
        "vol.2.txt",
        "NOTES.TXT",
        "readme.md",
        "a/b.c.text",
    ]
    members = {name: name.encode() for name in names}
    members |= {"0001.jsonl": b'{"text": "one"}\n\n{"text": "two"}\n', "0002.JSON": b'{"text": "three"}'}
    members |= {"0003.json": b'{"text": "four"}\n{"text": "five"}\n'}
    numbered = [
        "2101.00001.txt",
        "2101.00002.txt",
        "1.5.0.txt",
        "1.5.1.txt",
        "dir.0/1.1.txt",
        "dir.0/1.2.txt",
    ]
    members |= {name: name.encode() for name in numbered}
    others = {
        "0004.jpg": "no text",
        "LICENSE": "no text",
        "a.txt.gz": "no text",
        "._moby.txt": "hidden",
        "__MACOSX/moby.txt": "hidden",
        "\x1b]52.bin": "no text",
    }
    texts, bad, left_out = members_of({**members, **dict.fromkeys(others, b"{oops")}, tmp_path)
    assert (texts, bad) == ([*names, "one", "two", "three", "four", "five", *numbered], [])
    assert [entry.reason for entry in left_out] == list(others.values())
    assert left_out[0] == LeftOut("shard.tar: 0004.jpg", "no text")
    assert left_out[-1].name == r"shard.tar: \x1b]52.bin"


def test_parts_of_a_document_are_one_in_their_order(tmp_path: Path) -> None:
    samples = {f"a.b/7.{part}.txt": f"part {part}".encode() for part in (0, 1, 10, 2)}
    samples |= {"8.0.jpg": b"\xff", "8.1.txt": b"caption", "8.2.txt": b"end", "8.json": b'{"id": 3}'}
    samples |= {"9.json": b'{"text": "metadata"}', "9.txt": b"pair", "9.cls": b"1"}
    samples |= {"10.0.txt": b"good", "10.1.txt": b"\xff"}
    texts, bad, left_out = members_of(samples, tmp_path)
    assert texts == ["part 0\n\npart 1\n\npart 2\n\npart 10", "caption\n\nend", "pair"]
    assert [record.reason for record in bad] == ["not UTF-8"]
    names = ["8.0.jpg", "8.json", "9.cls", "9.json"]
    reasons = ["no text", "beside the text of its sample"] * 2
    assert left_out == [
        LeftOut(f"shard.tar: {name}", reason) for name, reason in zip(names, reasons, strict=True)
    ]


def test_members_that_are_left_out_are_in_the_manifest_and_the_report(
    tokenizer: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "a.tar").write_bytes(archive({"1.txt": b"one", "1.jpg": b"\xff", "2.bin": b"\0"}))
    assert run(tmp_path, configuration(tmp_path, tmp_path / "a.tar", tokenizer)) == 0
    names = [f"{tmp_path}/a.tar: {name}" for name in ("1.jpg", "2.bin")]
    assert manifest(tmp_path)["left_out"] == [{"name": name, "reason": "no text"} for name in names]
    assert manifest(tmp_path)["counts"]["left_out"] == 2
    assert f"2 files or members left out (no text: {', '.join(names)})" in capsys.readouterr().out
    (report,) = lint([tmp_path / "a.tar"], lambda path, done, total: None)
    assert report.notes == [f"2 files or members left out (no text: {', '.join(names)})"]


# What a directory may hold besides data, and why it is left out.
AUXILIARY = {
    ".ipynb_checkpoints/a-checkpoint.jsonl": "hidden",
    ".cache/huggingface/download/a.jsonl.metadata": "hidden",
    ".DS_Store": "hidden",
    "sub/._a.jsonl": "hidden",
    "_SUCCESS": "hidden",
    "_temporary/0/part.jsonl": "hidden",
    ".gitattributes": "hidden",
    "README.md": "a description of data of another format",
    "LICENSE": "a description of data of another format",
    "bpe/vocab.json": "of a tokenizer",
    "old.work/units/a.jsonl": "of an unfinished preparation",
}


@pytest.fixture
def download(tmp_path: Path) -> Path:
    directory = tmp_path / "download"
    for name in AUXILIARY:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{oops")
    write_lines(directory / "a.jsonl", ["one"])
    write_lines(directory / "sub/b.jsonl", ["two"])
    (directory / "sub/README.md").write_text("a text")
    return directory


@pytest.mark.parametrize("form", ["", "*", "**", "**/*"])
def test_files_besides_the_data_are_left_out_by_one_rule(
    tokenizer: Path, tmp_path: Path, download: Path, capsys: Any, form: str
) -> None:
    node = configuration(tmp_path, download / form if form else download, tokenizer)
    assert run(tmp_path, node) == 0
    assert capsys.readouterr().out.count("files or members left out") == 1
    data = {str(download / name) for name in ("a.jsonl", "sub/b.jsonl", "sub/README.md")}
    record = manifest(tmp_path)
    assert {source["name"] for source in record["sources"]} == data
    left_out = {entry["name"].removeprefix(f"{download}/"): entry["reason"] for entry in record["left_out"]}
    if form in ("", "**/*"):
        assert left_out == AUXILIARY
    reports = list(lint([download], lambda path, done, total: None))
    assert {report.path for report in reports} == data
    assert not any(report.problems for report in reports)
    assert f"{len(AUXILIARY)} files or members left out" in reports[0].notes[0]


def test_what_an_entry_names_itself_is_read(tokenizer: Path, tmp_path: Path, download: Path) -> None:
    write_lines(download / "_SUCCESS", ["named"])
    write_lines(download / ".ipynb_checkpoints/a-checkpoint.jsonl", ["below"])
    inputs = [str(download / "_SUCCESS"), str(download / ".ipynb_checkpoints/*"), str(download / "README.md")]
    node = configuration(tmp_path, download, tokenizer) | {"inputs": inputs}
    assert run(tmp_path, node) == 0
    assert len(manifest(tmp_path)["sources"]) == 3
    hidden = configuration(tmp_path, download, tokenizer, pattern="_S*", output_prefix=str(tmp_path / "o/y"))
    assert run(tmp_path, hidden) == 0


def test_links_and_files_of_other_names_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "in"
    directory.mkdir()
    write_lines(directory / "a.jsonl", ["one"])
    (directory / "B.TXT").write_text("text")
    (tmp_path / "elsewhere").mkdir()
    (directory / "more").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(directory / "fifo")
    left_out: list[LeftOut] = []
    discover(spec.read(configuration(tmp_path, directory, tmp_path)), left_out)
    reasons = {"more": "a link to a directory", "fifo": "no regular file"}
    assert {entry.name: entry.reason for entry in left_out} == {
        f"{directory}/{name}": reason for name, reason in reasons.items()
    }
    left_out.clear()
    discover(spec.read(configuration(tmp_path, directory, tmp_path, pattern="*.jsonl")), left_out)
    assert [entry.name.rpartition("/")[2] for entry in left_out] == ["B.TXT", "fifo", "more"]
    assert {entry.reason for entry in left_out} == {"not *.jsonl"}
    (directory / "lost.jsonl").symlink_to("../blobs/00")
    with pytest.raises(UserError, match=r"lost\.jsonl: it links to \.\./blobs/00, and there is no such file"):
        collect(spec.read(configuration(tmp_path, directory, tmp_path)))


def test_the_name_of_a_link_tells_the_format(tokenizer: Path, tmp_path: Path, capsys: Any) -> None:
    """The cache of a hub has links to files without suffixes."""
    snapshot = tmp_path / "hub/snapshots/0a/data"
    snapshot.mkdir(parents=True)
    contents = {
        "b.txt": b"a text",
        "c.md": b"# text",
        "d.jsonl": b' {"text": "line"}\n',
        "e.jsonl": b"{oops\n",
    }
    for number, (name, content) in enumerate(contents.items()):
        blob = tmp_path / f"hub/blobs/{number:040}"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(f"../../../blobs/{blob.name}")
    node = configuration(tmp_path, snapshot, tokenizer, on_error="skip", max_errors=1)
    assert run(tmp_path, node) == 0
    sources = {source["name"]: source["format"] for source in manifest(tmp_path)["sources"]}
    kinds = {"b.txt": "txt", "c.md": "txt", "d.jsonl": "jsonl", "e.jsonl": "jsonl"}
    assert sources == {str(snapshot / name): kind for name, kind in kinds.items()}
    assert "blobs" not in capsys.readouterr().out
    # Two names of one file are one source.
    whole = spec.read(node | {"inputs": [str(snapshot), str(tmp_path / "hub/blobs" / f"{0:040}")]})
    assert len(collect(whole)) == 4


def test_a_whole_cache_of_a_hub_has_its_snapshots_files(tmp_path: Path) -> None:
    hub = tmp_path / "hub/datasets--a--b"
    for name, content in {"blobs/0b1": b"text", "blobs/0b2": b"of no link", "refs/main": b"ab" * 20}.items():
        (hub / name).parent.mkdir(parents=True, exist_ok=True)
        (hub / name).write_bytes(content)
    (hub / "snapshots" / ("ab" * 20)).mkdir(parents=True)
    link = hub / "snapshots" / ("ab" * 20) / "a.txt"
    link.symlink_to("../../blobs/0b1")
    left_out: list[LeftOut] = []
    (source,) = discover(spec.read(configuration(tmp_path, tmp_path / "hub", tmp_path)), left_out)
    assert source.name == str(link)
    assert [entry.name for entry in left_out] == [
        f"{hub}/{name}" for name in ("blobs/0b1", "blobs/0b2", "refs/main")
    ]
    (report,) = lint([tmp_path / "hub"], lambda path, done, total: None)
    assert (report.path, report.problems) == (str(link), {})


def test_a_link_that_leads_nowhere_is_refused_and_reported(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["one"])
    for name, target in {"annex.jsonl": ".git/annex/objects/x", "loop.jsonl": "loop.jsonl"}.items():
        (tmp_path / name).symlink_to(target)
        with pytest.raises(UserError, match=f"inputs: {tmp_path}/{name}: "):
            discover(spec.read(configuration(tmp_path, tmp_path, tmp_path)))
        reports = list(lint([tmp_path], lambda path, done, total: None))
        assert [report.path for report in reports if report.problems] == [str(tmp_path / name)]
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["a#1.txt", "what?.txt", "a[1].txt", "C#.md"])
def test_signs_in_a_name_do_not_hide_its_suffix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    assert recognize(tmp_path / name, str(tmp_path / name)) == ("txt", None)
    assert recognize(tmp_path / name, "https://host.example/a.txt?x=1#y") == ("txt", None)


@pytest.mark.parametrize("kind", COMPRESS)
def test_streams_one_after_the_other_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    padding = bytes(8) if kind in ("gz", "xz") else b""
    path.write_bytes((COMPRESS[kind](json_lines()) + padding) * 3)
    file = SourceFile(0, "a", path, path.stat().st_size, "", "jsonl", kind, "text")
    records = list(read(Piece(0), file))
    assert len(records) == 600
    assert all(isinstance(record, Document) for record in records)


@pytest.mark.parametrize("window", [27, 28, 31])
def test_zstd_of_any_window_is_read(tmp_path: Path, window: int) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=window, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = packer.compress(json_lines()) + packer.flush()
    path = tmp_path / "a.jsonl.zst"
    for skippable in (b"", b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", b"\x5f\x2a\x4d\x18\x00\x00\x00\x00"):
        path.write_bytes(skippable + content + skippable)
        assert recognize(path, path.name) == ("jsonl", "zst")
        file = SourceFile(0, "a", path, path.stat().st_size, "", "jsonl", "zst", "text")
        assert len(list(read(Piece(0), file))) == 200


def test_what_json_of_python_writes_is_read(tmp_path: Path) -> None:
    lines = [
        b'{"text": "a", "score": NaN, "other": -Infinity}',
        b'{"text": "b", "title": "cut \\ud83d", "\\udc00": 1}',
        b'\xef\xbb\xbf{"text": "c"}',
        b"\xef\xbb\xbf",
        b'{"text": "cut \\ud83d"}',
        b'{"\\ud83d": "no key"}',
        b"[" * 100_000,
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    file = SourceFile(0, "a", path, path.stat().st_size, "", "jsonl", None, "text")
    records = list(read(Piece(0), file))
    assert [record.text for record in records if isinstance(record, Document)] == ["a", "b", "c"]
    assert [record.reason for record in records if isinstance(record, BadRecord)] == [
        "'text' has half of a surrogate pair",
        "no key 'text' among \\ud83d",
        "not JSON",
    ]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([["a", "b"]], "list<"),
        ([{"content": "a"}], "struct<"),
        (pyarrow.array([[("a", "b")]], pyarrow.map_(pyarrow.string(), pyarrow.string())), "map<"),
        (pyarrow.array([1], pyarrow.int64()), "int64"),
    ],
)
def test_a_column_without_texts_is_refused_with_its_type(tmp_path: Path, values: Any, kind: str) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": values}), path)
    with pytest.raises(UserError, match=f"its column 'text' holds {kind}"):
        parquet_row_groups(path, "a", "text")


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), None])
def test_a_column_of_texts_is_taken(tmp_path: Path, kind: Any) -> None:
    texts = pyarrow.array(["a", "b"], kind) if kind else pyarrow.array(["a", "b"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    assert len(parquet_row_groups(tmp_path / "a.parquet", "a", "text")) == 1


def test_empty_texts_are_counted_as_lint_counts_them(tokenizer: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["", " ", "\n\t \u2028", "text"])
    (report,) = lint([tmp_path / "a.jsonl"], lambda path, done, total: None)
    assert report.problems["empty text"].count == 3
    assert run(tmp_path, configuration(tmp_path, tmp_path / "a.jsonl", tokenizer)) == 0
    assert manifest(tmp_path)["counts"]["dropped"] == {"empty": 3}


# --- data sets that are there


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "sources": ({"inputs": ["{other}"]}, "sources"),
    "option": ({"append_eod": False}, "options"),
    "limit": ({"max_document_bytes": 1000}, "options"),
    "splits": ({"splits": {"train": 0.5, "test": 0.5}}, "options"),
    "text key": (
        {"inputs": [{"path": "{source}", "name": "{source}", "text_key": "title"}]},
        "formats or keys",
    ),
    "tokenizer": ({"tokenizer_dir": "{bpe}", "vocab_size": 290}, "tokenizer"),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("phase", ["run", "fetch"])
def test_another_data_set_is_replaced_only_if_asked(
    tokenizer: Path, tmp_path: Path, capsys: Any, case: str, phase: str
) -> None:
    for name in ("source", "other"):
        lines = [json.dumps({"text": f"{name} {number}", "title": name}) for number in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    places = {name: str(tmp_path / f"{name}.jsonl") for name in ("source", "other")}
    changes, reason = OTHERS[case]
    changed = json.loads(
        json.dumps(changes)
        .replace("{source}", places["source"])
        .replace("{other}", places["other"])
        .replace("{bpe}", str(tmp_path / "bpe"))
    )
    node = configuration(tmp_path, tmp_path / "source.jsonl", tokenizer)
    assert run(tmp_path, node) == 0
    before = results(tmp_path / "out")
    assert run(tmp_path, node | changed, phase) == 2
    error = capsys.readouterr().err
    assert (
        f"data_preparation.output_prefix={tmp_path}/out/x: another data set is there, made from other"
        in error
    )
    assert reason in error
    assert "data_preparation.replace=True" in error
    assert results(tmp_path / "out") == before
    assert run(tmp_path, node | changed | {"replace": True}) == 0
    assert results(tmp_path / "out") != before
    # And again, without a wish to replace.
    assert run(tmp_path, node | changed) == 0
    assert "is there already" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["versions", "key", "text_key", "limit", "name"])
def test_the_same_wish_to_another_version_is_no_other_data_set(
    tokenizer: Path, tmp_path: Path, place: str
) -> None:
    write_lines(tmp_path / "a.jsonl", ["one", "two"])
    node = configuration(tmp_path, tmp_path / "a.jsonl", tokenizer)
    assert run(tmp_path, node) == 0
    before = results(tmp_path / "out")
    path = tmp_path / "out/x.manifest.json"
    record = manifest(tmp_path)
    if place == "versions":
        record |= {"versions": {"slipway": "0.0.1", "tokenizers": "0.1"}, "key": "of that version"}
    elif place == "key":
        record["key"] = "of a version that digests otherwise"
    elif place == "text_key":
        record |= {"key": "of a version that names no key"}
        del record["sources"][0]["text_key"]
    if record != manifest(tmp_path):
        path.write_text(json.dumps(record))
    if place == "limit":
        node |= {"max_expansion": 200}
    if place == "name":
        (tmp_path / "moved").mkdir()
        (tmp_path / "a.jsonl").rename(tmp_path / "moved/a.jsonl")
        node |= {"inputs": [str(tmp_path / "moved/a.jsonl")]}
    assert run(tmp_path, node) == 0
    after = results(tmp_path / "out")
    assert after.pop(path.name) == before.pop(path.name) or place == "name"
    assert after == before


@pytest.mark.parametrize("content", ["", "{}", '{"version": 1}', "[]", '{"version": 9}'])
def test_a_manifest_that_cannot_be_read_vouches_for_nothing(
    tokenizer: Path, tmp_path: Path, capsys: Any, content: str
) -> None:
    write_lines(tmp_path / "a.jsonl", ["one"])
    node = configuration(tmp_path, tmp_path / "a.jsonl", tokenizer)
    assert run(tmp_path, node) == 0
    (tmp_path / "out/x.manifest.json").write_text(content)
    assert run(tmp_path, node) == 2
    assert "another data set is there, without a manifest that can be read" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_data_set_without_a_manifest_is_not_replaced(
    tokenizer: Path, tmp_path: Path, capsys: Any, suffix: str
) -> None:
    write_lines(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "out").mkdir()
    (tmp_path / f"out/x_train{suffix}").write_bytes(b"of Megatron's own tool")
    node = configuration(tmp_path, tmp_path / "a.jsonl", tokenizer, splits={"train": 1.0})
    assert run(tmp_path, node) == 2
    assert "another data set is there, without a manifest" in capsys.readouterr().err
    assert run(tmp_path, node | {"replace": True}) == 0


def test_another_size_than_the_tokenizer_has_is_refused(tmp_path: Path, capsys: Any) -> None:
    write_lines(tmp_path / "a.jsonl", ["one one one", "two two two"])
    node = configuration(tmp_path, tmp_path / "a.jsonl", tmp_path / "bpe", vocab_size=400)
    assert run(tmp_path, node) == 0
    # The text has no 400 tokens; the wish is still the same.
    assert run(tmp_path, node) == 0
    assert run(tmp_path, node | {"vocab_size": None}) == 0
    for size in (300, 500):
        assert run(tmp_path, node | {"vocab_size": size}) == 2
        error = capsys.readouterr().err
        assert f"vocab_size={size}: the tokenizer {tmp_path}/bpe/vocab.json is one of 400 tokens" in error
    assert run(tmp_path, node | {"vocab_size": None}) == 0
