"""`slipway completion`: the completion of verbs, options, overrides and runs in bash and zsh.

The candidates are quick, so without Hydra: the keys are those of the files that the choices so far lead to.
An unreadable file has no candidates; the launch reports its error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.cli.options import Verbs, add_verb
from launcher.config.overrides import GROUPS, STAGES, options_of, parse_override
from launcher.config.site_trees import site_trees
from launcher.errors import UserError

_HELP = """\
Print the script with which a shell completes verbs, options, overrides and runs.

examples:
  source <(slipway completion bash)                               in ~/.bashrc
  source <(slipway completion zsh)                                in ~/.zshrc
  slipway completion bash > /etc/bash_completion.d/slipway        for everyone

Then: slipway launch training=gpt3/<TAB>, cluster=<TAB>, training.model.optim.<TAB>, status <TAB>, ...
The script contains the verbs and options: print it again after an update.

exit code:
  0  printed
  2  there is no such shell
"""

_QUERY = "words"  # the printed scripts run `slipway completion words KIND WORD OTHERS…`

_TEMPLATES = Path(__file__).with_name("completions")

# The kinds of a verb's words, by the metavar of its positional argument.
_KINDS = {
    "OVERRIDE": "overrides",
    "OVERRIDE|KEY": "overrides",
    "INPUT": "overrides",
    "RUN": "runs",
    "SOURCE": "runs",
    "RECIPE": "recipes",
    "IMAGE": "images",
}


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "completion", run, text=_HELP)
    parser.add_argument("shell", choices=["bash", "zsh", _QUERY], metavar="bash|zsh")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    """Print the script, or the candidates that it requests."""
    if args.shell == _QUERY:
        if len(args.words) < 2:
            raise UserError("completion words: only the printed scripts use this, choose bash or zsh")
        kind, word, *others = args.words
        print("\n".join(_completions(kind, word, others)))
        return
    from launcher.cli.app import add_verbs  # late: it imports all modules of verbs

    script = (_TEMPLATES / f"slipway.{args.shell}").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser(prog="slipway")
    add_verbs(parser.add_subparsers())
    sys.stdout.write(script.replace("    # @commands", "\n".join(_branches("", parser))))


def _completions(kind: str, word: str, others: list[str]) -> list[str]:
    if kind == "runs":
        base = next(_find_values("--base-results-dir", others), Path("results"))
        return [name for name in runs(base) if name.startswith(word)]
    # As in `compose`, which would take far longer to import.
    ours = (Path(__file__).parents[1] / "conf").resolve()
    trees = [*_find_values("--config-dir", others), *site_trees(), ours]
    names: list[str] = []
    if kind in ("recipes", "images"):
        files = (file for root in trees for file in sorted(root.glob("image/*.yaml")))
        names += dict.fromkeys(file.stem for file in files if not file.stem.startswith("_"))
    if kind == "images":
        store = next(_find_values("--images-dir", others), Path("images"))
        names += sorted(file.name for file in store.glob("[!.]*.sqsh"))
    return [*(name for name in names if name.startswith(word)), *candidates(word, others, trees)]


def _find_values(option: str, words: list[str]) -> Iterator[Path]:
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            yield Path(words[index + 1]).expanduser()
        if word.startswith(f"{option}="):
            yield Path(word.partition("=")[2]).expanduser()


def _branches(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the branches of a `case` for a verb and the verbs of it, the same in both shells.

    `valued` are the options with a value. The kind of the other words is ``overrides``, ``runs``, ``recipes``
    or ``images`` with overrides after them, the words themselves, or nothing, which is files.
    """
    options: list[str] = []
    valued: list[str] = []
    kind = ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            kind = " ".join(action.choices)
            for verb, below in action.choices.items():
                yield from _branches(f"{name} {verb}".strip(), below)
        elif action.option_strings:
            options += [text for text in action.option_strings if text.startswith("--")]
            valued += action.option_strings if action.nargs != 0 else []
        elif action.help != argparse.SUPPRESS:
            known = " ".join(choice for choice in action.choices or () if choice != _QUERY)
            # Overrides come after the other words.
            kind = kind or known or _KINDS.get(str(action.metavar), "")
    some = f"|{'|'.join(valued)}|" if valued else ""
    yield f'    "{name}") options="{" ".join(options)}" valued="{some}" kind="{kind}" ;;'


Tree = dict[str, Any]

