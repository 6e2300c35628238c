"""Answers that no server should give: each is a message, none a traceback, and no terminal obeys it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.common.errors import UserError
from slipway.corpus import remotes
from slipway.corpus.__main__ import main
from slipway.corpus.errors import OutsideError
from slipway.corpus.fetching import Policy
from slipway.corpus.remotes import S3File, list_s3, remote
from tests.corpus.servers import FaultyServer, faulty_server
from tests.corpus.test_fetching import fetch_file

OSC = b"\x1b]52;c;cHduZWQ=\x07\x9b"
DIGITS = b"9" * 5000
POLICY = Policy(attempts=2, first_wait=0.01, longest_wait=0.02, timeout=1.0)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


def answer(status: bytes, *headers: bytes, body: bytes = b"text") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"", body])


LENGTHS = ["²".encode(), "٣".encode(), DIGITS, b"-1", b"+4", b"4_0", b"1e1", b" ", b"0x4"]
LOCATIONS = [b"http://[x", b"http://\xe9.example/", b"gopher://" + OSC, b"//[", b"http://127.0.0.1:99999/"]
LOCATIONS += [
    b"http://127.0.0.1:x/",
    b"http://u:\x1b@[/",
    b"http://" + b"a" * 300,
    b"http://a..b/",
    b"http:///",
]
LOCATIONS += [b"http://127.0.0.1:" + DIGITS, b"https://[::1", b"\x1b", b"http://x\x00/", b""]
REFUSED = [
    *(answer(b"302 Found", b"Location: " + location) for location in LOCATIONS),
    answer(b"302 Found"),
    answer(b"304 Not Modified"),
    answer(b"403 " + OSC),
    answer(b"500 " + OSC),
    answer("²00 OK".encode()),
    answer(b"99999 OK"),
    answer(b"206 Partial", b"Content-Range: bytes 0-3/" + DIGITS),
    answer(b"206 Partial", b"Content-Range: bytes " + DIGITS + b"-3/4"),
    answer(b"206 Partial", "Content-Range: bytes ²-3/4".encode()),
    answer(b"206 Partial", b"Content-Range: " + OSC),
    answer(b"206 Partial", b"Content-Range: bytes 7-9/*"),
    answer(b"200 OK", b"Transfer-Encoding: chunked", body=b"zz\r\n"),
    answer(b"200 OK", b"Transfer-Encoding: chunked", body=b"f" * 5000 + b"\r\n"),
    answer(b"200 OK", *[b"X: y"] * 200),
    answer(b"200 OK", b"X: " + b"y" * 100_000),
    answer(b"429 Slow", b"Retry-After: " + DIGITS, b"Retry-After: x")[:-4].replace(DIGITS, "²".encode()),
    answer(b"503 Busy", b"Retry-After: Mon, 99 Foo 99999999 99:99:99 GMT"),
    OSC,
    b"",
]


@pytest.mark.parametrize("raw", REFUSED, ids=range(len(REFUSED)))
def test_answers_that_are_none_are_named(server: FaultyServer, tmp_path: Path, raw: bytes) -> None:
    url = server.put("a.txt", b"", raw=raw)
    with pytest.raises((OutsideError, UserError)) as raised:
        fetch_file(tmp_path, url, policy=POLICY)
    assert str(raised.value).startswith(f"{url}: ")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_that_are_none_are_not_believed(server: FaultyServer, tmp_path: Path, length: bytes) -> None:
    url = server.put("a.txt", b"", raw=answer(b"200 OK", b"Content-Length: " + length))
    assert fetch_file(tmp_path, url, policy=POLICY).path.read_bytes() in (b"text", b"")


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n", b""], ids=["headers", "continue"])
def test_headers_that_never_end_are_given_up(server: FaultyServer, tmp_path: Path, start: bytes) -> None:
    endless = b"X: y\r\n" if start else b"HTTP/1.1 100 Continue\r\n\r\n"
    url = server.put("a.txt", b"", raw=start + endless * 100_000, chunk=1, pause=0.05)
    with pytest.raises(OutsideError, match="no answer in time; gave up after 2 attempts"):
        fetch_file(tmp_path, url, policy=POLICY)


def test_a_body_of_which_hardly_a_byte_comes_is_given_up(server: FaultyServer, tmp_path: Path) -> None:
    url = server.put("a.txt", bytes(100_000), chunk=1, pause=0.05)
    with pytest.raises(OutsideError, match="download_timeout; gave up after 2 attempts"):
        fetch_file(tmp_path, url, policy=POLICY)


@pytest.mark.parametrize(
    "address", ["http://[x/", "http://u:hidden@[x/", "https://h:hidden/", "http://h:9e9/"]
)
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"https?://\.\.\.: not a valid address") as raised:
        remote(address)
    assert "hidden" not in str(raised.value)


def test_no_output_has_control_characters_of_servers_or_names(
    server: FaultyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = OSC[:-1].decode()
    first = answer(b"200 OK", b'ETag: "' + OSC + b'1"', b"Content-Length: 4")
    url = server.put("a.txt", b"", raw=first)
    for raw in (first, first.replace(b'1"', b'2"'), answer(b"403 " + OSC)):
        server.files["/a.txt"].raw = raw
        (tmp_path / f"{name}.txt").write_text("text")
        node = {
            "inputs": [url, {"path": str(tmp_path / f"{name}.txt")}],
            "output_prefix": str(tmp_path / "x"),
        }
        node |= {"tokenizer_dir": str(tmp_path / "bpe"), "vocab_size": 257}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data_preparation": node}))
        main(["fetch", "--config-path", str(tmp_path), "--config-name", "c"])
        captured = capsys.readouterr()
        for line in (captured.out + captured.err).splitlines():
            assert line.isprintable()
    assert "\\x1b]52" in captured.out + captured.err


class Answers:
    """A client of S3 with one answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def get_object(self, **_: str) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def get_paginator(self, _: str) -> Any:
        return self

    def paginate(self, **_: str) -> Any:
        yield self.get_object()


def refusal(status: int, code: str, message: str = "") -> Exception:
    from botocore.exceptions import ClientError

    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "GetObject")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"ContentLength": 4, "ETag": "x"},
        {"ContentLength": "x", "Body": None},
        {"ContentLength": 4, "Body": None, "ContentRange": "bytes 0-3/*"},
        {"Contents": [{}]},
        {"Contents": [{"Key": "a", "Size": "9" * 5000}]},
        {"Contents": 5},
        refusal(304, "304"),
        refusal(403, OSC.decode("latin-1"), OSC.decode("latin-1")),
        OverflowError("a date"),
    ],
    ids=repr,
)
def test_answers_of_s3_that_are_none_are_named(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(remotes, "s3_client", lambda *_, **__: Answers(answer))

    def use() -> None:
        if isinstance(answer, dict) and "Contents" in answer:
            list(list_s3("b", ""))
        else:
            S3File("b", "k").open(0, None, 1.0)

    with pytest.raises(UserError, match="s3://b/") as raised:
        use()
    assert str(raised.value).isprintable()
