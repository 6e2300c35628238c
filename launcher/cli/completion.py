"""`slipway completion`: what bash and zsh need to complete verbs, options, sizes and keys."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from launcher.config.candidates import candidates, images, recipes, runs
from launcher.errors import UserError

_EPILOG = """\
examples:
  source <(slipway completion bash)                               in ~/.bashrc
  source <(slipway completion zsh)                                in ~/.zshrc
  slipway completion bash > /etc/bash_completion.d/slipway        for everyone

Then: slipway launch training=gpt3/<TAB>, cluster=<TAB>, training.model.optim.<TAB>, status <TAB>, ...
Verbs and options are written into the script: print it again after an update.

exit code:
  0  printed
  2  there is no such shell
"""

_ASKED = ("words",)

_TEMPLATES = Path(__file__).with_name("completions")

# What stands for a verb's words, by the metavar of its positional argument.
_KINDS = {
    "OVERRIDE": "overrides",
    "OVERRIDE|KEY": "overrides",
    "INPUT": "overrides",
    "RUN": "runs",
    "RECIPE": "recipes",
    "IMAGE": "images",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A verb, or a verb of a verb, as a shell has to know it.

    Attributes
    ----------
    options, valued
        All options, and those that a value follows.
    kind
        What its other words are: ``overrides``, ``runs``, ``recipes`` and ``images`` with overrides after
        them, the words themselves, or nothing, which is files.
    """

    name: str
    options: tuple[str, ...]
    valued: tuple[str, ...]
    kind: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "completion",
        help="completion for bash and zsh",
        description="Print the script that makes a shell complete what `slipway` takes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=["bash", "zsh", *_ASKED], metavar="bash|zsh")
    # `words KIND WORD OTHERS…` is what the scripts ask.
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script, or the candidates that it asks for; return the exit code."""
    if args.shell in _ASKED:
        if len(args.words) < 2:
            raise UserError("completion words: this is what the printed scripts ask, not a shell")
        print("\n".join(_asked(args.words[0], args.words[1], args.words[2:])))
        return 0
    script = (_TEMPLATES / f"slipway.{args.shell}").read_text(encoding="utf-8")
    table = "\n".join(_case(command) for command in commands())
    sys.stdout.write(script.replace("    # @commands", table))
    return 0


def _asked(kind: str, word: str, others: list[str]) -> list[str]:
    if kind == "runs":
        base = _given("--base-results-dir", others) or Path("results")
        return [name for name in runs(base) if name.startswith(word)]
    tree = _given("--config-dir", others)
    # As in `compose`, which would take far longer to import.
    ours = (Path(__file__).parents[1] / "conf").resolve()
    trees = [root for root in (tree, ours) if root is not None]
    names = recipes(trees) if kind in ("recipes", "images") else []
    if kind == "images":
        names += images(_given("--images-dir", others) or Path("images"))
    return [*(name for name in names if name.startswith(word)), *candidates(word, others, trees)]


def _given(option: str, words: list[str]) -> Path | None:
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            return Path(words[index + 1]).expanduser()
        if word.startswith(f"{option}="):
            return Path(word.partition("=")[2]).expanduser()
    return None


def commands() -> Iterator[Command]:
    """Every verb as its parser knows it. Imports all of them."""
    from launcher.cli.app import _VERBS

    parser = argparse.ArgumentParser(prog="slipway")
    subparsers = parser.add_subparsers()
    for module in dict.fromkeys(_VERBS.values()):
        import_module(module).add_parser(subparsers)
    yield from _commands("", parser)


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[Command]:
    options: list[str] = []
    valued: list[str] = []
    kind = ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            kind = " ".join(action.choices)
            for verb, below in action.choices.items():
                yield from _commands(f"{name} {verb}".strip(), below)
        elif action.option_strings:
            options += [text for text in action.option_strings if text.startswith("--")]
            valued += action.option_strings if action.nargs != 0 else []
        elif action.help != argparse.SUPPRESS:
            known = " ".join(choice for choice in action.choices or () if choice not in _ASKED)
            # Overrides come after what else there is.
            kind = kind or known or _KINDS.get(str(action.metavar), "")
    yield Command(name, tuple(options), tuple(valued), kind)


def _case(command: Command) -> str:
    """A branch of a `case`, the same in both shells."""
    valued = f"|{'|'.join(command.valued)}|" if command.valued else ""
    return (
        f'    "{command.name}") options="{" ".join(command.options)}"'
        f' valued="{valued}" kind="{command.kind}" ;;'
    )
