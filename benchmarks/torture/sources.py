"""Generated sources: good ones in the forms that others write, damaged ones, and bombs."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import tarfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import zstandard
from pyarrow import parquet

from benchmarks.torture.cases import Case, Expected
from benchmarks.torture.texts import AWKWARD, PLAIN

CASES: list[Case] = []
Build = Callable[[Path], Expected]

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 123456789\n"
PAGE = "<!DOCTYPE html>\n<html><head><title>503 Service Unavailable</title></head><body></body></html>\n"
# Enough documents that one bad record among them is below the ceiling of on_error=skip.
MANY = [f"document {number} of many, with some words in it" for number in range(500)]
SKIP = {"on_error": "skip"}


def case(name: str) -> Callable[[Build], Build]:
    """Enter a function that writes sources as a case."""

    def enter(build: Build) -> Build:
        CASES.append(Case(name, "source", build))
        return build

    return enter


def lines(documents: Iterable[str]) -> bytes:
    """Return documents as lines of JSON."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in documents)


def write(directory: Path, name: str, content: bytes | str) -> Path:
    """Write a file; return its path."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def content(
    name: str,
    files: bytes | str | dict[str, bytes | str],
    documents: Sequence[str] | None,
    words: Sequence[str] = (),
    *,
    file: str = "a.jsonl",
    refusal: Sequence[str] | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Enter files with their documents as a case: one file, or those of a directory."""

    def build(directory: Path) -> Expected:
        if isinstance(files, dict):
            for path, data in files.items():
                write(directory, path, data)
            inputs = [directory]
        else:
            inputs = [write(directory, file, files)]
        return Expected(inputs, documents, words, refusal, options=options or {})

    case(name)(build)


def refused(name: str, data: bytes | str, *words: str, file: str = "a.jsonl") -> None:
    """Enter a file that is refused for its reason, and that on_error=skip does not take either."""
    content(f"{name}, refused", data, None, words, file=file)


# --- lines of JSON

content("jsonl: awkward texts", lines(AWKWARD), AWKWARD)
content(
    "jsonl: blank lines, CRLF, BOM",
    b"\xef\xbb\xbf" + b"\r\n".join([b'{"text": "one"}', b"", b"  \t ", b'{"text": "two"}', b""]),
    ["one", "two"],
)
content(
    "jsonl: line separators of Unicode in texts",
    '{"text": "a\u2028b\x85c\u2029d"}\n{"text": "\\u0000 zero"}\n',
    ["a\u2028b\x85c\u2029d", "\0 zero"],
)
content(
    "jsonl: NaN and Infinity beside the text",
    '{"text": "one", "score": NaN}\n{"text": "two", "score": -Infinity}\n',
    ["one", "two"],
)
content(
    "jsonl: half a surrogate pair beside the text",
    '{"text": "one", "title": "cut \\ud83d"}\n{"text": "two \\ud83d\\ude42"}\n',
    ["one", "two 🙂"],
)
content(
    "jsonl: repeated keys, numeric ids, long numbers",
    '{"text": "old", "text": "new", "id": 7}\n{"text": "two", "id": 7}\n{"text": "three", "n": 1'
    + "0" * 30
    + "}\n",
    ["new", "two", "three"],
)
content("jsonl: no newline at the end", lines(PLAIN)[:-1], PLAIN)
content("jsonl: empty documents are dropped", lines(["", *PLAIN, ""]), PLAIN)
content(
    "jsonl: files joined with a BOM between",
    lines(["one"]) + b"\xef\xbb\xbf" + lines(["two"]),
    ["one", "two"],
)
content("jsonl: a line of 3 MB", lines(["word " * 600_000, "two"]), ["word " * 600_000, "two"])
refused("jsonl: half a surrogate pair in the text", '{"text": "cut \\ud83d"}\n', "surrogate|utf-8|not json")
refused("jsonl: the text is missing", '{"content": "x", "id": 1}\n', "text", "content")
refused("jsonl: the text is null", '{"text": null}\n', "'text'", "no text|null")
refused("jsonl: the text is a list", '{"text": ["a", "b"]}\n', "'text'")
refused("jsonl: two objects on a line", '{"text": "a"}{"text": "b"}\n', "not json|follow")
refused("jsonl: an array", json.dumps([{"text": "a"}, {"text": "b"}]), "array|not a json object|lines")
refused("jsonl: pretty-printed", json.dumps({"text": "a", "b": {"c": 1}}, indent=2), "not json|several lines")
refused("jsonl: a raw tab in a string", '{"text": "a\tb"}\n', "not json")
refused("jsonl: single quotes", "{'text': 'a'}\n", "not json|unknown format")
refused("jsonl: a trailing comma", '{"text": "a",}\n', "not json")
refused(
    "jsonl: nested 100,000 deep",
    '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
    "not json|deep",
)
refused("jsonl: Latin-1", '{"text": "Größe"}\n'.encode("latin-1"), "utf-8")
refused("jsonl: UTF-16", '{"text": "a"}\n'.encode("utf-16"), "utf-8|not json|utf-16|zero bytes")
refused("jsonl: zero bytes at the end", lines(PLAIN) + bytes(4096), "not json|zero")
refused("jsonl: cut within its last line", lines(MANY)[:-20], "not json|ends within")
refused("jsonl: an empty file", b"", "empty file")
refused("jsonl: empty documents alone", lines(["", ""]), "no document")
refused("jsonl: a page of a web server", PAGE, "web page|html|not json")

