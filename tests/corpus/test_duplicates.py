"""Exact and near duplicates: planted ones are found, others stay, however the documents are divided."""

from __future__ import annotations

import hashlib
import itertools
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import slipway.corpus.duplicates
from slipway.common.sections import MinHash
from slipway.corpus.cleaning import DropCounts
from slipway.corpus.duplicates import Duplicates, Signatures, find

WORDS = [
    f"{first}{second}" for first in "bcdfghklmn" for second in ("a", "elo", "iro", "un", "est", "or", "ab")
]
FEW = MinHash(ngram=3, buckets=4, hashes_per_bucket=4)


def text(seed: int, words: int = 200) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def edited_text(original: str, seed: int) -> str:
    """Return the text with one word in a hundred replaced, other case and other punctuation."""
    draw = random.Random(seed)
    words = original.split()
    for position in range(0, len(words), 100):
        words[position + draw.randrange(100)] = "edited"
    return ", ".join(words).upper() + "!"


def search(
    directory: Path, units: Sequence[Sequence[str]], options: MinHash | None = FEW, exact: bool = True
) -> Duplicates:
    hashes, signatures = [], []
    for number, texts in enumerate(units):
        path = directory / f"{number:06d}.hashes"
        path.write_bytes(b"".join(hashlib.blake2b(t.encode(), digest_size=16).digest() for t in texts))
        hashes.append(path)
        if options:
            signatures.append(directory / f"{number:06d}.minhash")
            writer = Signatures(signatures[-1], options)
            for entry in texts:
                writer.add(entry)
            writer.close()
    counts = [len(texts) for texts in units]
    scratch = directory / "scratch"
    duplicates = find(counts, hashes if exact else None, signatures or None, options, scratch, workers=2)
    assert not (directory / "scratch").exists()
    return duplicates


def pairs(duplicates: Duplicates) -> dict[int, tuple[int, bool]]:
    originals = zip(duplicates.originals.tolist(), duplicates.are_exact.tolist(), strict=True)
    return dict(zip(duplicates.numbers.tolist(), originals, strict=True))


def test_planted_duplicates_are_dropped_and_others_stay(tmp_path: Path) -> None:
    documents = [text(number) for number in range(30)]
    documents[11] = documents[4]
    documents[17] = edited_text(documents[4], 1)
    documents[25] = edited_text(documents[4], 2)
    documents[28] = edited_text(documents[9], 3)
    documents[29] = documents[28]
    duplicates = search(tmp_path, [documents[:10], documents[10:12], [], documents[12:]])
    assert pairs(duplicates) == {
        11: (4, True),
        17: (4, False),
        25: (4, False),
        28: (9, False),
        29: (28, True),
    }


def test_first_of_near_duplicates_stays_also_where_copies_follow(tmp_path: Path) -> None:
    """The block of datatrove may choose any document of a cluster, also one that is dropped as exact."""
    first = text(1)
    documents = [edited_text(first, seed) for seed in range(6)] + [first] * 5 + [edited_text(first, 0)]
    duplicates = search(tmp_path, [documents[:7], documents[7:]])
    assert duplicates.numbers.tolist() == list(range(1, 12))
    assert pairs(duplicates)[11] == (0, True)
    assert pairs(duplicates)[6] == (0, False)
    assert pairs(duplicates)[7] == (6, True)


@pytest.mark.parametrize("parts", [1, 2, 13, 40])
def test_duplicates_do_not_depend_on_the_division_into_units(tmp_path: Path, parts: int) -> None:
    draw = random.Random(5)
    documents = [text(draw.randrange(25)) for _ in range(40)]
    documents += [edited_text(documents[draw.randrange(40)], seed) for seed in range(20)]
    draw.shuffle(documents)
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    bounds = [round(part * len(documents) / parts) for part in range(parts + 1)]
    units = [documents[first:last] for first, last in itertools.pairwise(bounds)]
    whole = search(tmp_path / "whole", [documents])
    assert len(whole.numbers) > 30
    assert pairs(search(tmp_path / "parts", units)) == pairs(whole)


def test_several_files_of_signatures_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [text(number % 7) for number in range(30)]
    units = [documents[:10], documents[10:20], documents[20:]]
    whole = search(tmp_path, units, exact=False)
    assert len(whole.numbers) == 23
    monkeypatch.setattr(slipway.corpus.duplicates, "_DOCUMENTS_PER_FILE", 10)
    # Spawned workers have the constants of the module.
    assert pairs(search(tmp_path, units, exact=False)) == pairs(whole)
    monkeypatch.setattr(slipway.corpus.duplicates, "_DOCUMENTS_FOR_PROCESSES", 0)
    assert pairs(search(tmp_path, units, exact=False)) == pairs(whole)


def test_long_document_has_the_signature_of_datatrove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shingles are hashed in parts, to save memory."""
    monkeypatch.setattr(slipway.corpus.duplicates, "_SHINGLES", 64)
    writer = Signatures(tmp_path / "signatures", FEW)
    document = text(3, words=1000)
    writer.add("too short")
    writer.add(document)
    writer.close()
    expected = writer._block.get_signature(writer._block.get_shingles(document))
    rows = np.fromfile(tmp_path / "signatures", "<u4").reshape(len(expected), -1)
    for row, values in zip(rows, expected, strict=True):
        assert row[-1] == 1
        assert row[:-1].view("<u8").tolist() == values


def test_short_documents_are_exact_duplicates_only(tmp_path: Path) -> None:
    assert pairs(search(tmp_path, [["a b", "A B", "a b", "", ""]])) == {2: (0, True), 4: (3, True)}
    assert pairs(search(tmp_path, [["a b", "A B"]], exact=False)) == {}


def test_no_documents_have_no_duplicates(tmp_path: Path) -> None:
    assert pairs(search(tmp_path, [[], []])) == {}
    assert pairs(search(tmp_path, [])) == {}


def test_hashes_of_other_documents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(32))
    with pytest.raises(ValueError, match="2 hashes of 3 documents"):
        find([3], [tmp_path / "a"], None, None, tmp_path / "scratch")


def test_duplicates_are_counted_by_reason_with_their_originals(tmp_path: Path) -> None:
    documents = [text(1), text(2), text(1), edited_text(text(2), 1)]
    drops = DropCounts()
    search(tmp_path, [documents]).count(drops, lambda number: (number // 2, 100 * number))
    assert dict(drops.counts) == {"exact_duplicate": 1, "near_duplicate": 1}
    assert drops.samples() == {
        "exact_duplicate": [{"file": 1, "offset": 200, "same_as": {"file": 0, "offset": 0}}],
        "near_duplicate": [{"file": 1, "offset": 300, "same_as": {"file": 0, "offset": 100}}],
    }


def test_datatrove_prints_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from tests.corpus.test_duplicates import search\n"
        "print(len(search(pathlib.Path(sys.argv[1]), [['a b c d'] * 3]).numbers))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_words_of_a_language_are_datatroves(tmp_path: Path) -> None:
    """`cannot` is two words of English for spaCy, and `can not` are two."""
    units = [["you cannot " + text(1, 30), "you can not " + text(1, 30)]]
    options = MinHash(ngram=3, buckets=1, hashes_per_bucket=64, language="eng")
    assert pairs(search(tmp_path, units, options)) == {1: (0, False)}
    spaced = MinHash(ngram=3, buckets=1, hashes_per_bucket=64)
    assert pairs(search(tmp_path, units, spaced)) == {}
