"""Pydantic's errors in words for people. Imported only after a mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from launcher.attained import InvalidConstant
from launcher.errors import UserError, did_you_mean, nearest, one_line, shown
from launcher.secrecy import MASK, hidden
from launcher.slurm.sbatch_options import key_hint

_SEVERAL = "a list, such as [a, b]"
_KEYS = "keys below it, as in {key: value}"

# pydantic's types of error, by the beginning of their names: what was expected instead.
_EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "int_": lambda context: "a whole number",
    "float_": lambda context: "a number",
    "bool_": lambda context: "true or false",
    "string_type": lambda context: "text; a number needs quotes",
    "list_": lambda context: _SEVERAL,
    "dict_": lambda context: _KEYS,
    "model_": lambda context: _KEYS,
    "mapping_": lambda context: _KEYS,
    "finite_number": lambda context: "a finite number",
    "literal_error": lambda context: str(context["expected"]),
    "greater_than_equal": lambda context: f"{context['ge']:g} or more",
    "too_short": lambda context: f"at least {context['min_length']} of them",
}


class NumberForText(UserError):
    """A number where text is meant: how it was written decides."""

    def __init__(self, path: str, value: Any) -> None:
        super().__init__(f"{_set(path, value)}: expected text; a number needs quotes", key=path)
        self.path, self.value = path, value


def explain(detail: Any, model: type[BaseModel], path: str) -> UserError:
    """Turn an error of pydantic's into ours.

    Parameters
    ----------
    path
        The node that the model describes, such as ``training.trainer``; empty for the root.
    """
    # "[key]": a mapping's key, not its value, is wrong. Other words in brackets are forms of a value.
    location = [part for part in detail["loc"] if not str(part).startswith("[")]
    key = ".".join(str(part) for part in ([path] if path else []) + location)
    if detail["type"] == "extra_forbidden":
        near = did_you_mean(str(location[-1]), _fields_at(model, location[:-1]))
        if key.rpartition(".")[0] == "cluster":
            near = key_hint(str(location[-1])) or near
        return UserError(f"{one_line(key)}: there is no such key", key=key, hint=near)
    if detail["type"] == "missing":
        return UserError(f"{one_line(key)}: this key is needed", key=key)
    if detail["type"] == "number_for_text":
        return NumberForText(key, detail["input"])
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, InvalidConstant):  # of all that the key holds, one value
        key = f"{key}.{inner.key}"
        setting = _set(key, inner.value[0]) if inner.value else one_line(key)
        return UserError(f"{setting}: {inner.problem}", key=key)
    value = one_line(key) if "[key]" in detail["loc"] else _set(key, detail["input"])
    return UserError(f"{value}: {_told(detail)}", key=key, hint=_hint(detail))


def _set(key: str, value: Any) -> str:
    value = hidden(key, value)
    return f"{one_line(key)}={value if value == MASK else shown(value)}"


def _told(detail: Any) -> str:
    context = detail.get("ctx", {})
    if detail["type"] == "value_error":  # our own validators
        return str(context["error"])
    if detail["type"] == "string_unicode":
        return "not valid UTF-8"
    for beginning, words in _EXPECTED.items():
        if detail["type"].startswith(beginning):
            return f"expected {words(context)}"
    return str(detail["msg"][:1].lower() + detail["msg"][1:])


def _hint(detail: Any) -> str | None:
    if detail["type"] != "literal_error":
        return None
    near = nearest(str(detail["input"]), re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return f"did you mean {near[0]!r}?" if near else None


def _fields_at(model: type[BaseModel], location: list[Any]) -> Iterator[str]:
    """Return the keys that are valid in the node at `location` below `model`."""
    for part in location:
        if part not in model.model_fields:
            continue  # a name in a mapping of nodes
        model = next(_models_in(model.model_fields[part].annotation))
    yield from model.model_fields


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models_in(part)