# --- texts

content(
    "txt: CRLF, CR alone, BOM",
    {"a.txt": b"\xef\xbb\xbfone\r\ntwo", "b.txt": b"three\rfour\r"},
    ["one\ntwo", "three\nfour\n"],
)
content(
    "txt: other suffixes and capitals",
    {"A.TXT": "one", "b.text": "two", "c.md": "three"},
    ["one", "two", "three"],
)
content("txt: empty files beside others", {"a.txt": "one", "b.txt": "", "__init__.txt": ""}, ["one"])
content(
    "txt: names with spaces, = and braces",
    {"a b.txt": "one", "c=d.txt": "two", "{e}.txt": "three"},
    ["one", "two", "three"],
)
refused("txt: a picture", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "utf-8", file="a.txt")

# --- compression


def seek_table() -> bytes:
    """Return the skippable frame that ends a seekable zstd file of one frame."""
    table = struct.pack("<II", 100, 200) + struct.pack("<IB", 1, 0) + struct.pack("<I", 0x8F92EAB1)
    return struct.pack("<II", 0x184D2A5E, len(table)) + table


def long_zstd(data: bytes, bits: int) -> bytes:
    """Return data as `zstd --long` compresses them, with a window of so many bits."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=27, enable_ldm=True, hash_log=6, chain_log=6, write_content_size=False
    )
    frame = bytearray(zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b""))
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = bytearray(compressor.compress(data) + compressor.flush())
    # Magic, then the frame header's descriptor (no single segment), then the window: its exponent, less 10.
    assert not frame[4] & 0x20 and frame[5] >> 3 == 17
    frame[5] = (bits - 10) << 3
    return bytes(frame)


PACKED = lines(PLAIN)
HALVES = lines(PLAIN[:2]), lines(PLAIN[2:])
content(
    "gz: several members, zero padding",
    gzip.compress(HALVES[0]) + gzip.compress(HALVES[1]) + bytes(512),
    PLAIN,
    file="a.jsonl.gz",
)
content("bz2: two streams", b"".join(map(bz2.compress, HALVES)), PLAIN, file="a.jsonl.bz2")
content("xz: two streams", b"".join(map(lzma.compress, HALVES)), PLAIN, file="a.jsonl.xz")
content("zst: two frames", b"".join(map(zstandard.compress, HALVES)), PLAIN, file="a.jsonl.zst")
content(
    "zst: a skippable frame first, as of pzstd",
    struct.pack("<III", 0x184D2A50, 4, 99) + zstandard.compress(PACKED),
    PLAIN,
    file="a.jsonl.zst",
)
content("zst: a seek table last", zstandard.compress(PACKED) + seek_table(), PLAIN, file="a.jsonl.zst")
for bits in (27, 28, 30, 31):
    content(
        f"zst: --long={bits}",
        long_zstd(PACKED, bits),
        PLAIN,
        file="a.jsonl.zst",
        refusal=["window", "memory|long"],
    )
content("gz: without the suffix", gzip.compress(PACKED), PLAIN, file="a.jsonl")
content("txt.gz", gzip.compress(b"one\r\ntwo"), ["one\ntwo"], file="a.txt.gz")
for suffix, compress in (
    ("gz", gzip.compress),
    ("zst", zstandard.compress),
    ("bz2", bz2.compress),
    ("xz", lzma.compress),
):
    whole = compress(lines(MANY))
    refused(f"{suffix}: cut", whole[: len(whole) // 2], "damaged|cut", file=f"a.jsonl.{suffix}")
    refused(
        f"{suffix}: a page of a web server", PAGE, "not compressed|web page|html", file=f"a.jsonl.{suffix}"
    )
    refused(
        f"{suffix}: plain lines",
        PACKED.replace(b"{", b"#"),
        "not compressed|not json",
        file=f"a.jsonl.{suffix}",
    )
refused("gz: garbage behind it", gzip.compress(PACKED) + b"garbage " * 40, "damaged", file="a.jsonl.gz")
damaged = bytearray(gzip.compress(lines(MANY)))
damaged[len(damaged) // 2] ^= 0xFF
refused("gz: a byte changed", bytes(damaged), "damaged", file="a.jsonl.gz")


def one_cut(suffix: str, compress: Callable[[bytes], bytes], directory: Path) -> Expected:
    """Write twenty shards of which one is cut: what is lost with it is no single record."""
    for number in range(20):
        data = compress(lines(f"{number}: {text}" for text in MANY))
        write(directory, f"{number:02}.jsonl.{suffix}", data if number != 7 else data[: len(data) // 4])
    return Expected([directory], None, ["07.jsonl", "damaged|cut"], options=SKIP)


case("gz: one of 20 shards is cut, on_error=skip")(partial(one_cut, "gz", gzip.compress))
case("zst: one of 20 shards is cut, on_error=skip")(partial(one_cut, "zst", zstandard.compress))

# --- Parquet


def table(column: Any) -> bytes:
    """Return a table with one column as a Parquet file."""
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": column}), sink, row_group_size=2)
    return sink.getvalue()


for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
    content(f"parquet: {kind}", table(pyarrow.array(AWKWARD, kind)), AWKWARD, file="a.parquet")
content(
    "parquet: dictionary",
    table(pyarrow.array([*PLAIN, *PLAIN]).dictionary_encode()),
    [*PLAIN, *PLAIN],
    file="a.parquet",
)
NESTED = {
    "list": pyarrow.array([["a", "b"]], pyarrow.list_(pyarrow.string())),
    "struct": pyarrow.array([{"content": "a"}]),
    "map": pyarrow.array([[("k", "a")]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
    "binary": pyarrow.array([b"a"]),
    "int64": pyarrow.array([1]),
}
for kind_name, nested in NESTED.items():
    refused(f"parquet: a column of {kind_name}", table(nested), "'text' holds", kind_name, file="a.parquet")
refused("parquet: a null row", table(pyarrow.array(["a", None])), "null", file="a.parquet")
refused("parquet: cut", table(pyarrow.array(MANY))[:-400], "parquet", file="a.parquet")
refused("parquet: a page of a web server", PAGE, "parquet|web page|html", file="a.parquet")


@case("parquet: no such column, refused")
def other_column(directory: Path) -> Expected:
    """Write a table whose texts have another name."""
    parquet.write_table(pyarrow.table({"content": ["a"], "url": ["b"]}), directory / "a.parquet")
    return Expected([directory], None, ["'text'", "content"])


# --- tar shards


def tar(members: Sequence[tuple[str, bytes | str]], mode: str = "w:", **options: Any) -> bytes:
    """Return an archive of files."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode, **options) as archive:  # type: ignore[call-overload]
        for name, data in members:
            header = tarfile.TarInfo(name)
            data = data.encode() if isinstance(data, str) else data
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return sink.getvalue()


