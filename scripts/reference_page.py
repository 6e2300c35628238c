"""Write docs/reference.md: every key that Slipway reads strictly, from the schema and the tree.

    python -m scripts.reference_page [--check]

Names and types are the schema's, defaults and meanings those of the file that states a key first: its comment
at the end of the line, or else the one above the lines that it stands with.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from launcher.config.compose import CONF_DIR  # noqa: E402
from launcher.config.overrides import STAGES  # noqa: E402
from launcher.config.schema import RunConfig  # noqa: E402
from launcher.config.sources import Sources, TreeFile  # noqa: E402
from launcher.config.values import Arguments, fields_of, models_in  # noqa: E402
from launcher.images.recipes import GROUP as IMAGE  # noqa: E402
from launcher.images.recipes import RecipeConfig  # noqa: E402
from launcher.slurm.queue_flags import Words  # noqa: E402
from scripts.generated_pages import main  # noqa: E402

_INTRODUCTION = """\
# Configuration reference

<!-- Written by scripts/reference_page.py from the schema and the comments in conf/: change those. -->

The keys that Slipway reads strictly: an unknown one, or a value of another type, is refused. Defaults are
those of the file that the others of its kind build on; `slipway show` prints what a value is for a launch,
and which file or override decided it. What is below `training.trainer`, `training.exp_manager` and
`training.model` is NeMo's: `slipway show training.model` lists what a size sets. The keys below `image` are a
recipe's ([recipes](recipes.md)): `slipway image render nemo image.flavor=dev`.
"""

_WORDS = {str: "text", Path: "text", int: "whole number", float: "number"}
_WORDS |= {bool: "true or false", type(None): "null"}
# Types of keys whose validators take more than the type of their values.
_WIDER = {
    get_args(Words)[1]: "text or list of text or null",
    get_args(Arguments)[1]: "text or list of text",
}


@dataclass(frozen=True)
class Place:
    """The place where a key is stated first."""

    file: TreeFile
    line: int
    lines: list[str]

    @property
    def default(self) -> str:
        """Return the value as YAML in one line, or nothing where keys are below."""
        text = self.lines[self.line - 1].partition(":")[2]
        return _without_comment(text).strip()

    @property
    def meaning(self) -> str:
        return _comment(self.lines[self.line - 1]) or " ".join(self.above)

    @property
    def above(self) -> list[str]:
        """Return the comment above the paragraph of lines with the key; a file's first is about the file."""
        indent = _indent(self.lines[self.line - 1])
        number = self.line - 2
        while number >= 0 and self.lines[number].strip() and _indent(self.lines[number]) >= indent:
            if self.lines[number].lstrip().startswith("#") and _indent(self.lines[number]) == indent:
                break
            number -= 1
        found: list[str] = []
        while number >= 0 and self.lines[number].lstrip().startswith("#"):
            found.insert(0, self.lines[number].strip().lstrip("# "))
            number -= 1
        return found if number >= 0 else []


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _comment(line: str) -> str:
    return line[len(_without_comment(line)) :].strip().lstrip("# ")


def _without_comment(line: str) -> str:
    """Return a line up to the ` #` outside quotes."""
    found = re.match(r"""(?:"[^"]*"|'[^']*'|(?!\s#)[^"'])*""", line)
    return found[0] if found else line


class Page:
    """A page, section by section: a node, then each one below it that has keys of its own."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def section(self, path: str, model: type) -> Iterator[str]:
        yield f"## `{path}`\n" if path else "## The root\n"
        place = self._place(path) if path else None
        about = place.above if place and not place.default else []
        if about:
            yield f"{_cell(' '.join(about))}\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        below = {}
        for name, field in fields_of(model).items():
            inner = _model(field.annotation)
            if inner is not None and get_origin(field.annotation) is dict:
                # Of a mapping the names are the user's own: the keys below one of them.
                yield self._row(f"{path}.{name}", name, field)
                below[f"{path}.{name}.NAME"] = inner
            elif inner is not None:
                below[f"{path}.{name}" if path else name] = inner
            else:
                yield self._row(f"{path}.{name}" if path else name, name, field)
        yield ""
        for inner_path, inner in below.items():
            yield from self.section(inner_path, inner)

    def _row(self, path: str, name: str, field: FieldInfo) -> str:
        place = self._place(path)
        if place is None:
            default, meaning = "", ""
            if not field.is_required():
                default = yaml.safe_dump(field.default, default_flow_style=True).split("\n")[0]
                meaning = field.description or ""
        else:
            default, meaning = place.default, place.meaning
        needed = default == "???"
        shown = "needed" if needed else f"`{default}`" if default else ""
        kind = next((_WIDER[item] for item in field.metadata if item in _WIDER), _type(field.annotation))
        return f"| `{name}` | {kind}{_limits(field)} | {shown} | {_cell(meaning)} |"

    def _place(self, path: str) -> Place | None:
        first = self._sources.first(path)
        if first is None:
            return None
        return Place(first.file, first.line, first.file.path.read_text(encoding="utf-8").splitlines())


def _cell(text: str) -> str:
    """Return text escaped for a table or a paragraph: Markdown and HTML leave it as it is."""
    for special in ("|", "<", "*"):
        text = text.replace(special, f"\\{special}")
    return text.removesuffix(".") if "." not in text[:-1] else text


def _model(annotation: Any) -> type | None:
    """Return the model of a node, or of the nodes in a mapping; entries of a list have no section."""
    return None if get_origin(annotation) is list else next(models_in(annotation), None)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(argument) for argument in arguments))
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping to {_type(arguments[1])}"
    if origin is tuple:
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "the keys below"
    if is_dataclass(annotation):
        return "text or mapping"
    return _WORDS.get(annotation, "mapping" if annotation is dict else "anything")


def _limits(field: FieldInfo) -> str:
    smallest = next((item.ge for item in field.metadata if hasattr(item, "ge")), None)
    return "" if smallest is None else f", {smallest} or more"


def page() -> str:
    """Return the whole page: the keys of a launch, and those of an image."""
    launch = Page(Sources([f"stages=[{','.join(STAGES)}]"], [CONF_DIR]))
    image = Page(Sources([], [CONF_DIR], primary=f"{IMAGE}/nemo"))
    return "\n".join([_INTRODUCTION, *launch.section("", RunConfig), *image.section(IMAGE, RecipeConfig)])


if __name__ == "__main__":
    sys.exit(main("reference.md", lambda _: page()))
