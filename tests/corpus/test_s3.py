"""Downloads from a real S3 endpoint on loopback (moto's)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.corpus.errors import OutsideError
from slipway.corpus.fetching import Download, Fetched, Policy, fetch_all
from slipway.corpus.progress import Progress
from slipway.corpus.remotes import TransientError, list_s3, remote, s3_client
from tests.corpus.servers import faulty_server, s3_server

pytest.importorskip("moto")

CONTENT = random.Random(3).randbytes(900_000)
QUICK = Policy(attempts=3, first_wait=0.01, longest_wait=0.02, timeout=10.0, sync_bytes=1 << 18)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch, tmp_path_factory.mktemp("home")) as client:
        client.create_bucket(Bucket="data")
        for key in (
            "wiki/a.jsonl",
            "wiki/sub/b.jsonl",
            "wiki/sub/c.txt",
            "wiki/sub/deep/d.jsonl",
            "wikitext",
        ):
            client.put_object(Bucket="data", Key=key, Body=key.encode())
        yield client


def fetch_file(directory: Path, address: str, policy: Policy = QUICK) -> Fetched:
    [result] = fetch_all([Download(remote(address))], directory, Progress("fetching", 0, 1, "files"), policy)
    return result


def test_an_object_arrives_and_is_used_again(endpoint: Any, tmp_path: Path) -> None:
    endpoint.put_object(Bucket="data", Key="dir/a b?.txt", Body=CONTENT)
    first = fetch_file(tmp_path, "s3://data/dir/a b?.txt")
    assert first.path.read_bytes() == CONTENT
    assert first.path.name.endswith("-a_b_.txt")
    stamp = first.path.stat().st_mtime_ns
    assert fetch_file(tmp_path, "s3://data/dir/a b?.txt") == first
    assert first.path.stat().st_mtime_ns == stamp


def test_changed_object_is_fetched_anew_and_reported(endpoint: Any, tmp_path: Path, capsys: Any) -> None:
    endpoint.put_object(Bucket="data", Key="b", Body=CONTENT)
    fetch_file(tmp_path, "s3://data/b")
    endpoint.put_object(Bucket="data", Key="b", Body=CONTENT[::-1])
    assert fetch_file(tmp_path, "s3://data/b").path.read_bytes() == CONTENT[::-1]
    assert "s3://data/b: changed on the server since it was fetched (ETag" in capsys.readouterr().out


def test_a_part_is_resumed_and_never_mixed_with_another_version(
    endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test drops the connection itself, since moto never does."""
    endpoint.put_object(Bucket="data", Key="c", Body=CONTENT)
    from slipway.corpus.remotes import S3File

    read, budget = S3File._read, [400_000]

    def read_and_drop(self: S3File, stream: Any, size: int) -> bytes:
        data = read(self, stream, min(size, budget[0]))
        budget[0] -= len(data)
        if not data and budget[0] == 0:
            raise TransientError("the connection was dropped")
        return data

    ranges: list[str | None] = []
    monkeypatch.setattr(S3File, "_read", read_and_drop)
    with pytest.raises(OutsideError, match="400,000 bytes are kept"):
        fetch_file(tmp_path, "s3://data/c")
    monkeypatch.setattr(S3File, "_read", read)
    s3_client(QUICK.timeout).meta.events.register(
        "before-send.s3.GetObject", lambda request, **_: ranges.append(request.headers.get("Range"))
    )
    assert fetch_file(tmp_path, "s3://data/c").path.read_bytes() == CONTENT
    assert [value and bytes(value) for value in ranges] == [b"bytes=400000-"]
    budget[0] = 300_000
    endpoint.put_object(Bucket="data", Key="d", Body=CONTENT)
    monkeypatch.setattr(S3File, "_read", read_and_drop)
    with pytest.raises(OutsideError, match="300,000 bytes are kept"):
        fetch_file(tmp_path, "s3://data/d")
    monkeypatch.setattr(S3File, "_read", read)
    endpoint.put_object(Bucket="data", Key="d", Body=CONTENT[::-1])
    assert fetch_file(tmp_path, "s3://data/d").path.read_bytes() == CONTENT[::-1]


def test_keys_are_listed_in_order_with_sizes(endpoint: Any) -> None:
    keys = ["wiki/a.jsonl", "wiki/sub/b.jsonl", "wiki/sub/c.txt", "wiki/sub/deep/d.jsonl", "wikitext"]
    assert list(list_s3("data", "wiki")) == [(key, len(key)) for key in keys]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "s3://data/lost",
            "s3://data/lost: there is no such key; s3://BUCKET/PREFIX/ takes all objects below",
        ),
        (
            "s3://absent/a",
            "s3://absent/a: there is no such bucket; for a server of your own set AWS_ENDPOINT",
        ),
    ],
)
def test_missing_objects_are_named(endpoint: Any, tmp_path: Path, address: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        fetch_file(tmp_path, address)
    assert str(raised.value).startswith(message)


def test_missing_credentials_name_the_places_where_they_are_looked_for(
    endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match=r"no credentials for S3: set AWS_ACCESS_KEY_ID and .* in ~/.aws"):
        fetch_file(tmp_path, "s3://data/wikitext", Policy(timeout=11.0))
    with pytest.raises(UserError, match="s3://data/wiki: no credentials"):
        list(list_s3("data", "wiki", timeout=11.0))


def test_credentials_come_from_the_users_files(
    endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[mine]\naws_access_key_id=a\naws_secret_access_key=b\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert fetch_file(tmp_path, "s3://data/wikitext", Policy(timeout=12.0)).path.read_text() == "wikitext"


@pytest.mark.parametrize(
    ("status", "code", "kind", "message"),
    [
        (403, "AccessDenied", UserError, "the credentials do not open it; set AWS_ACCESS_KEY_ID"),
        (403, "InvalidAccessKeyId", UserError, "the credentials do not open it"),
        (400, "ExpiredToken", UserError, "the credentials do not open it"),
        (503, "SlowDown", OutsideError, "SlowDown .*; gave up after 3 attempts"),
        (500, "InternalError", OutsideError, "InternalError .*; gave up after 3 attempts"),
    ],
)
def test_refusals_of_the_endpoint_are_told_apart(
    endpoint: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    kind: type[Exception],
    message: str,
) -> None:
    """Moto refuses nobody, so a server of ours answers as S3 does."""
    with faulty_server() as server:
        server.put("data/a", b"", statuses=[(status, None)] * 9, error=f"<Error><Code>{code}</Code></Error>")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.address)
        s3_client.cache_clear()
        with pytest.raises(kind, match=f"s3://data/a: .*{message}"):
            fetch_file(tmp_path, "s3://data/a")
    s3_client.cache_clear()


def test_an_endpoint_that_is_not_there_is_named(
    endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.address)
    s3_client.cache_clear()
    with pytest.raises(OutsideError, match=r"Could not connect to the endpoint.*gave up after 3 attempts"):
        fetch_file(tmp_path, "s3://data/a")
    s3_client.cache_clear()
