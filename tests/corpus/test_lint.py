"""Checks of data sets and source files, and one document as text."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipway.arithmetic.indexed import ORIGIN
from slipway.common.errors import UserError
from slipway.corpus import lint as linting
from slipway.corpus.datasets import read_document
from slipway.corpus.lint import Report
from slipway.corpus.tokenizers import open_decoder
from tests.forked_slipway import SLIPWAY
from tests.integration.conftest import run_command
from tests.trainer import indexed_files

pytestmark = pytest.mark.trainer

DOCUMENTS = [[1, 2, 3], [4, 5], [6]]


def lint(*paths: Path, vocabulary: int | None = 100) -> list[Report]:
    return list(linting.lint(paths, lambda path, done, total: None, vocabulary=vocabulary))


def problems(report: Report) -> dict[str, tuple[int, list[int]]]:
    return {reason: (problem.count, problem.first) for reason, problem in report.problems.items()}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Return a data set with its origins and manifest."""
    prefix = tmp_path / "corpus_text_document"
    indexed_files.write(prefix, [[document] for document in DOCUMENTS], "uint16")
    Path(f"{prefix}.origins").write_bytes(b"".join(ORIGIN.pack(n % 2, 10 * n) for n in range(3)))
    outputs: list[dict[str, Any]] = []
    for suffix in (".bin", ".idx", ".origins"):
        path = Path(f"{prefix}{suffix}")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        counts = {"documents": 3, "tokens": 6}
        outputs.append({"path": path.name, "size": path.stat().st_size, "sha256": digest, **counts})
    manifest = {
        "version": 1,
        "sources": [{"name": "a.jsonl"}, {"name": "b.jsonl"}],
        "tokenizer": {"vocabulary_size": 7},
        "outputs": outputs,
    }
    Path(f"{prefix}.manifest.json").write_text(json.dumps(manifest))
    return prefix


def test_a_whole_data_set_has_no_problem(prefix: Path) -> None:
    for name in (prefix, Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), prefix.parent):
        (report,) = lint(name)
        assert (report.path, report.documents, report.tokens) == (str(prefix), 3, 6)
        assert problems(report) == {}
        assert report.notes == []


def _edit(path: str, at: int, content: bytes) -> None:
    whole = bytearray(Path(path).read_bytes())
    whole[at : at + len(content)] = content
    Path(path).write_bytes(whole)


# Offsets in the .idx: lengths at 34, pointers at 46, boundaries at 70.
@pytest.mark.parametrize(
    ("suffix", "at", "content", "reason"),
    [
        (".idx", 0, b"X", "its .idx is not Megatron's: it does not begin with MMIDIDX"),
        (".idx", 17, b"\x07", "tokens are whole numbers, but these are float32"),
        (".idx", 54, b"\x08", "sequence 1 does not begin where the one before ends"),
        (".idx", 34, struct.pack("<i", -3), "sequence 0 does not begin where the one before ends"),
        (".idx", 70, b"\x01", "its first document does not begin at the first sequence"),
        (".idx", 94, b"\x02", "its documents end at sequence 2 of 3"),
        (".idx", 78, b"\x03", "a document that ends before it begins"),
        (".bin", 12, b"\x00\x00", "its .idx tells of 12 bytes of tokens, its .bin has 14"),
        (".bin", 8, b"\x63", "a token of no vocabulary of 7"),
        (".bin", 0, b"\x02", "corpus_text_document.bin: its sha256 is "),
        (".idx", 78, b"\x02", "corpus_text_document.idx: its sha256 is "),
        (".origins", 0, b"\x02", "a source that is not in the manifest"),
        (".origins", 36, b"\x00", "corpus_text_document.origins: 37 bytes, and 3 documents have 36"),
        (".manifest.json", 0, b"[", "corpus_text_document.manifest.json: not a manifest"),
    ],
)
def test_each_damage_of_a_data_set_is_found(
    prefix: Path, suffix: str, at: int, content: bytes, reason: str
) -> None:
    _edit(f"{prefix}{suffix}", at, content)
    (report,) = lint(prefix, vocabulary=None)
    assert any(text.startswith(reason) for text in report.problems), report.problems


