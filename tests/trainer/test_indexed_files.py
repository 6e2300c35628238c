"""Megatron's .bin/.idx in both directions: our files, megatron-core's files, and damaged ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.data.index import SampleIndex, Split, check_files
from slipway.trainer.data.source import IndexedSource
from tests.trainer import indexed_files
from tests.trainer.indexed_files import Document
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

HAND: dict[str, tuple[str, list[Document]]] = {
    "hand_uint16": ("uint16", [[[11, 12]], [[13], [14, 65535]]]),
    "hand_int32": ("int32", [[[100000, 1]], [[2, 3, 4]]]),
    "hand_int64": ("int64", [[[2**40, 1]], [[2]]]),
    "hand_uint8": ("uint8", [[[1, 255]], [[2, 3]]]),
    "hand_empty_documents": ("uint16", [[], [[1, 2]], [[]], [[3], [], [4]], []]),
}
BUILT: dict[str, tuple[str, list[Document]]] = {
    "builder_uint16": ("uint16", [[[1, 2, 3]], [[4], [5, 65499]], [[6]]]),
    "builder_int32": ("int32", [[[70000, 2]], [[3, 4], [], [5]]]),
    "merged": ("uint16", [[[1, 2, 3]], [[4], [5, 65499]], [[6]], [[11, 12]], [[13], [14, 65535]]]),
    "ours_small": ("uint16", [[[1, 2, 0]], [[7, 0]], [[9]]]),
    "ours_large": ("int32", [[[1, 2, 0]], [[7, 0]], [[9]]]),
}
ALL = {**HAND, **BUILT}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexed")


@pytest.fixture(scope="module")
def read(directory: Path, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the documents that megatron-core and we read from the files of the three writers."""
    for name, (dtype, documents) in HAND.items():
        indexed_files.write(directory / name, documents, dtype)
    _write_bad(directory)
    output_dir = tmp_path_factory.mktemp("said")
    result: dict[str, Any] = run_probe(pool, "tests.trainer.probe_indexed", [str(directory)], output_dir)
    # An object of megatron-core that is thrown away half made prints no error either.
    errors = (output_dir / "probe_indexed0.err").read_text()
    assert "Traceback" not in errors, errors
    return result


def _write_bad(directory: Path) -> None:
    def idx(name: str) -> Path:
        return directory / f"bad_{name}.idx"

    for name in (
        "magic",
        "version",
        "code",
        "many",
        "short",
        "header",
        "order",
        "longer",
        "cut",
        "empty",
        "ends",
    ):
        indexed_files.write(directory / f"bad_{name}", [[[1, 2, 3]], [[4, 5]]], "uint16")
    indexed_files.write(directory / "bad_float", [[[1, 2, 3]]], "float32")
    right = bytearray(idx("magic").read_bytes())
    idx("magic").write_bytes(b"X" + right[1:])
    idx("version").write_bytes(right[:9] + b"\x02" + right[10:])
    idx("code").write_bytes(right[:17] + b"\x63" + right[18:])
    idx("many").write_bytes(right[:18] + b"\xff" * 8 + right[26:])
    idx("short").write_bytes(right[:-20])
    idx("header").write_bytes(right[:20])
    # The second sequence's offset: it would begin a token later.
    idx("order").write_bytes(right[:50] + b"\x08" + right[51:])
    # The last boundary: the last document would end a sequence earlier.
    idx("ends").write_bytes(right[:-8] + b"\x01" + right[-7:])
    (directory / "bad_longer.bin").write_bytes(bytes(12))
    (directory / "bad_cut.bin").write_bytes(bytes(8))
    (directory / "bad_empty.bin").write_bytes(b"")


