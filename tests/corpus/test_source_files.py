"""The way from the entries of `inputs` to the list of local files."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.corpus import spec
from slipway.corpus.errors import OutsideError
from slipway.corpus.fetching import Policy
from slipway.corpus.formats import open_stream, recognize
from slipway.corpus.sources import collect, discover, read_sources
from tests.corpus.servers import FaultyServer, faulty_server, s3_server

QUICK = Policy(attempts=2, first_wait=0.01, longest_wait=0.02, timeout=5.0)
LINE = '{"text": "a line"}\n'


@pytest.fixture
def books(tmp_path: Path) -> Path:
    directory = tmp_path / "books"
    (directory / "old" / "older").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "old/c.txt", "old/older/d.txt", "notes.md", "old-e.txt"):
        (directory / name).write_text(f"text of {name}\n")
    return directory


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


def preparation(tmp_path: Path, *inputs: Any, **options: Any) -> spec.Preparation:
    node = {"inputs": [str(entry) if isinstance(entry, Path) else entry for entry in inputs]}
    places = {"output_prefix": str(tmp_path / "out/corpus"), "tokenizer_dir": str(tmp_path / "bpe")}
    return spec.read({**node, **places, **options})


def discovered_names(tmp_path: Path, *inputs: Any, **options: Any) -> list[str]:
    """Return the names without the directory, in order of the name."""
    sources = discover(preparation(tmp_path, *inputs, **options))
    return sorted(source.name.removeprefix(f"{tmp_path}/") for source in sources)


def test_directories_are_searched_for_the_pattern(tmp_path: Path, books: Path) -> None:
    every = ["books/a.txt", "books/b.txt", "books/old-e.txt", "books/old/c.txt", "books/old/older/d.txt"]
    assert discovered_names(tmp_path, books, pattern="*.txt") == every
    assert discovered_names(tmp_path, books, pattern="old/*.txt") == ["books/old/c.txt"]
    assert discovered_names(tmp_path, books, pattern="old/**/*.txt") == every[3:]
    assert discovered_names(tmp_path, books / "old", books / "notes.md", pattern="c*") == [
        "books/notes.md",
        every[3],
    ]


def test_globs_find_files_and_directories(tmp_path: Path, books: Path) -> None:
    assert discovered_names(tmp_path, f"{books}/?.txt") == ["books/a.txt", "books/b.txt"]
    assert discovered_names(tmp_path, f"{books}/**/[cd].txt") == ["books/old/c.txt", "books/old/older/d.txt"]
    assert discovered_names(tmp_path, f"{tmp_path}/b*ks", pattern="*.md") == ["books/notes.md"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "a[1].txt"
    path.write_text("text")
    (tmp_path / "a1.txt").write_text("text")
    assert discovered_names(tmp_path, path) == ["a[1].txt"]


def test_a_file_that_two_entries_name_is_one_source(tmp_path: Path, books: Path) -> None:
    (books / "link.txt").symlink_to(books / "a.txt")
    assert len(discovered_names(tmp_path, books, books / "a.txt", f"{books}/a*", pattern="*.txt")) == 5


def test_the_order_is_that_of_the_seed(tmp_path: Path, books: Path) -> None:
    """Names are sorted by their components, then shuffled, as in earlier versions."""
    names = ["a.txt", "b.txt", "old/c.txt", "old/older/d.txt", "old-e.txt"]
    random.Random(1234).shuffle(names)
    sources = discover(preparation(tmp_path, books, pattern="*.txt"))
    assert [source.name for source in sources] == [f"{books}/{name}" for name in names]
    assert sources != discover(preparation(tmp_path, books, pattern="*.txt", seed=3))


def test_limits_take_the_first_of_the_order(tmp_path: Path, books: Path, server: FaultyServer) -> None:
    every = discover(preparation(tmp_path, books, pattern="*.txt"))
    assert discover(preparation(tmp_path, books, pattern="*.txt", max_files=2)) == every[:2]
    size = sum(source.size or 0 for source in every[:3])
    assert discover(preparation(tmp_path, books, pattern="*.txt", max_bytes=size)) == every[:3]
    assert len(discover(preparation(tmp_path, books, pattern="*.txt", max_bytes=1))) == 1
    urls = [server.put(f"{number}.txt", b"x" * 100) for number in range(5)]
    assert len(discover(preparation(tmp_path, *urls, max_bytes=350))) == 3


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        ("{books}/absent", {}, "inputs: {books}/absent: there is no such file or directory"),
        ("{books}/absent*", {}, "inputs: {books}/absent*: no file matches"),
        ("{books}", {"pattern": "*.rst"}, "no file in {books} matches pattern='*.rst'"),
        ("{books}", {"pattern": "/a/*.txt"}, "pattern='/a/*.txt': expected a glob for file names"),
        ("{books}", {"pattern": "**.txt"}, "pattern='**.txt': expected a glob"),
        (
            "file:///etc/passwd",
            {},
            "inputs.0='file://...: no source can be read by file; valid: https, http, s3, or a path; a local",
        ),
        (
            "htps://host.example/a",
            {},
            "inputs.0='htps://...: no source can be read by htps; valid: https, http, s3, or a path; did you",
        ),
        ("gs://bucket/a", {}, "inputs.0='gs://...: no source can be read by gs; valid: https, http, s3"),
        ("https://host.example/dir/", {}, "inputs: https://host.example/dir/: name each file"),
        ("https://host.example/*.txt", {}, "inputs: https://host.example/*.txt: name each file"),
        ("https:///a", {}, "https:///a: it has no host"),
        ({"path": "{books}", "sha256": "ab" * 32}, {}, "`sha256` is of one file, and this names 6"),
        ({"path": "{books}", "name": "books"}, {}, "`name` is of one file, and this names 6"),
    ],
)
def test_entries_that_name_nothing_are_refused(
    tmp_path: Path, books: Path, entry: Any, options: dict[str, Any], message: str
) -> None:
    if isinstance(entry, dict):
        entry = {key: value.format(books=books) for key, value in entry.items()}
    else:
        entry = entry.format(books=books)
    with pytest.raises(UserError) as raised:
        discover(preparation(tmp_path, entry, **options))
    assert message.format(books=books) in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_directory_that_may_not_be_read_is_not_left_out_in_silence(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refuse_older(path: Any) -> Any:
        if str(path).endswith("older"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    # Root may read everything.
    monkeypatch.setattr(os, "scandir", refuse_older)
    with pytest.raises(UserError, match="books/old/older: Permission denied"):
        discover(preparation(tmp_path, books))


def test_conflicting_entries_are_refused(tmp_path: Path, books: Path) -> None:
    text = {"path": str(books / "a.txt"), "format": "jsonl"}
    with pytest.raises(UserError, match=r"a\.txt: named twice, with another `format`"):
        discover(preparation(tmp_path, books, text))
    named = [{"path": str(books / name), "name": "book"} for name in ("a.txt", "b.txt")]
    with pytest.raises(UserError, match="book: two files have this name"):
        discover(preparation(tmp_path, *named))
    urls = [f"https://host.example/a?token={number}" for number in range(2)]
    with pytest.raises(UserError, match=r"a\?token=\*\*\*: two addresses differ only in a part"):
        discover(preparation(tmp_path, *urls))


def test_sources_of_all_kinds_are_listed_with_sizes_and_digests(
    tmp_path: Path, books: Path, server: FaultyServer
) -> None:
    packed = gzip.compress(LINE.encode())
    url = server.put("lines.jsonl.gz", packed, user="Basic bWU6bWluZQ==")
    address = url.replace("http://", "http://me:mine@")
    options = preparation(
        tmp_path,
        books / "a.txt",
        {"url": address, "text_key": "body", "sha256": hashlib.sha256(packed).hexdigest()},
        {"path": str(books / "b.txt"), "name": "the second"},
    )
    files = collect(options, QUICK)
    assert read_sources(options) == files
    assert [file.number for file in files] == [0, 1, 2]
    by_name = {file.name: file for file in files}
    assert set(by_name) == {str(books / "a.txt"), url, "the second"}
    lines = by_name[url]
    assert (lines.format, lines.compression, lines.text_key, lines.size) == (
        "jsonl",
        "gz",
        "body",
        len(packed),
    )
    assert lines.path.parent == options.downloads_dir
    assert lines.path.read_bytes() == packed
    assert by_name["the second"].sha256 == hashlib.sha256((books / "b.txt").read_bytes()).hexdigest()
    assert (by_name["the second"].format, by_name["the second"].text_key) == ("txt", None)
    recorded = (options.work_dir / "sources.json").read_text()
    assert "mine" not in recorded
    assert collect(options, QUICK) == files
    assert (options.work_dir / "sources.json").read_text() == recorded


def test_objects_below_a_prefix_and_those_of_a_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto")
    keys = [
        "wiki/a.jsonl",
        "wiki/sub/b.jsonl",
        "wiki/sub/c.txt",
        "wiki/sub/deep/d.jsonl",
        "wikitext.txt",
        "wiki/",
    ]
    with s3_server(monkeypatch, tmp_path) as client:
        client.create_bucket(Bucket="data")
        for number, key in enumerate(keys):
            # Files of the same size, none of which is a copy.
            body = LINE.replace("a line", f"line {number}") if key[-1] != "/" else ""
            client.put_object(Bucket="data", Key=key, Body=body.encode())
        for entry, pattern, expected in [
            ("s3://data/wiki/", "*.jsonl", [0, 1, 3]),
            ("s3://data/wiki/", "*", [0, 1, 2, 3]),
            ("s3://data/wiki/*.jsonl", "*", [0]),
            ("s3://data/wiki/**/*.jsonl", "*", [0, 1, 3]),
            ("s3://data/*/sub/?.txt", "*", [2]),
            ("s3://data/wikitext.txt", "*", [4]),
            ("s3://data", "*.txt", [2, 4]),
        ]:
            sources = discover(preparation(tmp_path, entry, pattern=pattern))
            assert sorted(source.name for source in sources) == [f"s3://data/{keys[at]}" for at in expected]
            assert all(source.size in (len(LINE), None) for source in sources)
        for entry in ("s3://data/none/", "s3://data/*.parquet"):
            with pytest.raises(UserError, match="no object matches"):
                discover(preparation(tmp_path, entry))
        options = preparation(tmp_path, "s3://data/wiki/**/[ab].jsonl")
        files = collect(options, QUICK)
        assert sorted(file.path.read_text()[-4] for file in files) == ["0", "1"]
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(OutsideError, match="s3://data/wiki/: Could not connect"):
        discover(preparation(tmp_path, "s3://data/wiki/"))


@pytest.mark.parametrize("where", ["path", "url"])
def test_an_empty_source_is_named(tmp_path: Path, server: FaultyServer, where: str) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    entry = str(empty) if where == "path" else server.put("empty.jsonl", b"")
    with pytest.raises(UserError) as raised:
        collect(preparation(tmp_path, entry), QUICK)
    assert str(raised.value) == f"inputs: {entry}: empty file; on_error=skip leaves it out and counts it"
    assert not (tmp_path / "out/corpus.work/sources.json").exists()
    [file] = collect(preparation(tmp_path, entry, on_error="skip"), QUICK)
    assert file.size == 0


def test_a_local_file_of_another_sha256_is_refused(tmp_path: Path, books: Path) -> None:
    entry = {"path": str(books / "a.txt"), "sha256": "ab" * 32}
    with pytest.raises(UserError, match=f"a.txt: its sha256 is [0-9a-f]{{64}}, expected {'ab' * 32}"):
        collect(preparation(tmp_path, entry), QUICK)


@pytest.mark.timeout(20)
def test_a_file_that_would_be_waited_for_has_no_documents(tmp_path: Path) -> None:
    """/proc/kmsg is a regular file without a size, and reading it waits for the kernel's next message."""
    link = tmp_path / "a.txt"
    link.symlink_to("/proc/kmsg")
    if not os.access(link, os.R_OK):
        pytest.skip("only root may read it")
    assert recognize(link, link.name) == ("txt", None)
    assert open_stream(link, None).read() == open_stream(link, "gz").read() == b""


