"""Verbs and options for argparse: one way to add each of those that several verbs share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from launcher.cli.verbs import VERBS
from launcher.errors import UserError, escape

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def seconds_from(least: float) -> Callable[[str], float]:
    """Return the reader of an option in seconds, which are at least so many."""

    def read(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not least <= seconds < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least:g} seconds")
        return seconds

    return read


def add_verb(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int | None] | None,
    summary: str = "",
    text: str = "",
) -> argparse.ArgumentParser:
    """Add a verb that `run` carries out, which returns the exit code; a group of verbs has no `run`.

    The summaries of the verbs of `slipway` itself are in `launcher.cli.verbs`. The text of the help is the
    description (by default the summary), then the examples and the exit codes, printed below the options.
    """
    summary = summary or VERBS[name]
    description, title, rest = text.partition("examples:\n")
    description = description or f"{summary[0].upper()}{summary[1:]}."
    parser = verbs.add_parser(name, help=summary, description=description, epilog=title + rest)
    parser.set_defaults(run=run)
    return parser


# The types of values by their names in the help; that of any other is text.
_TYPES: dict[str, Callable[[str], Any]] = {"N": int, "DIR": Path, "FILE": Path}


def add_option(parser: argparse._ActionsContainer, form: str, text: str, **settings: Any) -> None:
    """Add an option in the form of its help, such as ``-o --output FILE``; without a value it is a flag."""
    names = [word for word in form.split() if word.startswith("-")]
    kind: dict[str, Any] = {"action": "store_true"}
    for value in form.split()[len(names) :]:
        kind = {"metavar": value, "type": _TYPES.get(value)}
    parser.add_argument(*names, help=text, **{**kind, **settings})


def whole_number(least: int) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number of at least so much."""

    def parse(text: str) -> int:
        if text.isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")

    return parse


_AGES = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_age(text: str, option: str) -> float:
    """Return an age such as ``30d``, ``12h`` or ``2w`` in seconds; raise UserError for other text."""
    match = re.fullmatch(r"([0-9]{1,6})([mhdw])", text, re.ASCII)
    if match is None:
        raise UserError(f"{option} {escape(text)}: not an age", hint="an age is such as 30d, 12h or 2w")
    return float(int(match[1]) * _AGES[match[2]])


def add_overrides(parser: argparse.ArgumentParser, text: str, metavar: str = "OVERRIDE") -> None:
    """Add the words of a verb, allowed on both sides of its options."""
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=text)


_CONFIG_DIRS: dict[str, Any] = {"action": "append", "default": [], "dest": "config_dirs", "type": Path}


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add the user's own trees."""
    text = "a conf tree of your own, read first; may be given again, and the first that has a file wins"
    add_option(parser, "--config-dir DIR", text, **_CONFIG_DIRS)


def verb_first(words: Sequence[str]) -> list[str]:
    """Move `--config-dir` of a site's wrapper, in front of the verb, behind the options of its user."""
    front, rest = list[str](), list(words)
    while rest and rest[0].partition("=")[0] == "--config-dir":
        number = 1 if "=" in rest[0] else 2
        front, rest = [*front, *rest[:number]], rest[number:]
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *front, *rest[end:]] if rest else []


def add_tree_options(parser: argparse.ArgumentParser, templates: str = "templates") -> None:
    """Add the user's own trees: of the configuration, and of templates."""
    add_config_dir(parser)
    add_option(parser, "--template-dir DIR", f"{templates} of your own, read first")
