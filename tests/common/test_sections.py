"""The sections that jobs read: mistakes in one line, and defaults that are those of `conf/`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.common import sections
from slipway.common.errors import UserError
from slipway.common.section_types import load

CONF = Path(__file__).parents[2] / "conf"
PLACES: dict[str, Any] = {"inputs": ["a.txt"], "output_prefix": "/o", "tokenizer_dir": "/t", "work_dir": "/w"}


def preparation(**changes: Any) -> sections.DataPreparation:
    return load(sections.DataPreparation, {**PLACES, **changes}, "data_preparation")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": 2}, "data_preparation.task: there is no such key; did you mean 'tasks'?"),
        ({"zzz": 2}, "data_preparation.zzz: there is no such key; valid are inputs, .*, seed"),
        ({"output_prefix": None}, "data_preparation.output_prefix is missing: it has no default"),
        ({"tasks": 0}, "tasks=0: expected a whole number, 1 or more"),
        ({"tasks": True}, "tasks=True: expected a whole number"),
        ({"tasks": 2.0}, "tasks=2.0: expected a whole number"),
        ({"append_eod": "yes"}, "append_eod='yes': expected true or false"),
        ({"pattern": 3}, "pattern=3: expected text"),
        ({"pattern": ""}, "pattern='': expected text"),
        ({"work_dir": 3}, "work_dir=3: expected text, which is a path"),
        ({"output_prefix": "a\nb"}, "output_prefix='a.*': a line break"),
        ({"format": "josnl"}, "format='josnl': expected one of auto, txt, .*; did you mean 'jsonl'?"),
        ({"inputs": []}, r"inputs=\[\]: expected at least one path"),
        ({"inputs": [{"url": "https://x", "path": "/x"}]}, "inputs.0=.*: expected either `url` or `path`"),
        ({"inputs": [{"url": "https://x/y", "sha256": "ab"}]}, "inputs.0.sha256='ab': not a SHA-256"),
        (
            {"inputs": ["htps://k:secret@x/y"]},
            r"inputs.0='htps://\.\.\.: no source .*; did you mean 'https'?",
        ),
        ({"inputs": {"path": "/x"}}, "inputs={'path': '/x'}: expected a list"),
        (
            {"filters": ["gopher_qualty"]},
            "there is no filter gopher_qualty; .* did you mean 'gopher_quality'?",
        ),
        (
            {"filters": [{"regex": 3}]},
            "filters.0=.*: expected the name of a filter, or {NAME: {OPTION: VALUE}}",
        ),
        ({"deduplicate": {"minhash": {"ngrams": 3}}}, "deduplicate.minhash.ngrams: .* did you mean 'ngram'?"),
        ({"deduplicate": "exact"}, "deduplicate='exact': expected keys below it"),
        ({"splits": {"train": 0.9}}, "splits=.*: the shares are 0.9 in all, and must be 1"),
        ({"splits": {"a/b": 1}}, "splits=.*: expected names and shares"),
        ({"max_errors": 1.5}, "max_errors=1.5: expected a share of the documents below 1"),
    ],
)
def test_mistake_is_named_with_what_is_valid(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        preparation(**changes)
    assert "secret" not in str(raised.value)


def test_values_have_the_forms_of_their_types() -> None:
    node = preparation(
        inputs=["a.txt", {"url": "https://x/y", "format": "auto", "sha256": "AB" * 32}],
        filters=["regex", {"language": {"model": "m.bin"}}],
        deduplicate={"minhash": True},
        splits={"train": 1},
        tasks="3",
        pattern=None,
    )
    assert [entry.to_config() for entry in node.inputs] == [
        "a.txt",
        {"url": "https://x/y", "sha256": "ab" * 32},
    ]
    model = {"language": {"model": str(Path("m.bin").absolute())}}
    assert [entry.to_config() for entry in node.filters] == ["regex", model]
    assert (node.deduplicate.minhash, node.splits) == (sections.MinHash(), {"train": 1.0})
    assert (node.tasks, node.pattern, node.output_prefix) == (3, "*", Path("/o"))
    node = load(sections.Evaluation, {"step": 4, "lm_eval": {"tasks": "a", "limit": 20.0}}, "")
    assert (node.step, node.lm_eval.tasks, repr(node.lm_eval.limit)) == ([4], ["a"], "20")


# `lm_eval.batch_size` is 8 in `conf/`: null is a value there, by which lm-eval finds the size.
@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("data_preparation/_base", sections.DataPreparation),
        ("conversion/_base", sections.Conversion),
        ("evaluation/default", sections.Evaluation),
    ],
)
def test_defaults_are_those_of_the_configuration(file: str, kind: type) -> None:
    def compare(node: dict[str, Any], kind: Any) -> None:
        assert list(node) == [item.name for item in fields(kind)]
        for item in fields(kind):
            is_made = item.default_factory is not MISSING
            default = item.default_factory() if is_made else item.default  # type: ignore[misc]
            value = node[item.name]
            if is_dataclass(default):
                compare(value, default)
            elif default is not MISSING and "${" not in str(value) and item.name != "batch_size":
                assert value == default or (value is None and default == []), item.name

    node = yaml.safe_load((CONF / f"{file}.yaml").read_text())
    del node["run"]
    compare(node, kind)


@pytest.mark.parametrize(
    ("program", "node"),
    [
        ("slipway.corpus", {**PLACES, "tasks": 0}),
        ("slipway.trainer.conversion", {"source": "/s", "to": "slipway", "output": "/o", "shard_bytes": 0}),
        ("slipway.trainer.evaluation", {"source": "/s", "results": "/r", "lm_eval": {"limit": 1.5}}),
    ],
)
def test_program_refuses_a_mistake_in_one_line(program: str, node: dict[str, Any], tmp_path: Path) -> None:
    root = {"slipway.corpus": "data_preparation"}.get(program, program.rpartition(".")[2])
    config = {
        root: node,
        **({name: {} for name in ("trainer", "exp_manager", "model") if root == "evaluation"}),
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", program, "run", f"--config-path={tmp_path}", "--config-name=x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2
    assert line.startswith(f"error: {root}.")
    assert "whole number" in line