def test_an_unknown_format_is_refused_by_name(tmp_path: Path, books: Path) -> None:
    (books / "a.dat").write_text("what is it")
    with pytest.raises(UserError, match=r"books/a\.dat: unknown format"):
        collect(preparation(tmp_path, books), QUICK)


def test_changes_since_the_last_run_are_reported(
    tmp_path: Path, books: Path, server: FaultyServer, capsys: Any
) -> None:
    url = server.put("far.txt", b"some text")
    options = preparation(tmp_path, books, url, pattern="*.txt")
    first = {file.name: file for file in collect(options, QUICK)}
    (books / "a.txt").write_text("TEXT OF a.txt\n")
    (books / "b.txt").write_text("longer than it was before\n")
    (books / "old/c.txt").unlink()
    server.put("far.txt", b"same size")
    capsys.readouterr()
    second = {file.name: file for file in collect(options, QUICK)}
    output = capsys.readouterr().out
    assert f"{books}/a.txt: changed since the last run, of the same size: it is tokenized again" in output
    assert f"{books}/b.txt: changed since the last run, 14 bytes became 26: it is tokenized again" in output
    assert f"{books}/old/c.txt: no longer among the sources" in output
    assert f"{url}: changed since the last run, of the same size" in output
    changed = {name for name in second if first[name].sha256 != second[name].sha256}
    assert changed == {f"{books}/a.txt", f"{books}/b.txt", url}


def test_copies_are_reported(tmp_path: Path, books: Path, capsys: Any) -> None:
    (books / "copy.txt").write_bytes((books / "a.txt").read_bytes())
    collect(preparation(tmp_path, books, pattern="*.txt"), QUICK)
    assert "the same bytes as" in capsys.readouterr().out


def test_a_missing_or_damaged_list_names_the_command(tmp_path: Path, books: Path) -> None:
    options = preparation(tmp_path, books)
    with pytest.raises(
        UserError, match=r"sources\.json: No such file or directory; `python -m slipway.corpus fetch`"
    ):
        read_sources(options)
    options.work_dir.mkdir(parents=True)
    (options.work_dir / "sources.json").write_text(json.dumps({"files": [{}]}))
    with pytest.raises(UserError, match=r"sources\.json: it is damaged"):
        read_sources(options)
