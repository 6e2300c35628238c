"""Text files to .bin/.idx and back, with the command line and with megatron-core's own reader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.probing import probed
from tests.warm import WarmPool
from trainer.data.corpus import collect
from trainer.data.encode import encode
from trainer.data.tokenize import main

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module")
def read(tokenized: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arguments = [str(tokenized.prefix)]
    result: dict[str, Any] = probed(
        pool, "tests.trainer.probe_tokens", arguments, tmp_path_factory.mktemp("said")
    )
    return result


def test_megatron_reads_every_document_and_it_decodes_to_the_text(
    tokenized: Any, corpus: Path, read: dict[str, Any]
) -> None:
    from tokenizers import ByteLevelBPETokenizer

    vocab, merges = tokenized.tokenizer / "vocab.json", tokenized.tokenizer / "merges.txt"
    tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges))
    end = json.loads(vocab.read_text())["<|endoftext|>"]
    files = collect([corpus], "*.txt", 1234, None, None)
    texts = [file.path.read_text() for file in files if file.path.stem not in ("latin1", "empty")]
    assert all(document[-1] == end and end not in document[:-1] for document in read["documents"])
    assert [tokenizer.decode(document[:-1]) for document in read["documents"]] == texts
    assert len(texts) == 40
    assert "uint16" in read["dtype"]
    assert read["boundaries"] == list(range(41))
    assert merges.read_text().startswith("#version")


def test_the_summary_counts(tokenized: Any, read: dict[str, Any]) -> None:
    summary = json.loads(Path(f"{tokenized.prefix}.json").read_text())
    assert summary["documents"] == 40
    assert summary["tokens"] == sum(map(len, read["documents"]))
    assert summary["skipped"] == 2
    assert 0 < summary["unigram_entropy"] < 6
    assert "40 documents" in tokenized.stdout.splitlines()[-1]
    names = {path.name for path in tokenized.prefix.parent.iterdir()}
    assert names == {"text_document.bin", "text_document.idx", "text_document.json", "bpe"}


def test_windows_are_the_split_as_one_stream(read: dict[str, Any]) -> None:
    for split, (first, last) in enumerate([(0, 32), (32, 40)]):
        stream = [token for document in read["documents"][first:last] for token in document]
        expected = [stream[at : at + 33] for at in range(0, len(stream) - 32, 32)]
        assert read["windows"][split] == expected


def test_an_empty_split_is_refused_with_the_numbers(read: dict[str, Any]) -> None:
    assert "test split" in read["refused"]
    assert "0 tokens in 0 documents" in read["refused"]
    assert "seq_length + 1 = 33" in read["refused"]


def test_documents_are_split_as_megatron_does(read: dict[str, Any]) -> None:
    assert read["splits"] == [[[0, 40], [40, 40], [40, 40]], [[0, 14], [14, 27], [27, 40]]]


def test_running_again_changes_nothing_and_says_so(tokenized: Any, capsys: Any) -> None:
    before = Path(f"{tokenized.prefix}.bin").stat().st_mtime_ns
    assert main(tokenized.command[3:]) == 0
    assert "already there" in capsys.readouterr().out
    assert Path(f"{tokenized.prefix}.bin").stat().st_mtime_ns == before


def test_the_tokens_do_not_depend_on_the_number_of_workers(
    tokenized: Any, corpus: Path, monkeypatch: pytest.MonkeyPatch, read: dict[str, Any]
) -> None:
    monkeypatch.setattr("trainer.data.encode._CHUNK_BYTES", 1000)
    files = collect([corpus], "*.txt", 1234, None, None)
    chunks = list(encode(files, tokenized.tokenizer, 1, print))
    assert len(chunks) > 5
    stream = [int(token) for chunk in chunks for token in chunk.tokens]
    assert stream == [token for document in read["documents"] for token in document]


def test_an_edited_file_of_the_same_size_is_tokenized_again(tmp_path: Path, capsys: Any) -> None:
    text, prefix = tmp_path / "text.txt", tmp_path / "out/corpus"
    options = ["--input", str(text), "--output-prefix", str(prefix), "--tokenizer-dir", str(tmp_path / "bpe")]
    text.write_text("the first words " * 20)
    stamp = text.stat()
    assert main([*options, "--vocab-size", "270"]) == 0
    first = Path(f"{prefix}.bin").read_bytes()
    text.write_text("other words now " * 20)
    os.utime(text, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert text.stat().st_size == stamp.st_size
    assert main([*options, "--vocab-size", "270"]) == 0
    assert "already there" not in capsys.readouterr().out
    assert Path(f"{prefix}.bin").read_bytes() != first
    os.utime(text)
    assert main([*options, "--vocab-size", "270"]) == 0
    assert "already there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--input", "{corpus}", "--pattern", "*.rst"], "no file matches --pattern '*.rst'"),
        (["--input", "{corpus}", "--pattern", "/books/*.txt"], "--pattern '/books/*.txt': expected a glob"),
        (["--input", "{corpus}", "--pattern", "**.txt"], "--pattern '**.txt': expected a glob"),
        (["--input", "{corpus}/absent"], "there is no such file or directory"),
        (["--input", "{corpus}", "--vocab-size", "10"], "--vocab-size 10: expected at least 257"),
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(
    corpus: Path, tmp_path: Path, capsys: Any, options: list[str], told: str
) -> None:
    arguments = [option.format(corpus=corpus) for option in options]
    arguments += ["--output-prefix", str(tmp_path / "x"), "--tokenizer-dir", str(tmp_path / "bpe")]
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_collecting_is_seeded_and_limited(corpus: Path) -> None:
    names = [file.path.name for file in collect([corpus], "*.txt", 1, None, None)]
    assert names == [file.path.name for file in collect([corpus], "*.txt", 1, None, None)]
    assert names != sorted(names)
    assert sorted(names) == sorted(file.path.name for file in collect([corpus], "*.txt", 2, None, None))
    assert len(collect([corpus], "*.txt", 1, 3, None)) == 3
    limited = collect([corpus], "*.txt", 1, None, 2000)
    assert 0 < sum(file.size for file in limited) <= 2000
