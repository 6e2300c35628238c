"""Filters, duplicates and the fast path in whole preparations: tasks and workers do not change the result."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipway.corpus.fast_encoding
from slipway.corpus.__main__ import main
from slipway.corpus.merging import merge
from slipway.corpus.plan import load_plan
from slipway.corpus.shards import ORIGIN
from slipway.corpus.sources import collect
from slipway.corpus.spec import read
from slipway.corpus.tokenizers import obtain
from slipway.corpus.tokenizing import tokenize

WORDS = [
    f"{first}{second}" for first in "bcdfghklmn" for second in ("a", "elo", "iro", "un", "est", "or", "ab")
]
SUFFIXES = (".bin", ".idx", ".origins", ".manifest.json")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 120 documents, of which 10 are empty, 20 are for the filter, and 15 and 15 repeat others."""
    draw = random.Random(3)
    texts = [" ".join(draw.choices(WORDS, k=150)) for _ in range(60)]
    copies = [texts[number] for number in range(15)]
    edits = [texts[number].replace(" ", ", ").upper() + "." for number in range(30, 45)]
    rest = [*copies, *edits, *["", " "] * 5, *[f"unwanted {text}" for text in texts[20:40]]]
    draw.shuffle(rest)
    path = tmp_path_factory.mktemp("source") / "documents.jsonl"
    lines = [
        json.dumps({"text": text, "kind": "kept" if number < 60 else "rest"})
        for number, text in enumerate([*texts, *rest])
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def prepare(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, bytes]]:
    """Return a function that prepares the source with options, and returns the bytes of the outputs."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")

    def run(tasks: int = 1, **options: Any) -> dict[str, bytes]:
        prefix = tmp_path_factory.mktemp("out") / "data"
        node = {
            "inputs": [str(source)],
            "output_prefix": str(prefix),
            "tokenizer_dir": str(tokenizer),
            "vocab_size": 400,
            "shard_bytes": 4096,
            "workers": 1,
        }
        preparation = read(node | options)
        obtain(preparation, collect(preparation))
        for task in range(tasks):
            tokenize(load_plan(preparation), task, tasks)
        merge(load_plan(preparation))
        return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES}

    return run


CLEANED = {
    "filters": [{"regex": {"regex_exp": "unwanted"}}],
    "deduplicate": {"exact": True, "minhash": {"ngram": 3}},
}


def test_cleaned_data_are_the_same_for_any_number_of_tasks_and_workers(
    prepare: Callable[..., dict[str, bytes]], source: Path
) -> None:
    first = prepare(1, **CLEANED)
    assert prepare(7, **CLEANED) == first
    assert prepare(50, **CLEANED) == first
    assert prepare(1, workers=2, **CLEANED) == first
    manifest = json.loads(first[".manifest.json"])
    counts = manifest["counts"]
    assert counts["dropped"] == {"empty": 10, "exact_duplicate": 15, "near_duplicate": 15, "regex": 20}
    assert set(manifest["versions"]) >= {"datatrove", "spacy"}
    lines = source.read_bytes().splitlines(keepends=True)
    offsets = np.cumsum([0, *map(len, lines)])
    kept_offsets = np.frombuffer(first[".origins"], ORIGIN)["offset"].tolist()
    assert kept_offsets == [offset for offset, line in zip(offsets, lines, strict=False) if b'"kept"' in line]
    assert all("unwanted" in sample["text"] for sample in manifest["samples"]["regex"])
    for reason in ("exact_duplicate", "near_duplicate"):
        samples = manifest["samples"][reason]
        assert len(samples) == 3
        assert all(sample["same_as"]["offset"] in kept_offsets for sample in samples)


def test_without_options_nothing_but_empty_documents_is_dropped(
    prepare: Callable[..., dict[str, bytes]],
) -> None:
    counts = json.loads(prepare()[".manifest.json"])["counts"]
    assert (counts["documents"], counts["dropped"]) == (110, {"empty": 10})


@pytest.mark.parametrize("least", [0, 100])
def test_other_ids_of_gigatoken_do_not_change_the_data(
    prepare: Callable[..., dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    least: int,
) -> None:
    """The ids differ at the start, or in the sample of a unit only."""
    expected = prepare()
    assert "fast path" not in capsys.readouterr().out
    original = slipway.corpus.fast_encoding._open

    def open_wrongly(kind: str, paths: Any) -> Any:
        encode = original(kind, paths)
        return lambda text: encode(text)[len(text.split()) >= least :]

    monkeypatch.setattr(slipway.corpus.fast_encoding, "_open", open_wrongly)
    assert prepare() == expected
    output = capsys.readouterr().out
    if least:
        assert "tokenize: unit 1 is encoded again, without the fast path: gigatoken's ids differ" in output
    else:
        assert output.count("tokenize: without the fast path: gigatoken's ids differ") == 1


def test_data_are_the_same_without_gigatoken(
    prepare: Callable[..., dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = prepare()
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert prepare() == expected
    assert "tokenize: without the fast path: gigatoken is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": ["regx"]}, "filters.0='regx': there is no filter regx"),
        ({"deduplicate": {"minhash": {"language": "english"}}}, "deduplicate.minhash.language='english'"),
    ],
)
def test_mistake_ends_the_first_phase(
    options: dict[str, Any], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"inputs": [str(source)], "output_prefix": str(tmp_path / "data"), "tokenizer_dir": str(tmp_path)}
    (tmp_path / "a.yaml").write_text(json.dumps({"data_preparation": node | options}))
    assert main(["fetch", "--config-path", str(tmp_path), "--config-name", "a.yaml"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]