SHARD = [("0.txt", "one"), ("0.json", '{"text": "beside"}'), ("1.json", '{"text": "two"}')]
content("tar: pairs, and JSON alone", tar(SHARD), ["one", "two"], file="a.tar")
content("tar.gz", tar(SHARD, "w:gz"), ["one", "two"], file="a.tar.gz")
content("tgz", tar(SHARD, "w:gz"), ["one", "two"], file="a.tgz")
content("tar.zst", zstandard.compress(tar(SHARD)), ["one", "two"], file="a.tar.zst")
for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
    name = "directory/" * 30 + "größe.txt"
    content(
        f"tar: long names, format {form}",
        tar([(name, "one"), ("b.txt", "two")], format=form),
        ["one", "two"],
        file="a.tar",
    )
content(
    "tar: names with dots, capitals",
    tar([("moby.txt", "one"), ("Dr. Jekyll.txt", "two"), ("vol.2.txt", "three"), ("NOTES.TXT", "four")]),
    ["one", "two", "three", "four"],
    file="a.tar",
)
content(
    "tar: members that are no text",
    tar([("a.txt", "one"), ("a.jpg", b"\xff\xd8\xff"), ("b.cls", "7"), ("b.txt", "two")]),
    ["one", "two"],
    ["left out", "a.jpg"],
    file="a.tar",
)
content(
    "tar: lines of JSON within",
    tar([("a.txt", "one"), ("0001.jsonl", lines(["two", "three"]))]),
    ["one", "two", "three"],
    file="a.tar",
    refusal=["0001.jsonl"],
)
content(
    "tar: documents of several parts",
    tar([("a.0.txt", "one "), ("a.0.jpg", b"\xff\xd8\xff"), ("a.1.txt", "two"), ("b.0.txt", "three")]),
    ["one \n\ntwo", "three"],
    file="a.tar",
)
refused(
    "tar: cut",
    tar([(f"{number}.txt", text * 30) for number, text in enumerate(MANY)])[:100_000],
    "damaged|cut",
    file="a.tar",
)
refused("tar: no text within", tar([("a.jpg", b"\xff\xd8\xff")]), "no member|no text|left out", file="a.tar")
refused("tar: a page of a web server", PAGE, "tar|web page|html", file="a.tar")
refused("tar: a text that is not UTF-8", tar([("a.txt", b"Gr\xf6\xdfe")]), "utf-8", file="a.tar")


