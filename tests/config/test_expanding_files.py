"""Configurations that would take all memory or time, or end with an error of Python's own, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError

DIGITS = "9" * 5000
LEVELS = range(12)
LISTS = "".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in LEVELS[1:])
MAPPINGS = "".join(
    f"a{level}: &a{level} {{{', '.join(f'k{key}: *a{level - 1}' for key in range(10))}}}\n"
    for level in LEVELS[1:]
)
MERGED = "".join(
    f"a{level}: &a{level} {{b: *a{level - 1}, c: *a{level - 1}, d: *a{level - 1}, <<: *a{level - 1}}}\n"
    for level in LEVELS[1:]
)
REFERENCES = "".join(f"a{level}: {f'${{.a{level - 1}}}' * 10}\n" for level in LEVELS[1:])
COPIES = "".join(
    f"a{level}: {{" + ", ".join(f"k{key}: '${{..a{level - 1}}}'" for key in range(10)) + "}\n"
    for level in LEVELS[1:]
)
pytestmark = pytest.mark.timeout(60)


def refusal(tmp_path: Path, cluster: str = "", *overrides: str) -> str:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(f"defaults: [_base, _self_]\n{cluster}")
    with pytest.raises(UserError) as raised:
        compose(["cluster=mine", "training=gpt3/126m", *overrides], (tmp_path,))
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"nodes: {DIGITS}", "mine.yaml:2: not valid YAML: a number of too many digits"),
        (f"a:\n  - [{DIGITS}]", "mine.yaml:3: not valid YAML: a number of too many digits"),
        (f"a: !!int {DIGITS}", "mine.yaml:2: not valid YAML: a number of too many digits"),
        (f"a0: &a0 [x]\n{LISTS}", "not valid YAML: aliases that make too many values"),
        (f"a0: &a0 {{x: y}}\n{MAPPINGS}", "not valid YAML: aliases that make too many values"),
        ("a: &a {b: [*a]}\n", "not valid YAML: an alias of the node around it"),
        (f"a0: &a0 {{x: y}}\n{MERGED}", "not valid YAML: aliases that make too many values"),
        (f"a0: x\n{REFERENCES}", "its references make too long a value"),
        (f"a0: {{x: y}}\n{COPIES}", "its references make too long a value"),
        ("account: ${multiply:'a',99999999999999999}", "cluster.account: its resolver ends with MemoryError"),
    ],
    ids=lambda value: value[:12],
)
def test_files_that_expand_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "override",
    [
        f"training.trainer.num_nodes={DIGITS}",
        f"training.run.name=-{DIGITS}",
        f"env_vars={{{DIGITS}: x}}",
        f"+new=[a,{{b: {DIGITS}}}]",
        f"training={DIGITS}",
        "env_vars=" + "[" * 2000 + "]" * 2000,
        "+new=" + "{a: " * 2000 + "b" + "}" * 2000,
        "+new=" + "int(" * 2000 + "1" + ")" * 2000,
    ],
    ids=lambda override: override[:16],
)
def test_overrides_that_are_no_values_are_refused(tmp_path: Path, override: str) -> None:
    assert "a number of over 1,000 digits, or brackets nested too deeply" in refusal(tmp_path, "", override)


@pytest.mark.parametrize("name", ["é" * 200, "9" * 600 + "b", "a/" * 2000 + "b"])
def test_choices_that_are_no_names_of_files_are_refused(tmp_path: Path, name: str) -> None:
    assert "there is no such choice" in refusal(tmp_path, "", f"training={name}")


def test_aliases_that_do_not_multiply_are_read(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    text = "defaults: [_base, _self_]\ncomment: &name x\nconstraint: *name\n"
    (tmp_path / "cluster" / "mine.yaml").write_text(text)
    composed = compose(["cluster=mine", "training=gpt3/126m"], (tmp_path,))
    assert (composed.config.cluster.comment, composed.config.cluster.constraint) == ("x", "x")
