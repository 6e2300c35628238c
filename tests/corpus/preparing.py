"""Small data preparations for the tests: sources of several formats, and their results by SHA-256."""

from __future__ import annotations

import bz2
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import yaml
import zstandard
from pyarrow import parquet

from slipway.corpus import spec
from slipway.corpus.merging import merge
from slipway.corpus.plan import load_plan
from slipway.corpus.sources import collect
from slipway.corpus.tokenizers import obtain
from slipway.corpus.tokenizing import tokenize
from tests.trainer.indexed_files import read

_WORDS = "the of and späte Wörter in 2026 a train; model data — token 東京 shard hello".split()  # noqa: SIM905
_WORDS += ["merge\n\n", ""]


def text(chance: random.Random) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(1, 60)))


def write_lines(path: Path, texts: list[str]) -> bytes:
    content = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    path.write_bytes(content)
    return content


def write_sources(directory: Path, seed: int = 7) -> None:
    """Write about 100 kB of JSONL, JSONL.zst, Parquet, a dump and text files, some texts more than once."""
    chance = random.Random(seed)
    directory.mkdir(parents=True)
    for name in ("a", "b"):
        write_lines(directory / f"{name}.jsonl", [text(chance) for _ in range(120)] + ["a copy", ""])
    lines = write_lines(directory / "c.jsonl", ["a copy", *(text(chance) for _ in range(40))])
    (directory / "c.jsonl").unlink()
    (directory / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    table = pyarrow.table({"text": [text(chance) for _ in range(60)]})
    parquet.write_table(table, directory / "d.parquet", row_group_size=9)
    pages = "".join(
        f"<page><ns>0</ns><id>{number}</id><revision><text>{text(chance)}</text></revision></page>"
        for number in range(20)
    )
    (directory / "e.xml.bz2").write_bytes(bz2.compress(f"<mediawiki>{pages}</mediawiki>".encode()))
    for number in range(8):
        (directory / f"f{number}.txt").write_text(text(chance))
    (directory / "empty.txt").touch()


def configuration(directory: Path, inputs: Path, tokenizer: Path, **changes: Any) -> dict[str, Any]:
    """Return the node `data_preparation` with tiny units, and outputs below a directory."""
    return {
        "inputs": [str(inputs)],
        "output_prefix": str(directory / "out" / "x"),
        "tokenizer_dir": str(tokenizer),
        "vocab_size": 300,
        "shard_bytes": 2048,
        "workers": 1,
    } | changes


def write_configuration(directory: Path, node: dict[str, Any]) -> list[str]:
    """Write a configuration; return the options that name it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "preparation.yaml").write_text(yaml.safe_dump({"data_preparation": node}))
    return ["--config-path", str(directory), "--config-name", "preparation"]


def prepare(node: dict[str, Any], tasks: int = 1, order: random.Random | None = None) -> dict[str, str]:
    """Prepare data in this process, the tasks one after the other; return the results."""
    preparation = spec.read(node)
    obtain(preparation, collect(preparation))
    numbers = list(range(tasks))
    (order or random.Random(0)).shuffle(numbers)
    for task in numbers:
        # Each task of an array reads what `fetch` has left.
        tokenize(load_plan(preparation), task, tasks)
    merge(load_plan(preparation))
    return results(preparation.output_prefix.parent)


def results(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of the outputs by name, for a comparison with others."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.is_file()
    }


def check_whole(directory: Path, name: str = "x") -> bool:
    """Check that nothing under a final name is half; return True if the data set is complete."""
    manifest = directory / f"{name}.manifest.json"
    for index in directory.glob(f"{name}*.idx"):
        read(index.with_suffix(""))
    if not manifest.exists():
        return False
    for output in json.loads(manifest.read_text())["outputs"]:
        content = (directory / output["path"]).read_bytes()
        assert len(content) == output["size"]
        assert hashlib.sha256(content).hexdigest() == output["sha256"]
    return True
