"""The table of verbs: the help, the modules that a verb imports, and other tools' words."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from launcher.cli.app import VerbParser, add_verbs, main
from launcher.cli.verbs import MODULES, OTHER_WORDS, VERBS

Capsys = pytest.CaptureFixture[str]

COUNT = """
import contextlib, sys
from launcher.cli.app import main
with contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(*(name for name in sys.modules if name.partition(".")[0] == "launcher"), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("--help", 15),
        ("--version", 15),
        ("status", 57),
        ("list runs", 57),
        ("list", 57),
        ("history nope", 57),
    ],
)
def test_help_and_verbs_that_read_import_few_modules(words: str, most: int) -> None:
    command = [sys.executable, "-c", COUNT, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    loaded = done.stderr.splitlines()[-1].split()
    assert len(loaded) <= most, loaded


def test_the_table_and_the_modules_have_the_same_verbs(capsys: Capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{verb} {summary}" in text for verb, summary in VERBS.items())
    for verb in VERBS:
        assert importlib.util.find_spec(f"launcher.cli.{MODULES.get(verb, verb)}")
    parsers = VerbParser(prog="slipway").add_subparsers()
    add_verbs(parsers)
    assert set(parsers.choices) == set(VERBS)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train training=gpt3/tiny", "launch training=gpt3/tiny"),
        ("ls", "list"),
        ("PS", "status"),
        ("torchrun training=gpt3/tiny", "launch training=gpt3/tiny"),
        ("inference a", "generate a"),
        ("stop a b", "cancel a b"),
        ("tail a -f", "logs a -f"),
        ("run env_vars.HF_TOKEN=hf_0123456789abcdef", "launch 'env_vars.HF_TOKEN"),
    ],
)
def test_other_tools_words_name_the_verb(capsys: Capsys, line: str, meant: str) -> None:
    assert main(line.split()) == 2
    message = capsys.readouterr().err
    assert f"did you mean: slipway {meant}" in message
    assert "0123456789abcdef" not in message


@pytest.mark.parametrize("word", ["version", "-v", "-V", "--version"])
def test_version_is_printed(capsys: Capsys, word: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([word])
    assert capsys.readouterr().out.startswith("slipway ")


def test_other_words_are_no_verbs_and_name_verbs() -> None:
    assert not set(OTHER_WORDS) & set(VERBS)
    assert {meant.split()[0] for meant in OTHER_WORDS.values()} <= set(VERBS)


def test_an_option_before_the_verb_is_explained(capsys: Capsys) -> None:
    assert main(["--json", "status"]) == 2
    assert "--json: options stand after the verb" in capsys.readouterr().err
