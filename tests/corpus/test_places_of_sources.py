"""Tokens are the same from files on the disk, on a web server and on S3."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from slipway.corpus.__main__ import main
from slipway.corpus.fetching import Policy
from tests.corpus.preparing import configuration, results, write_configuration, write_sources
from tests.corpus.servers import faulty_server, s3_server

pytestmark = pytest.mark.trainer


def prepare_sources(tmp_path: Path, place: str, inputs: list[str]) -> dict[str, str]:
    """Prepare data; return the digests of tokens, index and origins. The manifest names the sources."""
    directory = tmp_path / place
    node = configuration(directory, tmp_path, tmp_path / "bpe", on_error="skip", max_errors=20)
    node["inputs"] = inputs
    assert main(["run", *write_configuration(directory, node)]) == 0
    manifest = json.loads((directory / "out/x.manifest.json").read_text())
    assert sorted(source["name"] for source in manifest["sources"]) == inputs
    digests = results(directory / "out")
    return {name: digests[name] for name in ("x.bin", "x.idx", "x.origins")}


def test_tokens_do_not_depend_on_where_the_sources_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path / "dumps")
    files = sorted((tmp_path / "dumps").iterdir())
    assert {path.suffix for path in files} == {".jsonl", ".zst", ".parquet", ".bz2", ".txt"}
    expected = prepare_sources(tmp_path, "disk", [str(path) for path in files])
    with faulty_server() as server:
        # The first attempt at each file ends early.
        urls = [server.put(f"dumps/{path.name}", path.read_bytes(), drop_after=[200]) for path in files]
        monkeypatch.setattr("slipway.corpus.fetching.Policy", functools.partial(Policy, first_wait=0.01))
        assert prepare_sources(tmp_path, "http", urls) == expected
    pytest.importorskip("moto")
    with s3_server(monkeypatch, tmp_path) as client:
        client.create_bucket(Bucket="data")
        for path in files:
            client.put_object(Bucket="data", Key=f"dumps/{path.name}", Body=path.read_bytes())
        assert prepare_sources(tmp_path, "s3", [f"s3://data/dumps/{path.name}" for path in files]) == expected
