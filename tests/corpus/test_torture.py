"""The generated half of `make data-torture`: sources and tokenizers next to their references, and bombs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.torture.server import Server, server

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module")
def process() -> Iterator[Server]:
    with server() as process:
        yield process


@pytest.mark.parametrize("group", ["source", "tokenizer", "bomb"])
def test_each_case_is_taken_or_refused_as_it_is_right(group: str, process: Server, tmp_path: Path) -> None:
    names = process.names(group)
    assert names
    outcomes = {
        name: process.run(name, tmp_path / str(number), is_cleared=True) for number, name in enumerate(names)
    }
    surprises = [
        f"{name}: {outcome.why}" for name, outcome in outcomes.items() if outcome.state == "surprise"
    ]
    assert not surprises, "\n\n".join(surprises)
    assert {outcome.state for outcome in outcomes.values()} <= {"equal", "refused", "taken"}


def test_a_wrong_id_and_a_lost_document_are_surprises() -> None:
    code = (
        "from benchmarks.torture.cases import Expected, Reference, judge\n"
        "reference = Reference({}, lambda texts: [[len(text)] for text in texts], 0)\n"
        "expected = Expected([], ['a', 'bb'])\n"
        "for written in ([[1, 0], [2, 0]], [[2, 0], [1, 0]], [[1, 0]], [[1, 0], [3, 0]], [[1], [2]]):\n"
        "    print(bool(judge(expected, reference, 0, '', written)))\n"
        "print(bool(judge(expected, reference, 2, 'refused', None)))\n"
        "print(bool(judge(Expected([], None, ['this|that']), reference, 2, 'for That reason', None)))\n"
        "print(bool(judge(Expected([], None, ['this|that']), reference, 2, 'for some reason', None)))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True", "True", "True", "True", "False", "True"]
