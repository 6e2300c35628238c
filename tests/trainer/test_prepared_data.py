"""Prepared text, read by megatron-core's own reader and by the trainer's."""

from __future__ import annotations

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.corpus import spec
from slipway.corpus.__main__ import main
from slipway.corpus.plan import load_plan
from slipway.corpus.sources import collect
from slipway.corpus.tokenizing import tokenize
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module")
def read(tokenized: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the answers of a probe that reads the data, and joins small shards of them with Megatron."""
    directory = tmp_path_factory.mktemp("read")
    node = yaml.safe_load((tokenized.prefix.parent / "preparation.yaml").read_text())[spec.ROOT]
    preparation = spec.read(node | {"output_prefix": str(directory / "x"), "shard_bytes": 2048, "workers": 1})
    collect(preparation)
    plan = load_plan(preparation)
    tokenize(plan)
    assert len(plan.units) > 10
    for suffix in (".bin", ".idx", ".manifest.json"):
        shutil.copy(f"{tokenized.prefix}{suffix}", directory)
    shards = [str(plan.shard(unit).path("")) for unit in plan.units]
    result: dict[str, Any] = run_probe(
        pool, "tests.trainer.probe_prepared", [str(directory / tokenized.prefix.name), *shards], directory
    )
    return result


def test_megatron_reads_every_document_and_it_decodes_to_the_text(
    tokenized: Any, read: dict[str, Any]
) -> None:
    from tokenizers import ByteLevelBPETokenizer

    vocab, merges = tokenized.tokenizer / "vocab.json", tokenized.tokenizer / "merges.txt"
    tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges))
    end = json.loads(vocab.read_text())["<|endoftext|>"]
    sources = json.loads(Path(f"{tokenized.prefix}.manifest.json").read_text())["sources"]
    texts = [Path(source["name"]).read_text() for source in sources if source["documents"]]
    assert all(document[-1] == end and end not in document[:-1] for document in read["documents"])
    assert [tokenizer.decode(document[:-1]) for document in read["documents"]] == texts
    assert len(texts) == 40
    assert "uint16" in read["dtype"]
    assert read["boundaries"] == list(range(41))
    assert merges.read_text().startswith("#version")


def test_megatron_joins_our_shards_to_the_same_bytes(tokenized: Any, read: dict[str, Any]) -> None:
    ours = [
        sha256(Path(f"{tokenized.prefix}{suffix}").read_bytes()).hexdigest() for suffix in (".bin", ".idx")
    ]
    assert read["joined"] == ours


def test_manifest_has_the_counts(tokenized: Any, read: dict[str, Any]) -> None:
    manifest = json.loads(Path(f"{tokenized.prefix}.manifest.json").read_text())
    counts = manifest["counts"]
    assert counts["documents"] == 40
    assert counts["tokens"] == sum(map(len, read["documents"]))
    assert counts["dropped"] == {"empty": 1}
    (bad,) = counts["skipped"]
    assert Path(manifest["sources"][bad["file"]]["name"]).name == "latin1.txt"
    last = tokenized.stdout.splitlines()[-1]
    assert "40 documents" in last
    assert "1 bad records skipped" in last
    assert "latin1.txt: not UTF-8" in last


def test_windows_cut_the_split_as_one_stream(read: dict[str, Any]) -> None:
    for split, (first, last) in enumerate([(0, 32), (32, 40)]):
        stream = [token for document in read["documents"][first:last] for token in document]
        expected = [stream[at : at + 33] for at in range(0, len(stream) - 32, 32)]
        assert read["windows"][split] == expected


def test_an_empty_split_is_refused_with_the_numbers(read: dict[str, Any]) -> None:
    assert "test split" in read["refused"]
    assert "0 tokens in 0 documents" in read["refused"]
    assert "seq_length + 1 = 33" in read["refused"]


def test_documents_are_split_as_megatron_does(read: dict[str, Any]) -> None:
    """Compare with megatron-core that is installed: its code divides stand-ins for data sets."""
    assert read["splits"] == [[[0, 40], [40, 40], [40, 40]], [[0, 13], [13, 27], [27, 40]]]
    assert read["compared"] > 2000
    assert read["differing"] == []
    # Megatron-LM's old function, by which earlier versions divided, is another one.
    assert read["by_first_rule"] > 200


def test_running_again_changes_nothing_and_says_so(tokenized: Any, capsys: Any) -> None:
    before = Path(f"{tokenized.prefix}.bin").stat().st_mtime_ns
    assert main(tokenized.command[3:]) == 0
    assert "is there already" in capsys.readouterr().out
    assert Path(f"{tokenized.prefix}.bin").stat().st_mtime_ns == before


def test_an_edited_file_of_the_same_size_is_tokenized_again(tmp_path: Path, capsys: Any) -> None:
    text, prefix = tmp_path / "text.txt", tmp_path / "out/corpus"
    node = {"inputs": [str(text)], "output_prefix": str(prefix), "tokenizer_dir": str(tmp_path / "bpe")}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({spec.ROOT: node | {"vocab_size": 270}}))
    command = ["run", "--config-path", str(tmp_path), "--config-name", "p"]
    text.write_text("the first words " * 20)
    stamp = text.stat()
    assert main(command) == 0
    first = Path(f"{prefix}.bin").read_bytes()
    text.write_text("other words now " * 20)
    os.utime(text, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert text.stat().st_size == stamp.st_size
    capsys.readouterr()
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "is there already" not in output
    assert "changed since the last run, of the same size" in output
    assert Path(f"{prefix}.bin").read_bytes() != first
    os.utime(text)
    assert main(command) == 0
    assert "is there already" in capsys.readouterr().out
