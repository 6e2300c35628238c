"""Faults of sources and disks: each a message and an exit code, nothing half-written, nothing lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.corpus import spec
from slipway.corpus.__main__ import main
from slipway.corpus.plan import load_plan
from slipway.corpus.sources import collect
from slipway.corpus.tokenizers import obtain
from slipway.corpus.tokenizing import tokenize
from tests.corpus.preparing import (
    check_whole,
    configuration,
    prepare,
    results,
    write_configuration,
    write_lines,
    write_sources,
)

REPOSITORY = Path(__file__).parents[2]
# Run with a limit on the size of a file, as a full disk or a quota.
LIMITED = """
import resource, sys
# A short write is no error to importlib.
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from slipway.corpus.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_sources(directory / "in")
    preparation = spec.read(configuration(directory, directory / "in", directory / "bpe"))
    obtain(preparation, collect(preparation))
    return directory / "bpe"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    directory = tmp_path / "in"
    directory.mkdir()
    for name in ("a", "b"):
        write_lines(directory / f"{name}.jsonl", [f"document {number} of {name}" for number in range(300)])
    return directory


def run(directory: Path, node: dict[str, Any], phase: str = "run") -> int:
    return main([phase, *write_configuration(directory / "conf", node)])


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "undecodable bytes": (lambda data: data.replace(b"document 7 ", b"document \xff "), "not UTF-8"),
    "broken line": (lambda data: data.replace(b'document 7 of a"}', b"document 7 of a"), "not JSON"),
    "missing key": (
        lambda data: data.replace(b'"text": "document 7 ', b'"content": "document 7 '),
        "no key 'text' among content",
    ),
    "no text": (lambda data: data.replace(b'"document 7 of a"', b"[1]"), "'text' is no text"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_record_is_named_or_skipped_and_counted(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: Any, fault: str
) -> None:
    change, reason = FAULTS[fault]
    damage(lines / "a.jsonl", change)
    offset = sum(len(line) + 1 for line in (lines / "a.jsonl").read_bytes().split(b"\n")[:7])
    bad = f"{lines}/a.jsonl, byte {offset:,}: {reason}"
    node = configuration(tmp_path, lines, tokenizer)
    assert run(tmp_path, node) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {bad}; ")
    hint = "data_preparation.text_key" if "no key" in reason else "data_preparation.on_error=skip"
    assert hint in error
    assert not check_whole(tmp_path / "out")
    assert results(tmp_path / "out") == {}
    # One of 600 is more than a thousandth.
    assert run(tmp_path, node | {"on_error": "skip"}) == 2
    error = capsys.readouterr().err
    assert "1 bad records besides 599 documents are more than max_errors=0.001 allows" in error
    assert f"{bad}; data_preparation.max_errors=1 allows them" in error
    assert run(tmp_path, node | {"on_error": "skip", "max_errors": 1}) == 0
    assert f"1 bad records skipped ({bad})" in capsys.readouterr().out
    assert check_whole(tmp_path / "out")
    counts = json.loads((tmp_path / "out/x.manifest.json").read_text())["counts"]
    assert (counts["documents"], counts["bad"]) == (599, 1)
    assert counts["skipped"][0]["reason"] == reason


def test_bad_records_in_number_end_the_first_unit(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: Any
) -> None:
    damage(lines / "a.jsonl", lambda data: data.replace(b'"text"', b'"t"'))
    node = configuration(tmp_path, lines, tokenizer, on_error="skip", max_errors=5)
    assert run(tmp_path, node) == 2
    assert "are more than max_errors=5 allows; the first is " in capsys.readouterr().err


def test_an_empty_source_is_refused_or_skipped(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: Any
) -> None:
    (lines / "empty.jsonl").touch()
    node = configuration(tmp_path, lines, tokenizer)
    assert run(tmp_path, node) == 2
    assert f"{lines}/empty.jsonl: empty file; on_error=skip leaves it out" in capsys.readouterr().err
    assert run(tmp_path, node | {"on_error": "skip", "max_errors": 1}) == 0
    assert f"{lines}/empty.jsonl, byte 0: empty file" in capsys.readouterr().out


def test_sources_without_a_document_are_refused(tokenizer: Path, tmp_path: Path, capsys: Any) -> None:
    write_lines(tmp_path / "a.jsonl", ["", ""])
    assert run(tmp_path, configuration(tmp_path, tmp_path / "a.jsonl", tokenizer)) == 2
    assert "no document: " in (error := capsys.readouterr().err)
    assert "2 documents dropped (empty 2)" in error
    assert results(tmp_path / "out") == {}


def test_a_duplicate_shard_is_refused_or_dropped(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: Any
) -> None:
    (lines / "c.jsonl").write_bytes((lines / "a.jsonl").read_bytes())
    node = configuration(tmp_path, lines, tokenizer)
    assert run(tmp_path, node) == 2
    error = capsys.readouterr().err
    assert "the same bytes as" in error
    assert f"{lines}/a.jsonl" in error
    assert f"{lines}/c.jsonl" in error
    assert run(tmp_path, node | {"deduplicate": {"exact": True}}) == 0
    assert "300 documents dropped (exact_duplicate 300)" in capsys.readouterr().out


def test_changed_source_is_reported_and_only_its_units_are_made_again(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: Any
) -> None:
    node = configuration(tmp_path, lines, tokenizer)
    preparation = spec.read(node)
    assert run(tmp_path, node, "fetch") == 0
    tokenize(load_plan(preparation))
    before = {path.name: path.stat().st_mtime_ns for path in preparation.units_dir.glob("*.json")}
    damage(lines / "a.jsonl", lambda data: data.replace(b"document 7 ", b"document x "))
    # The list of sources is that of the last fetch: the units that it names are as they were.
    capsys.readouterr()
    assert run(tmp_path, node) == 0
    output = capsys.readouterr().out
    assert f"{lines}/a.jsonl: changed since the last run, of the same size" in output
    units = load_plan(preparation).units
    touched = [
        unit
        for unit in units
        if any(preparation_file(preparation, piece.file) == "a.jsonl" for piece in unit.pieces)
    ]
    assert f"{len(before)} units, {len(before) - len(touched)} of them done before" in output
    assert 0 < len(touched) < len(before)
    # The result is that of a first run with the changed file.
    assert prepare(configuration(tmp_path / "new", lines, tokenizer)) == results(tmp_path / "out")


def preparation_file(preparation: spec.Preparation, number: int) -> str:
    return load_plan(preparation).files[number].path.name


def test_a_source_that_grows_between_fetch_and_tokenize_is_refused(
    lines: Path, tokenizer: Path, tmp_path: Path
) -> None:
    preparation = spec.read(configuration(tmp_path, lines, tokenizer))
    collect(preparation)
    damage(lines / "a.jsonl", lambda data: data + b"\n")
    with pytest.raises(UserError, match=r"a\.jsonl: it has .* bytes, and had .* when `fetch` listed it"):
        tokenize(load_plan(preparation))


def test_units_that_are_missing_are_named(lines: Path, tokenizer: Path, tmp_path: Path, capsys: Any) -> None:
    node = configuration(tmp_path, lines, tokenizer)
    assert run(tmp_path, node, "merge") == 2
    assert "sources.json: No such file" in capsys.readouterr().err
    assert run(tmp_path, node, "fetch") == 0
    tokenize(load_plan(spec.read(node)), 0, 2)
    assert run(tmp_path, node, "merge") == 2
    assert "units are not tokenized (1, 3, 5" in capsys.readouterr().err


@pytest.mark.parametrize(("phase", "limit"), [("tokenize", 500), ("merge", 5000)])
def test_a_full_disk_ends_a_phase_and_nothing_is_lost(
    lines: Path, tokenizer: Path, tmp_path: Path, phase: str, limit: int
) -> None:
    node = configuration(tmp_path, lines, tokenizer)
    options = write_configuration(tmp_path / "conf", node)
    for earlier in ("fetch", "tokenize")[: 1 if phase == "tokenize" else 2]:
        assert main([earlier, *options]) == 0
    command = [sys.executable, "-c", LIMITED, str(limit), phase, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines() or [""]
    assert line.startswith("error: File too large: ")
    assert "finished work is kept" in line
    assert not [path for path in (tmp_path / "out").rglob("*") if "unfinished" in path.name]
    assert not (tmp_path / "out/x.manifest.json").exists()
    for later in ("tokenize", "merge")[0 if phase == "tokenize" else 1 :]:
        assert main([later, *options]) == 0
    assert results(tmp_path / "out") == prepare(configuration(tmp_path / "other", lines, tokenizer))


def test_workers_leave_when_their_parent_is_killed(tokenizer: Path, tmp_path: Path) -> None:
    texts = [f"document {number} " * 40 for number in range(40000)]
    write_lines(tmp_path / "a.jsonl", texts)
    node = configuration(tmp_path, tmp_path / "a.jsonl", tokenizer, workers=2, shard_bytes=1 << 20)
    options = write_configuration(tmp_path / "conf", node)
    assert main(["fetch", *options]) == 0
    process = subprocess.Popen([sys.executable, "-m", "slipway.corpus", "tokenize", *options], cwd=REPOSITORY)
    try:
        units, deadline = tmp_path / "out/x.work/units", time.monotonic() + 100
        while not list(units.glob("*.json")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        children = [
            int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(children) >= 2
    while any(is_running(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in children)
    done = len(list(units.glob("*.json")))
    assert 0 < done < len(load_plan(spec.read(node)).units)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
