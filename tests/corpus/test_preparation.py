"""Data are the same for any division of the work, and Megatron reads them."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from slipway.corpus import spec
from slipway.corpus.__main__ import main
from slipway.corpus.sources import collect
from slipway.corpus.tokenizers import obtain
from tests.corpus.preparing import (
    configuration,
    prepare,
    results,
    write_configuration,
    write_lines,
    write_sources,
)
from tests.trainer import indexed_files

OPTIONS: dict[str, Any] = {
    "deduplicate": {"exact": True},
    "splits": {"train": 0.8, "validation": 0.15, "test": 0.05},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources") / "sources"
    write_sources(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tokenizer that is trained on the sources."""
    directory = tmp_path_factory.mktemp("tokenizer") / "bpe"
    preparation = spec.read(configuration(directory.parent, sources, directory))
    obtain(preparation, collect(preparation))
    return directory


@pytest.fixture(scope="module")
def plain(
    sources: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """Return the directory and the results of one task, without options."""
    directory = tmp_path_factory.mktemp("plain")
    return directory / "out", prepare(configuration(directory, sources, tokenizer))


@pytest.mark.parametrize("tasks", [7, 50])
def test_results_do_not_depend_on_the_number_of_tasks(
    sources: Path, tokenizer: Path, plain: tuple[Path, dict[str, str]], tmp_path: Path, tasks: int
) -> None:
    node = configuration(tmp_path, sources, tokenizer)
    assert prepare(node, tasks, random.Random(tasks)) == plain[1]
    assert set(plain[1]) == {"x.bin", "x.idx", "x.origins", "x.manifest.json"}
    # Nor do they with splits and without duplicates, nor on the size of a unit.
    node = configuration(tmp_path / "options", sources, tokenizer, **OPTIONS)
    whole = prepare(node | {"output_prefix": str(tmp_path / "one" / "x"), "shard_bytes": 1 << 20})
    assert prepare(node, tasks, random.Random(tasks)) == whole
    assert len(whole) == 10


def test_results_do_not_depend_on_the_number_of_processes(
    sources: Path, tokenizer: Path, plain: tuple[Path, dict[str, str]], tmp_path: Path, capsys: Any
) -> None:
    node = configuration(tmp_path, sources, tokenizer, workers=2)
    assert main(["run", *write_configuration(tmp_path, node)]) == 0
    assert results(tmp_path / "out") == plain[1]
    assert "documents, " in capsys.readouterr().out.splitlines()[-1]


def test_documents_are_those_of_the_sources(sources: Path, tokenizer: Path, plain: tuple[Path, Any]) -> None:
    encoder = ByteLevelBPETokenizer(str(tokenizer / "vocab.json"), str(tokenizer / "merges.txt"))
    data = indexed_files.read(plain[0] / "x")
    manifest = json.loads((plain[0] / "x.manifest.json").read_text())
    origins = np.fromfile(plain[0] / "x.origins", [("file", "<u4"), ("offset", "<u8")])
    assert data.dtype == "uint16"
    assert (
        len(data.documents)
        == len(origins)
        == manifest["counts"]["documents"]
        == 120 * 2 + 2 + 41 + 60 + 20 + 8
    )
    assert manifest["counts"]["dropped"] == {"empty": 3}
    names = [source["name"] for source in manifest["sources"]]
    for (tokens,), (file, offset) in zip(data.documents, origins.tolist(), strict=True):
        assert tokens[-1] == manifest["tokenizer"]["end_of_document"]
        path = Path(names[file])
        if path.suffix == ".jsonl":
            line = path.read_bytes()[offset:].split(b"\n")[0]
            assert encoder.decode(tokens[:-1]) == json.loads(line)["text"]
        elif path.suffix == ".txt":
            assert encoder.decode(tokens[:-1]) == path.read_text()
    counts = Counter(origins["file"].tolist())
    assert [source["documents"] for source in manifest["sources"]] == [
        counts[number] for number in range(len(names))
    ]
    assert sum(manifest["lengths"].values()) == len(data.documents)
    assert manifest["counts"]["tokens"] == sum(len(tokens) for (tokens,) in data.documents)


def test_exact_duplicates_are_dropped_and_splits_are_by_text(
    sources: Path, tokenizer: Path, plain: tuple[Path, Any], tmp_path: Path, capsys: Any
) -> None:
    all_documents = indexed_files.read(plain[0] / "x").documents
    distinct = {tuple(tokens) for (tokens,) in all_documents}
    node = configuration(tmp_path, sources, tokenizer, **OPTIONS)
    prepare(node)
    manifest = json.loads((tmp_path / "out/x.manifest.json").read_text())
    copies = len(all_documents) - len(distinct)
    assert manifest["counts"]["dropped"] == {"empty": 3, "exact_duplicate": copies}
    assert copies >= 2
    assert manifest["samples"]["exact_duplicate"][0]["same_as"]["offset"] >= 0
    parts = {name: indexed_files.read(tmp_path / f"out/x_{name}").documents for name in OPTIONS["splits"]}
    assert sum(map(len, parts.values())) == manifest["counts"]["documents"] == len(distinct)
    assert 240 < len(parts["train"]) < 340
    # A document stays in its split when others come or go.
    moved = tmp_path / "moved"
    write_lines(tmp_path / "only.jsonl", ["a copy"])
    alone = configuration(moved, tmp_path / "only.jsonl", tokenizer, **OPTIONS)
    prepare(alone)
    output = capsys.readouterr().out
    assert output.count("is empty") == 2
    (name,) = [name for name in parts if indexed_files.read(moved / f"out/x_{name}").documents]
    assert indexed_files.read(moved / f"out/x_{name}").documents[0] in parts[name]


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    files=st.lists(st.lists(_TEXT, max_size=20), min_size=1, max_size=3),
    tasks=st.integers(2, 5),
    exact=st.booleans(),
)
def test_any_texts_come_back(
    tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], tasks: int, exact: bool
) -> None:
    directory = tmp_path_factory.mktemp("any")
    (directory / "in").mkdir()
    for number, texts in enumerate(files):
        # The number keeps shards apart that would be copies.
        write_lines(directory / f"in/{number}.jsonl", [f"file {number}", *texts])
    node = configuration(
        directory, directory / "in", tokenizer, deduplicate={"exact": exact}, shard_bytes=1024
    )
    undivided = prepare(node)
    divided = configuration(
        directory / "again", directory / "in", tokenizer, deduplicate={"exact": exact}, shard_bytes=1024
    )
    assert prepare(divided, tasks) == undivided
    names = [
        source["name"] for source in json.loads((directory / "out/x.manifest.json").read_text())["sources"]
    ]
    expected = [
        text
        for name in names
        for text in (f"file {Path(name).stem}", *files[int(Path(name).stem)])
        if text.strip()
    ]
    if exact:
        expected = list(dict.fromkeys(expected))
    encoder = ByteLevelBPETokenizer(str(tokenizer / "vocab.json"), str(tokenizer / "merges.txt"))
    documents = indexed_files.read(directory / "out/x").documents
    assert [tokens[:-1] for (tokens,) in documents] == [encoder.encode(text).ids for text in expected]
