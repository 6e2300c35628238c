"""The one place that makes shell text of values, and the Jinja environment that applies it."""

from __future__ import annotations

import functools
import re
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import (
    BaseLoader,
    ChoiceLoader,
    Environment,
    FileSystemLoader,
    PrefixLoader,
    StrictUndefined,
    TemplateSyntaxError,
)

from launcher.errors import UserError
from launcher.plan import REFERENCE

# Characters that sbatch's own parser of #SBATCH lines and bash both read literally.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
# A reference that is a part of a path like PATH, or not: with the colon that separates it.
_IN_PATH = re.compile(rf"(?P<before>:)?(?P<variable>{REFERENCE})(?P<after>:(?!\$))?")


class RawShell(str):
    """Text that is meant to be expanded in the job, such as ``${SLURM_JOB_ID}``.

    Only our own constants, and text that is quoted already, are wrapped in it. Everything else is quoted:
    being a subclass, and not an alias, is what protects.
    """

    __slots__ = ()


def quote(value: Any) -> str:
    """Quote a value for bash, unless it is `RawShell`; raise UserError for a line break or NUL.

    This is Jinja's `finalize`: every value that a template prints passes through it.
    """
    if isinstance(value, RawShell):
        return value
    return shlex.quote(_checked(str(value)))


def one_per_line(arguments: Iterable[Any], indent: int = 4) -> RawShell:
    """Quote an argument vector and lay it out as continued lines, one argument on each."""
    separator = " \\\n" + " " * indent
    return RawShell(separator.join(quote(argument) for argument in arguments))


def expand(value: str, name: str) -> RawShell:
    """Quote a value for bash, except for its references to variables; `name` is the variable that it sets.

    A colon between a reference and other parts is left out with the part that is not set, as an empty part of
    a path is the current directory. Any other variable that is not set ends the task, by its name.
    """
    parts, end = [], 0
    for match in _IN_PATH.finditer(value):
        parts.append(quote(value[end : match.start()]) if match.start() > end else "")
        variable, end = match["braced"] or match["name"], match.end("variable")
        if match["before"]:
            parts.append(f'"${{{variable}:+:${variable}}}"')
        elif match["after"] and match.start() == 0:
            end = match.end()
            parts.append(f'"${{{variable}:+${variable}:}}"')
        else:
            parts.append(f'"${{{variable}?env_expand.{name}: not set in the task}}"')
    return RawShell("".join(parts) + (quote(value[end:]) if value[end:] else ""))


def quote_header(value: Any) -> str:
    """Quote a value for an ``#SBATCH`` line.

    Slurm reads these lines itself: quotes as in a shell, but a backslash escapes everywhere, inside single
    quotes too, and an unquoted ``#`` starts a comment (src/sbatch/opt.c, `_get_argument`).
    """
    text = _checked(str(value))
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def escape_pattern(path: str) -> str:
    """Keep Slurm from reading ``%`` in a directory's name as one of its file name patterns.

    Raise UserError for a backslash: Slurm drops it, and then no longer reads patterns
    (src/slurmd/common/fname.c).
    """
    if "\\" in path:
        raise UserError(
            f"{path!r} cannot hold a job's log: Slurm takes a backslash in its path for an escape",
            key="base_results_dir",
        )
    return path.replace("%", "%%")


def _checked(text: str) -> str:
    if "\0" in text or "\n" in text or "\r" in text:
        raise UserError(f"{text!r}: a line break or NUL cannot be part of a value in a job script")
    return text


class _QuotingEnvironment(Environment):
    @staticmethod
    def concat(parts: Iterable[str]) -> RawShell:
        """Join rendered pieces, as ``super()``, macros and set blocks do: they were quoted before."""
        return RawShell("".join(parts))


@functools.cache
def template_environment(ours: Path, template_dir: Path | None, **filters: Callable[..., Any]) -> Environment:
    """Return an environment for templates of a directory of ours, and of the user's own before them."""
    loader = FileSystemLoader(ours)
    loaders: list[BaseLoader] = [loader, PrefixLoader({"slipway": loader})]
    if template_dir is not None:
        loaders.insert(0, FileSystemLoader(template_dir))
    environment = _QuotingEnvironment(
        loader=ChoiceLoader(loaders),
        undefined=StrictUndefined,
        finalize=quote,  # no value reaches a script, or a RUN, unquoted
        # Jinja's own {# would swallow bash's ${#array[@]}.
        comment_start_string="{##",
        comment_end_string="##}",
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # shell or a Dockerfile, not HTML
    )
    environment.filters |= {"one_per_line": one_per_line, "expand": expand, **filters}
    return environment


@contextmanager
def blaming_templates(template_dir: Path | None) -> Iterator[None]:
    """Turn an error while the user's own templates are rendered into a `UserError` that names the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if template_dir is None:
            raise
        raise UserError(f"{_line_of(error, template_dir)}: this template is not valid: {error}") from error


def _line_of(error: Exception, template_dir: Path) -> str:
    """Return the innermost line of the user's own templates in an error's traceback."""
    if isinstance(error, TemplateSyntaxError):
        return f"{error.filename or template_dir}:{error.lineno}"
    lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if line.startswith(str(template_dir))), str(template_dir))