@case("tar: links and devices are no text")
def links_in_tar(directory: Path) -> Expected:
    """Write an archive with links to files of the machine, a device and a FIFO."""
    with tarfile.open(directory / "a.tar", "w") as archive:
        for name, kind, target in (
            ("link.txt", tarfile.SYMTYPE, "/etc/passwd"),
            ("hard.txt", tarfile.LNKTYPE, "a.txt"),
            ("device.txt", tarfile.CHRTYPE, ""),
            ("fifo.txt", tarfile.FIFOTYPE, ""),
        ):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, target
            archive.addfile(header)
        header = tarfile.TarInfo("a.txt")
        header.size = 3
        archive.addfile(header, io.BytesIO(b"one"))
    return Expected([directory / "a.tar"], ["one"], ["left out", "link.txt"])


# --- directories, names and links

content(
    "directory: hidden files and leavings",
    {
        "a.jsonl": lines(["one"]),
        "b.jsonl": lines(["two"]),
        ".ipynb_checkpoints/a-checkpoint.txt": "hidden",
        ".DS_Store": b"\0\0\0\1Bud1",
        "._a.jsonl": b"\0\5\x16\7",
        "_SUCCESS": "",
        ".cache/huggingface/download/a.jsonl.metadata": "0123\n",
    },
    ["one", "two"],
    ["left out|hidden"],
)
content(
    "directory: a data set's README",
    {"README.md": "# A data set\n", "data/a.jsonl": lines(["one"]), "data/b.jsonl": lines(["two"])},
    ["one", "two"],
    ["README.md"],
    refusal=["README.md"],
)
content(
    "directory: all formats",
    {
        "a.jsonl": lines(["one"]),
        "b.jsonl.gz": gzip.compress(lines(["two"])),
        "c.txt": "three",
        "d.parquet": table(pyarrow.array(["four"])),
        "e.tar": tar([("x.txt", "five")]),
        "f/g/h.jsonl.zst": zstandard.compress(lines(["six"])),
    },
    ["one", "two", "three", "four", "five", "six"],
)
content("a name with brackets", {"a[1].txt": "one", "a1.txt": "two"}, ["one", "two"])
refused("a name without a known suffix", "some text\n", "unknown format", file="data.bin")
POINTED = (
    "a.txt",
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.zst",
    "a.tar",
    "a.parquet",
    "a.md",
    "a.json",
    "a.xml.bz2",
)
for pointed in POINTED:
    refused(f"a Git LFS pointer as {pointed}", POINTER, "git lfs|pointer", file=pointed)
    content(
        f"a Git LFS pointer as {pointed} among others, on_error=skip",
        {"good.jsonl": lines(MANY), pointed: POINTER},
        None,
        ["git lfs|pointer"],
        options=SKIP,
    )