@pytest.mark.parametrize("name", ALL)
def test_all_read_the_same_documents(directory: Path, read: dict[str, Any], name: str) -> None:
    dtype, documents = ALL[name]
    assert read["megatron"][name] == {"dtype": dtype, "documents": documents}
    assert indexed_files.read(directory / name) == indexed_files.IndexedContent(dtype, documents)
    tokens = [token for document in documents for sequence in document for token in sequence]
    assert read["we"][name] == {"tokens": tokens, "documents": len(documents)}


def test_written_files_follow_the_format_byte_for_byte(directory: Path, read: dict[str, Any]) -> None:
    for name in BUILT:
        dtype, documents = ALL[name]
        indexed_files.write(directory / "again", documents, dtype)
        for suffix in (".bin", ".idx"):
            expected, content = (Path(f"{directory / stem}{suffix}").read_bytes() for stem in ("again", name))
            assert expected == content, f"{name}{suffix}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magic", "not Megatron's: it does not begin with MMIDIDX"),
        ("version", "does not read: version 2, type 8"),
        ("code", "does not read: version 1, type 99"),
        ("many", "cut short"),
        ("short", "cut short: 62 bytes of 82"),
        ("header", "cut short"),
        ("order", "sequence 1 does not begin where the one before ends"),
        ("longer", "its .idx tells of 10 bytes of tokens, its .bin has 12"),
        ("cut", "its .idx tells of 10 bytes of tokens, its .bin has 8"),
        ("empty", "empty file"),
        ("ends", "its documents do not end at its last sequence, number 2"),
        ("float", "tokens are whole numbers, but these are float32"),
    ],
)
def test_files_that_are_no_data_set_are_refused(read: dict[str, Any], name: str, message: str) -> None:
    refusal = read["we"][f"bad_{name}"]["refused"]
    assert refusal.startswith("model.data.data_prefix=")
    assert f"bad_{name}: not a Megatron data set: " in refusal
    assert message in refusal


def test_missing_file_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    indexed_files.write(tmp_path / "corpus_text_document", [[[1, 2]]], "uint16")
    check_files(tmp_path / "corpus_text_document")
    with pytest.raises(UserError, match=rf"did you mean '{tmp_path}/corpus_text_document'"):
        check_files(tmp_path / "corpus_text_dokument")
    with pytest.raises(UserError, match="write it without the suffix"):
        check_files(tmp_path / "corpus_text_document.bin")
    with pytest.raises(UserError, match=r"absent/corpus\.idx: there is no such file; `slipway"):
        check_files(tmp_path / "absent" / "corpus")
    with pytest.raises(UserError, match=r"File name too long"):
        check_files(tmp_path / ("corpus" * 100))


def test_windows_lie_within_their_split(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    indexed_files.write(prefix, [[list(range(10))], [list(range(10, 31))]], "uint16")
    index = SampleIndex("uint16", 31, (Split(1, 0, 10), Split(1, 10, 21), Split(0, 31, 0)))
    training, validation = (IndexedSource(prefix, index, split, 5) for split in (0, 1))
    assert (training.windows, validation.windows) == (1, 4)
    assert [validation.window(number).tolist() for number in (0, 3)] == [
        list(range(10, 16)),
        list(range(25, 31)),
    ]
    for outside in (-1, 4):
        with pytest.raises(IndexError):
            validation.window(outside)


def test_a_data_set_that_changed_under_its_name_is_indexed_anew(read: dict[str, Any]) -> None:
    assert read["changed"] == [[3, 1, 2]] * 2 + [[1, 5, 6]] * 4


def test_a_blend_has_the_counts_of_megatrons_blending_index(read: dict[str, Any]) -> None:
    assert {row["sources"] for row in read["blending"]} >= {1, 2, 12}
    for row in read["blending"]:
        bound = math.ceil(math.log2(row["sources"])) / 2
        assert row["ours"] <= bound + 1e-6
        # Both stray from the weights, at every sample of the run, by less than a sample for each source.
        assert row["theirs"] < row["sources"] + 1
        assert row["apart"] <= row["ours"] + row["theirs"] + 1e-6
