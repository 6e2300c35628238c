"""The commands of the pages about data, run as they are written: from JSONL to a training and its audit."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.forked_slipway import write_slipway

PAGES = ("data.md", "data-audit.md")


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def docstrings() -> list[str]:
    """Return the docstrings of some modules of Python: short documents of real text."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:120]
    trees = [ast.parse(module.read_text(encoding="utf-8")) for module in modules]
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in map(ast.get_docstring, nodes) if text]


@pytest.mark.trainer
@pytest.mark.slow
def test_the_commands_about_data_run_as_written(repository: Path, tmp_path: Path, warm_python: Path) -> None:
    lines = [json.dumps({"text": text}) for text in docstrings()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    page_commands = [command for page in PAGES for command in commands(repository / "docs" / page)]
    assert [command.split()[1] for command in page_commands].count("data") == len(page_commands) - 1
    # Use processes that have imported torch before; nothing else differs from the page.
    script_lines = [
        re.sub(r"^slipway launch ", rf"\g<0>cluster.python={warm_python} ", text) for text in page_commands
    ]
    done = subprocess.run(
        ["bash", "-eux", "-c", "\n".join(script_lines)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{write_slipway(tmp_path / 'bin')}:{os.environ['PATH']}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(
        r"gpt3_tiny step 7: samples 192 to 223, epoch 0, data generation 0, launch 1", done.stdout
    )
    assert re.search(r"^documents by length in tokens", done.stdout, re.MULTILINE)
    assert (tmp_path / "data/corpus_text_document.png").read_bytes().startswith(b"\x89PNG")
    answer = json.loads((tmp_path / "step7.json").read_text())
    assert len(answer["samples"]) == 32
    pieces = [piece for sample in answer["samples"] for piece in sample["pieces"]]
    # Each piece comes from the line of the file at its offset.
    content = (tmp_path / "corpus.jsonl").read_bytes()
    assert {piece["source"] for piece in pieces} == {str(tmp_path / "corpus.jsonl")}
    for piece in pieces:
        assert content[: piece["offset"]].count(b"\n") == piece["document"]
        assert content[piece["offset"] :].startswith(b'{"text"')
