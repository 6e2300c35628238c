"""A recipe's configuration to the text of a Dockerfile. Pure: nothing is read but the templates."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import (
    BaseLoader,
    ChoiceLoader,
    Environment,
    FileSystemLoader,
    PrefixLoader,
    StrictUndefined,
    TemplateNotFound,
    TemplateSyntaxError,
)

from launcher.errors import UserError, check_directory, did_you_mean, nearest, one_line
from launcher.rendering.quoting import RawShell, one_per_line, quote

# In the wheel a directory, in a checkout a link.
TEMPLATE_DIR = (Path(__file__).parents[1] / "dockerfiles").resolve()
_SUFFIX = ".Dockerfile.j2"


def render_dockerfile(template: str, values: Mapping[str, Any], template_dir: Path | None = None) -> str:
    """Render a template of a recipe.

    Parameters
    ----------
    template
        Its name: ``nemo``.
    values
        What it may print; each version of ``versions`` must be asked for.
    template_dir
        A directory of the user's own, looked at before ours. A template there may start with
        ``{% extends "slipway/nemo.Dockerfile.j2" %}`` and override single blocks.

    Raises
    ------
    UserError
        If there is no such template, one of the user's is not valid, or it does not use a version.
    """
    if template_dir is not None:
        check_directory("--template-dir", template_dir)
    versions = _Versions(values["versions"])
    try:
        text = (
            _environment(template_dir)
            .get_template(f"{template}{_SUFFIX}")
            .render({**values, "versions": versions})
        )
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, TemplateNotFound) and error.name == f"{template}{_SUFFIX}":
            names = _names(template_dir)
            near = [f"did you mean {name!r}?" for name in nearest(template, names)]
            raise UserError(
                f"image.template={template!r}: there is no template {template}{_SUFFIX}",
                key="image.template",
                hint=" ".join([*near, f"valid: {', '.join(names)}"]),
            ) from error
        if template_dir is None:
            raise
        raise UserError(f"{_line_of(error, template_dir)}: this template is not valid: {error}") from error
    versions.check_used(template)
    return text


class _Versions(Mapping[str, str | None]):
    """The versions of a recipe, which know whether a template asked for them: a misspelt one is found."""

    def __init__(self, given: Mapping[str, str | None]) -> None:
        self._given = given
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> str | None:
        self._asked.add(name)
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def check_used(self, template: str) -> None:
        for name in self._given:
            if name not in self._asked:
                raise UserError(
                    f"image.versions.{one_line(name)}: the template {template} builds no such thing",
                    key=f"image.versions.{name}",
                    hint=did_you_mean(name, self._asked - {name}),
                )


def text(value: Any) -> RawShell:
    """Quote a value for an instruction of a Dockerfile, so that it arrives as it is.

    In double quotes a Dockerfile reads ``\\``, ``"`` and ``$``.
    """
    return RawShell('"' + re.sub(r'([\\"$])', r"\\\1", str(value)) + '"')


def _pairs(values: Mapping[str, Any], indent: int) -> RawShell:
    """Lay out what ENV and LABEL take, one name and its value on each line; the names were checked."""
    separator = " \\\n" + " " * indent
    return RawShell(separator.join(f"{key}={text(value)}" for key, value in values.items()))


def _gencode(archs: Iterable[int]) -> RawShell:
    """nvcc's words for the GPUs to compile for; the newest also as PTX, for those that come after it."""
    ordered = sorted(archs)
    words = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ordered]
    if ordered:
        words.append(f"-gencode=arch=compute_{ordered[-1]},code=compute_{ordered[-1]}")
    return RawShell(quote(" ".join(words)))


class _DockerfileEnvironment(Environment):
    @staticmethod
    def concat(parts: Iterable[str]) -> RawShell:
        """Join rendered pieces, as macros and blocks do: they were quoted before."""
        return RawShell("".join(parts))


@cache
def _environment(template_dir: Path | None) -> Environment:
    ours = FileSystemLoader(TEMPLATE_DIR)
    loaders: list[BaseLoader] = [ours, PrefixLoader({"slipway": ours})]
    if template_dir is not None:
        loaders.insert(0, FileSystemLoader(template_dir))
    environment = _DockerfileEnvironment(
        loader=ChoiceLoader(loaders),
        undefined=StrictUndefined,
        finalize=quote,  # no value reaches a RUN unquoted
        comment_start_string="{##",
        comment_end_string="##}",
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # a Dockerfile, not HTML
    )
    environment.filters |= {
        "one_per_line": one_per_line,
        "text": text,
        "pairs": _pairs,
        "gencode": _gencode,
        "raw": RawShell,  # for constants of a template: what the build is to expand
    }
    return environment


def _names(template_dir: Path | None) -> list[str]:
    folders = [TEMPLATE_DIR] if template_dir is None else [template_dir, TEMPLATE_DIR]
    files = {path.name.removesuffix(_SUFFIX) for folder in folders for path in folder.glob(f"*{_SUFFIX}")}
    return sorted(name for name in files if not name.startswith("_"))


def _line_of(error: Exception, template_dir: Path) -> str:
    """The innermost line of the user's own templates that an error came through."""
    if isinstance(error, TemplateSyntaxError):
        return f"{error.filename or template_dir}:{error.lineno}"
    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return next(
        (place for place in reversed(places) if place.startswith(str(template_dir))), str(template_dir)
    )