def test_a_foreign_token_names_its_document(prefix: Path) -> None:
    _edit(f"{prefix}.bin", 8, b"\x63")
    (report,) = lint(prefix, vocabulary=None)
    assert problems(report)["a token of no vocabulary of 7"] == (1, [1])
    (report,) = lint(prefix, vocabulary=3)
    assert problems(report)["a token of no vocabulary of 3"] == (4, [0, 1, 1, 2])


def test_missing_halves_and_files_are_found(prefix: Path, tmp_path: Path) -> None:
    Path(f"{prefix}.origins").unlink()
    (report,) = lint(prefix)
    assert "there is no corpus_text_document.origins" in report.problems
    Path(f"{prefix}.manifest.json").unlink()
    (report,) = lint(prefix, vocabulary=None)
    assert problems(report) == {} and len(report.notes) == 2
    Path(f"{prefix}.bin").unlink()
    (report,) = lint(prefix)
    assert list(report.problems) == ["there is no corpus_text_document.bin"]
    with pytest.raises(UserError, match=r"did you mean '.*corpus_text_document.idx'"):
        lint(tmp_path / "corpus_text_dokument.idx")


def test_records_that_are_no_documents_are_counted_with_their_places(tmp_path: Path) -> None:
    lines = [
        b'{"text": "one", "id": 1}',
        b"{broken",
        b'{"text": 5}',
        b'{"other": ""}',
        b'{"text": "gr\xf6\xdfe"}',
        b'{"text": " "}',
        b'{"text": "two", "id": "1"}',
        b'{"text": "three", "id": 3}',
    ]
    starts = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    expected = {
        "not JSON": (1, [starts[1]]),
        "'text' is no text": (1, [starts[2]]),
        "no key 'text' among other": (1, [starts[3]]),
        "not UTF-8": (1, [starts[4]]),
        "empty text": (1, [starts[5]]),
        "an id that an earlier record has": (1, [starts[6]]),
    }
    content = b"\n".join(lines)
    (tmp_path / "raw.jsonl").write_bytes(content)
    (tmp_path / "raw.jsonl.gz").write_bytes(gzip.compress(content))
    for name, kind in {"raw.jsonl": "jsonl", "raw.jsonl.gz": "jsonl.gz"}.items():
        (report,) = lint(tmp_path / name)
        assert problems(report) == expected
        assert (report.kind, report.documents, report.place) == (kind, 4, "byte")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(content * 9)[:-12])
    (report,) = lint(tmp_path / "cut.jsonl.gz")
    assert "damaged gz data: the rest of the file is not read" in report.problems


def test_a_directory_is_searched_for_data_sets_and_sources_alone(prefix: Path, tmp_path: Path) -> None:
    for name in (
        "bpe/vocab.json",
        "bpe/merges.txt",
        f"{prefix.name}.work/a.jsonl",
        ".cache/a.txt",
        "loss.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{oops")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/one.txt").write_text("one")
    Path(f"{prefix}.json").write_text("{}")
    assert [report.path for report in lint(tmp_path)] == [str(prefix), str(tmp_path / "raw/one.txt")]
    with pytest.raises(UserError, match="neither a data set nor a source of text is in this directory"):
        lint(tmp_path / ".cache", tmp_path / "bpe")


def test_tar_shards_and_copies_are_checked(tmp_path: Path) -> None:
    for name, members in {"a.tar": {"1.txt": b"one", "2.txt": b"\xff"}, "b.tar": {"1.cls": b"0"}}.items():
        with tarfile.open(tmp_path / name, "w") as archive:
            for member, text in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
    (tmp_path / "copy.tar").write_bytes((tmp_path / "a.tar").read_bytes())
    # Within a header, and where one would begin.
    for name, size in {"cut.tar": 1100, "ended.tar": 1024}.items():
        (tmp_path / name).write_bytes((tmp_path / "a.tar").read_bytes()[:size])
    first, without, copy, *short = lint(tmp_path)
    assert problems(first) == {"not UTF-8": (1, [1])}
    assert "no member *.txt or *.json" in without.problems
    assert f"the same content as {tmp_path / 'a.tar'}" in copy.problems
    assert len(short) == 2
    for cut in short:
        assert "damaged tar data: the rest of the file is not read" in cut.problems


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a byte-level BPE without merges: a token for each byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    directory = tmp_path_factory.mktemp("bpe")
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<|endoftext|>", *letters])}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


def _encoded(directory: Path, text: str) -> list[int]:
    from tokenizers import ByteLevelBPETokenizer

    model = ByteLevelBPETokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"))
    ids: Sequence[int] = model.encode(text).ids
    return [*ids, 0]