_DEPTH = 10  # files that build on each other


def candidates(word: str, others: Sequence[str], roots: Sequence[Path]) -> list[str]:
    """Return the words that begin with `word`: choices after ``GROUP=``, else keys, one level at a time.

    A key that has keys below it ends with a dot, one that takes a value with ``=``. Choices among the
    other words of the command line count.
    """
    match = re.fullmatch(r"(\+\+|\+|~)?([^=]*)(=?)(.*)", word, re.DOTALL)
    assert match is not None
    sign, key, equals, value = match[1] or "", match[2], match[3], match[4]
    if not equals:
        return [f"{sign}{name}" for name in _keys(key, others, roots, "" if sign == "~" else "=")]
    values = options_of(key, roots) if key in GROUPS else []
    if key == "stages":
        values = [f"[{stage}]" for stage in STAGES]
    return [f"{sign}{key}={option}" for option in values if option.startswith(value)]


def _keys(start: str, others: Sequence[str], roots: Sequence[Path], ending: str) -> list[str]:
    *parents, begun = start.split(".")
    node: Any = composed(others, roots)
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return []
    above = "".join(f"{parent}." for parent in parents)
    words = set()
    for name in (str(name) for name in node if str(name).startswith(begun)):
        words.add(f"{above}{name}{'.' if isinstance(node[name], dict) else ending}")
        if not parents and name in GROUPS:  # which is chosen as a whole too
            words.add(f"{name}{ending}")
    return sorted(words)


def composed(others: Sequence[str], roots: Sequence[Path]) -> Tree:
    """Return the tree that the words so far select; its values are not resolved."""
    chosen = {item.key: item.value for item in map(parse_override, others) if item.is_choice}
    root, choices = _root(roots)
    for group, choice in choices.items():
        _merge(root, {group: _file(f"{group}/{chosen.get(group) or choice}", roots, _DEPTH)})
    return root


def _root(roots: Sequence[Path]) -> tuple[Tree, dict[str, str]]:
    """Return the keys and choices of the root file, and of that behind it if it builds on that."""
    content, behind = _read("config", roots)
    root = _merge({}, content)
    defaults = root.pop("defaults", [])
    base, choices = _root(behind) if "config" in defaults else ({}, {})
    for default in defaults:
        for group, choice in default.items() if isinstance(default, dict) else ():
            choices[group.removeprefix("override ")] = choice
    return _merge(base, root), choices


def _file(name: str, roots: Sequence[Path], depth: int, own: Sequence[Path] | None = None) -> Tree:
    """Merge a file of a group, the first in `own` trees, into those that it builds on."""
    written, behind = _read(name, roots if own is None else own)
    merged: Tree = {}
    content = _merge({}, written)
    for default in content.pop("defaults", []):
        if isinstance(default, str) and default != "_self_" and depth:
            path, _, package = default.partition("@")
            path = path[1:] if path[0] == "/" else f"{name.rpartition('/')[0]}/{path}"
            below = _file(path, roots, depth - 1, behind if path == name else None)
            for part in reversed([] if package in ("", "_here_") else package.split(".")):
                below = {part: below}
            _merge(merged, below)
    return _merge(merged, content)


def _read(name: str, roots: Sequence[Path]) -> tuple[Tree, Sequence[Path]]:
    """Return the keys of the first file of a name, and the trees behind its own."""
    files = (number for number, root in enumerate(roots) if (root / f"{name}.yaml").is_file())
    number = next(files, None)
    if number is None:
        return {}, ()
    return _parse(roots[number] / f"{name}.yaml"), roots[number + 1 :]


@functools.cache
def _parse(path: Path) -> Tree:
    import yaml

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _merge(target: Tree, source: Tree) -> Tree:
    """Merge copies of the nodes of `source` into `target`; return it."""
    for name, value in source.items():
        if isinstance(value, dict):
            node = target.get(name)
            target[name] = _merge(node if isinstance(node, dict) else {}, value)
        else:
            target[name] = value
    return target


def runs(base: Path) -> Iterator[str]:
    """Yield the names of the runs below a directory, then of those in known trees, each once."""
    from launcher.runs.known_trees import remembered_trees
    from launcher.runs.paths import find_runs

    seen: set[str] = set()
    for tree in (base, *remembered_trees()):
        with contextlib.suppress(OSError):
            seen.update(names := [run.name for run in find_runs(tree) if run.name not in seen])
            yield from names