@case("one file by a name with brackets")
def brackets(directory: Path) -> Expected:
    """Name a file whose name is a pattern too."""
    return Expected([write(directory, "a[1].jsonl", lines(PLAIN))], PLAIN)


def hub_cache(file: str, directory: Path) -> Expected:
    """Write a snapshot of a hub's cache, whose files are links to blobs without a suffix."""
    contents = {
        "a.txt": b"one",
        "b.md": b"two",
        "c.jsonl": b' { "id": 1, "text": "three"}\n',
        "d.jsonl.gz": gzip.compress(lines(["four"])),
    }
    texts = {"a.txt": "one", "b.md": "two", "c.jsonl": "three", "d.jsonl.gz": "four"}
    snapshot = directory / "snapshots" / "0123abcd" / "data"
    snapshot.mkdir(parents=True)
    for number, (name, data) in enumerate(contents.items()):
        blob = write(directory, f"blobs/{number:064x}", data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    if file == "all":
        return Expected([snapshot], list(texts.values()))
    return Expected([snapshot / file], [texts[file]])


for linked in ("all", "a.txt", "b.md", "c.jsonl", "d.jsonl.gz"):
    case(f"links of a hub's cache: {linked}")(partial(hub_cache, linked))


@case("a shard that is there twice, refused")
def twice(directory: Path) -> Expected:
    """Write a shard and its copy."""
    for name in ("a.jsonl", "b.jsonl"):
        write(directory, name, lines(PLAIN))
    return Expected([directory], None, ["same bytes"])


@case("a FIFO as a source, refused")
def fifo(directory: Path) -> Expected:
    """Name a FIFO that nobody writes to."""
    os.mkfifo(directory / "b.jsonl")
    return Expected([directory / "b.jsonl"], None, ["b.jsonl"])


@case("a device as a source, refused")
def device(directory: Path) -> Expected:
    """Name a device that has no end."""
    return Expected(["/dev/zero"], None, ["/dev/zero"])


@case("links in a circle, and to nothing")
def circle(directory: Path) -> Expected:
    """Write a directory that is within itself, and a link to nothing."""
    write(directory, "a.jsonl", lines(PLAIN))
    (directory / "again").symlink_to(directory)
    (directory / "gone.jsonl").symlink_to("nowhere.jsonl")
    return Expected([directory], PLAIN, refusal=["gone.jsonl"])


# --- a dump of Wikipedia


def dump(pages: Iterable[str]) -> bytes:
    """Return the articles as a dump."""
    text = "".join(
        f"<page><title>T</title><ns>0</ns><id>{number}</id><revision><text>{page}</text></revision></page>"
        for number, page in enumerate(pages, 1)
    )
    return bz2.compress(f"<mediawiki>{text}</mediawiki>".encode())


ARTICLES = ["A town of 2,024 people.", "Größe &amp; Maß", "日本語"]
content(
    "wikipedia: plain articles",
    dump(ARTICLES),
    [text.replace("&amp;", "&") for text in ARTICLES],
    file="x.xml.bz2",
)
refused("wikipedia: not well-formed", bz2.compress(b"<mediawiki><page>"), "well-formed", file="x.xml.bz2")
refused("wikipedia: cut", dump(MANY)[:900], "damaged|well-formed", file="x.xml.bz2")

# --- bombs: what they say does not matter, but that they end and take no memory


def bomb(name: str, build: Callable[[Path], Path]) -> None:
    """Enter a source that may be refused, or taken, within the bounds."""

    def write_it(directory: Path) -> Expected:
        return Expected([build(directory)], is_bomb=True)

    CASES.append(Case(f"bomb: {name}", "bomb", write_it))


def sparse_tar(directory: Path) -> Path:
    """Write a member of 1 TB without a byte in it, as GNU tar describes it."""
    header = tarfile.TarInfo("a.txt")
    header.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    # The map has one piece, at the end of the file; then the real size, both in octal.
    size = 1 << 40
    block[386:410] = f"{size:011o}\0".encode() + b"00000000000\0"
    block[483:495] = b"\x80" + size.to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return write(directory, "a.tar", bytes(block) + bytes(1024))


def zeros(compress: Callable[[], Any], name: str, size: int, directory: Path) -> Path:
    """Write so many zero bytes, compressed."""
    compressor, path = compress(), directory / name
    with path.open("wb") as stream:
        for _ in range(size >> 20):
            stream.write(compressor.compress(bytes(1 << 20)))
        stream.write(compressor.flush())
    return path


def dictionary(directory: Path) -> Path:
    """Write rows that are all one text of 4 MB: some kB in the file, gigabytes in memory."""
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 1000, pyarrow.int32()), pyarrow.array(["word " * 800_000])
    )
    path = directory / "a.parquet"
    parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd")
    return path


def page_of(text: str, directory: Path) -> Path:
    """Write an article."""
    return write(directory, "x.xml.bz2", dump([text]))


bomb("a sparse tar of 1 TB", sparse_tar)
bomb(
    "zst: 4 GB of zeros",
    partial(zeros, lambda: zstandard.ZstdCompressor().compressobj(), "a.jsonl.zst", 4 << 30),
)
bomb(
    "zst: 4 GB of zeros as a text",
    partial(zeros, lambda: zstandard.ZstdCompressor().compressobj(), "a.txt.zst", 4 << 30),
)
bomb("bz2: 256 MB of zeros", partial(zeros, bz2.BZ2Compressor, "a.jsonl.bz2", 256 << 20))
bomb("parquet: a dictionary of 4 MB, 1,000 rows", dictionary)
for sign in ("=", "[[", "{{", "{|", "'", "&lt;ref&gt;", "&lt;!--", "-{", "[[a|", "*", ":"):
    bomb(f"wikipedia: a page of {sign}", partial(page_of, sign * (200_000 // len(sign))))
