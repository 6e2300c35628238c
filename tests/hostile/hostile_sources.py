"""Sources of text that a hostile server or a broken disk could leave, and configurations: strategies."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import zstandard
from hypothesis import strategies as st
from pyarrow import parquet

from tests.monitor.hostile_runs import ODD_VALUES, Thing, odd_texts, odd_values, put, special

_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
_PAGE = b"<!DOCTYPE html><html><body>404: no such file</body></html>"
_ODD_BYTES = [
    b"", b"\n\n", b" ", b"\xef\xbb\xbf", b"\xff\xfe", b"\0" * 1000, b"\r\r\n", _POINTER, _PAGE, b"\x1f\x8b",
    b"PAR1PAR1", b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
    b"\x80\x04.", b"text\x1b]0;owned\x07", b"\xed\xa0\x80", "é\u202e漢\U0001f600\U00016ebb".encode(),
    b"a" * 300_000, b"=" * 3000,
]  # fmt: skip
odd_bytes = st.sampled_from(_ODD_BYTES) | st.binary(max_size=300)

# Lines of JSON.
_ODD_LINES = [
    "[" * 2000, '{"a":' * 2000, '{"text": NaN}', '{"text": "a", "score": Infinity}',
    '{"text": "x\\ud83d"}', "[]",
    '{"text": "good", "title": "cut \\ud83d"}', '{"text": ' + "9" * 5000 + "}", '[{"text": "a"}]',
    "null", "{",
    '{"text": "a"} {"text": "b"}', "{'text': 'a'}", '{"text": "a",}', "\ufeff" + '{"text": "a"}',
    json.dumps({"text": "\x1b]0;owned\x07 \u202e"}), '{"text": "a", "text": 1}',
]  # fmt: skip
lines = st.lists(
    st.one_of(
        st.sampled_from(_ODD_LINES),
        st.builds(lambda value: json.dumps({"text": value}), odd_values),
        st.builds(lambda value: json.dumps(value), st.sampled_from(ODD_VALUES)),
        st.builds(lambda key, value: json.dumps({"text": "a", key: value}), odd_texts, odd_values),
    ),
    max_size=6,
).map(lambda items: "\n".join(items).encode("utf-8", "surrogatepass"))

# Wikipedia's dumps.
_MARKUP = [
    "=" * 3000, "<!--" * 3000, "<ref>" * 3000,
    "{{" * 3000, "[[" * 3000, "{|" * 3000, "'" * 5000, "[[a|" * 2000 + "]]" * 9,
    "<ref>" + "<ref name=a/>" * 2000, "== a\n" * 2000, "-{" * 2000, "&amp;" * 2000, "\n:" * 3000,
    "<math>" * 2000, "[[File:" + "[[a]]" * 1000, "#REDIRECT [[x]]", "{{a|" * 1500 + "}}" * 1500,
    "https://" * 2000,
]  # fmt: skip
_LAUGHS = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 10}">' for n in range(9))
    + "]><mediawiki><page><ns>0</ns><id>1</id><revision><text>&j;</text></revision></page></mediawiki>"
)
_EXTERNAL = (
    '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><mediawiki><page><ns>0</ns><id>1</id>'
    "<revision><text>&a;</text></revision></page></mediawiki>"
)
_TAILS = ["</mediawiki>", "", "<page>" * 3000, "</page>" * 9, "<page><id>x</id></page></mediawiki>"]
dumps = (
    st.builds(
        lambda markup, tail: (
            "<mediawiki><page><title>a</title><ns>0</ns><id>1</id><revision><text>"
            f"{markup.replace('<', '&lt;')}</text></revision></page>{tail}"
        ).encode(),
        st.sampled_from(_MARKUP),
        st.sampled_from(_TAILS),
    )
    | st.sampled_from([_LAUGHS.encode(), _EXTERNAL.encode(), b"<a>" * 20_000, b"<mediawiki>\xff</mediawiki>"])
)  # fmt: skip

_MEMBERS = [
    "a.txt", "Dr. Jekyll.txt", "vol.2.txt", "NOTES.TXT", "0001.jsonl", "readme.md", "../out.txt",
    "/tmp/out.txt", "a/b.json", "k.0.txt", "k.1.txt", "k.0.jpg", "a\x1b[2J.txt", "é.txt", ".hidden.txt",
    "x" * 90 + ".txt", "a.txt.gz", "",
]  # fmt: skip
_KINDS = [
    tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE,
    tarfile.GNUTYPE_SPARSE, b"Z",
]  # fmt: skip
_PAX = [
    {"GNU.sparse.map": "a,b"}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, {"size": "9" * 30},
    {"path": "../x.txt"},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1" + "0" * 13},
    {"size": "-5"}, {"GNU.sparse.size": "x"}, {"mtime": "nan"}, {"size": "\u0663"},
]  # fmt: skip


def _tar(members: list[tuple[str, bytes, bytes, dict[str, str]]], cut: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, kind, pax in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.pax_headers = kind, "/etc/passwd", pax
            member.size = len(content) if kind in (tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE, b"Z") else 0
            archive.addfile(member, io.BytesIO(content) if member.size else None)
    content = stream.getvalue()
    return content[: len(content) - cut] if cut else content


@functools.cache
def sparse_tar() -> bytes:
    """Return a tar of 1,536 bytes with a GNU sparse member of a terabyte."""
    header = bytearray(tarfile.TarInfo("bomb.txt").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[483:495] = struct.pack(">BxxxQ", 0x80, 1 << 40)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


tars = st.builds(
    _tar,
    st.lists(
        st.tuples(
            st.sampled_from(_MEMBERS),
            odd_bytes | st.just(b"text of a member"),
            st.sampled_from([tarfile.REGTYPE] * 8 + _KINDS),
            st.sampled_from([{}] * 12 + _PAX),
        ),
        max_size=6,
    ),
    st.sampled_from([0] * 6 + [1, 512, 1024, 10_000]),
) | st.just(sparse_tar())


@functools.cache
def _parquet(number: int) -> bytes:
    columns: list[Callable[[], Any]] = [
        lambda: pyarrow.array(["a", None, "b"]),
        lambda: pyarrow.array([["a"], ["b"]]),
        lambda: pyarrow.array([{"content": "a"}]),
        lambda: pyarrow.array([1, 2]),
        lambda: pyarrow.array([b"a\xff"]),
        lambda: pyarrow.array([], pyarrow.string()),
        lambda: pyarrow.DictionaryArray.from_arrays([0] * 256, ["a" * 40_000_000]),
        lambda: pyarrow.array(["x" * 1_000_000] * 30).dictionary_encode(),
        lambda: pyarrow.array([[("a", "b")]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
    ]  # fmt: skip
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": columns[number]()}), stream, compression="zstd")
    return stream.getvalue()


PARQUETS = 9
parquets = st.integers(0, PARQUETS - 1).map(_parquet)


@functools.cache
def _zeros(compression: str) -> bytes:
    """Return a small file that decompresses to very much."""
    compressor: Any = {
        "zst": lambda: zstandard.ZstdCompressor(level=1).compressobj(),
        "bz2": bz2.BZ2Compressor,
        "xz": lambda: lzma.LZMACompressor(preset=0),
        "gz": lambda: zlib.compressobj(6, zlib.DEFLATED, 31),
    }[compression]()
    parts = 512 if compression == "zst" else 128  # of 1 MiB: the others take seconds to make more
    zeros = bytes(1 << 20)
    return b"".join([*(compressor.compress(zeros) for _ in range(parts)), compressor.flush()])


_COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
bombs = st.sampled_from(["gz", "zst", "bz2", "xz"]).map(_zeros)


def _damaged(content: bytes, seed: int) -> bytes:
    """Return content with nothing changed, some bits flipped, or its end cut off."""
    chance = random.Random(seed)
    kind = chance.choice(["whole", "whole", "flipped", "cut", "longer", "doubled"])
    if not content or kind == "whole":
        return content
    if kind == "cut":
        return content[: chance.randrange(len(content))]
    if kind == "longer":
        return content + chance.randbytes(50)
    if kind == "doubled":
        return content + content
    changed = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


_STEMS = [
    "b", "part 1", "a[1]", "x=y", "{z}", "é", "b\x1b[2J", ".hidden", "_SUCCESS", "README", "._b", "k.0",
    "--help",
]  # fmt: skip
_SUFFIXES = [".jsonl", ".txt", ".TXT", ".md", ".json", ".parquet", ".xml", ".tar", ".csv", ""]
_CONTENTS = {".jsonl": lines, ".json": lines, ".parquet": parquets, ".xml": dumps, ".tar": tars}

_names = st.builds(
    lambda directory, stem, suffix, packed: f"{directory}{stem}{suffix}{packed}",
    st.sampled_from([""] * 5 + ["sub/", ".ipynb_checkpoints/", ".cache/huggingface/"]),
    st.sampled_from(_STEMS),
    st.sampled_from(_SUFFIXES),
    st.sampled_from(["", "", "", *_COMPRESSORS]),
)


@st.composite
def _files(draw: st.DrawFn) -> tuple[str, Thing]:
    name = draw(_names)
    if draw(st.integers(0, 7)) == 0:
        return name, draw(special)
    packed = next((kind for kind in _COMPRESSORS if kind and name.endswith(kind)), "")
    suffix = Path(name.removesuffix(packed)).suffix
    content = draw(_CONTENTS.get(suffix, odd_bytes) | odd_bytes)
    if draw(st.integers(0, 9)) == 0:
        return name, Thing("bytes", draw(bombs | st.just(sparse_tar())))
    kind = packed if draw(st.integers(0, 5)) else draw(st.sampled_from(list(_COMPRESSORS)))
    return name, Thing("bytes", _damaged(_COMPRESSORS[kind](content), draw(st.integers(0, 1 << 30))))


@dataclass(frozen=True)
class HostileSources:
    """Files beside a healthy one, and keys of the configuration."""

    files: dict[str, Thing] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write the files into a directory; leave out those that conflict with others."""
        for name, thing in self.files.items():
            path = directory / name
            if os.path.lexists(path) or not path.resolve().is_relative_to(directory.resolve()):
                continue
            put(path, thing)


hostile_sources = st.builds(
    HostileSources,
    st.lists(_files(), min_size=1, max_size=4).map(dict),
    st.fixed_dictionaries(
        {"on_error": st.sampled_from(["skip", "skip", "raise"])},
        optional={
            "max_errors": st.sampled_from([0.0, 0.001, 0.5, 1.0]),
            "format": st.sampled_from(["auto", "auto", "txt", "jsonl", "parquet", "wikipedia", "tar"]),
            "text_key": st.sampled_from(["text", "text", "content", "a.b", "\x1b[2J"]),
        },
    ),
)