def test_a_document_is_decoded_with_its_origin(tmp_path: Path, tokenizer: Path) -> None:
    texts, prefix = ["one\ntwo", "größe 日本", ""], tokenizer.parent / "data"
    indexed_files.write(prefix, [[_encoded(tokenizer, text)] for text in texts], "uint16")
    answer = read_document(prefix, 1, tokenizer)
    assert (answer["text"], answer["documents"], answer["source"]) == ("größe 日本<|endoftext|>", 3, None)
    assert read_document(prefix, -3, tokenizer)["text"] == "one\ntwo<|endoftext|>"
    assert read_document(prefix, 0, None)["text"] is None
    names = ["vocab.json", "merges.txt"]
    digest = hashlib.sha256(b"".join((tokenizer / name).read_bytes() for name in names)).hexdigest()
    manifest = {"sources": [{"name": "s3://raw/a.jsonl"}], "tokenizer": {"files": names, "sha256": digest}}
    Path(f"{prefix}.manifest.json").write_text(json.dumps(manifest))
    Path(f"{prefix}.origins").write_bytes(b"".join(ORIGIN.pack(0, 7 * number) for number in range(3)))
    answer = read_document(prefix, 1, None)
    assert (answer["source"], answer["offset"], answer["text"][:5]) == ("s3://raw/a.jsonl", 7, "größe")
    with pytest.raises(UserError, match="--document 3: expected 0 to 2"):
        read_document(prefix, 3, None)
    with pytest.raises(UserError, match=r"expected vocab.json and merges.txt, a tokenizer.json, or a"):
        read_document(prefix, 0, tmp_path)


def test_each_kind_of_tokenizer_decodes(tmp_path: Path, tokenizer: Path) -> None:
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer

    words = ["the cat sat on the mat", "a dog ran to the cat", "cats and dogs"] * 5
    model = ByteLevelBPETokenizer(str(tokenizer / "vocab.json"), str(tokenizer / "merges.txt"))
    model.save(str(tmp_path / "tokenizer.json"))
    decoder = open_decoder([tmp_path])
    assert (decoder.size, decoder.decode(_encoded(tokenizer, "größe"))) == (257, "größe<|endoftext|>")
    (tmp_path / "tokenizer.json").unlink()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_prefix=str(tmp_path / "pieces"), vocab_size=22, minloglevel=9
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
    decoder = open_decoder([tmp_path])
    assert (decoder.size, decoder.decode(pieces.encode("the dog sat"))) == (22, "the dog sat")


def test_the_commands_print_tables_and_json_with_their_exit_codes(
    tmp_path: Path, prefix: Path, tokenizer: Path
) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"text": "one"}\n{"text": ""}\n{oops\n')
    done = run_command(SLIPWAY, "data", "lint", prefix.name, "raw.jsonl", cwd=tmp_path, check=1)
    assert done.stdout.splitlines() == [
        "FILE                  FORMAT    DOCUMENTS  TOKENS  RESULT",
        "corpus_text_document  data set  3          6       ok",
        "raw.jsonl             jsonl     2          -       empty text: byte 16",
        "raw.jsonl             jsonl     2          -       not JSON: byte 29",
        "",
        "2 checked, 1 with problems",
    ]
    done = run_command(SLIPWAY, "data", "lint", prefix.name, "--json", cwd=tmp_path)
    assert [(report["path"], report["problems"]) for report in json.loads(done.stdout)] == [(prefix.name, {})]
    done = run_command(SLIPWAY, "data", "show", prefix.name, "--document", "1", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "data set  corpus_text_document",
        "document  1 of 3",
        "tokens    2",
        "source    b.jsonl, at 10",
        "",
        "4 5",
    ]
    for command, message in {
        (
            "lint",
            "raw.json",
        ): "slipway: raw.json: no such file, directory or data set; did you mean 'raw.jsonl'?",
        ("lint", "raw.jsonl", "--format", "json"): "--format json: valid are auto, txt, jsonl",
        ("show", "corpus_text_document", "--document", "3"): "--document 3: expected 0 to 2",
        ("show", "corpus"): "corpus: no data set",
    }.items():
        refusal = run_command(SLIPWAY, "data", *command, cwd=tmp_path, check=2)
        assert message in refusal.stderr and "Traceback" not in refusal.stderr
