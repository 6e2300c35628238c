"""Types, rules and :func:`load` of the sections of a configuration that a job reads.

A job fills the classes of `sections` by :func:`load`. The launcher checks the same classes by pydantic, which
knows their annotations, and takes a :class:`Rule` by the schema that it gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from slipway.common.errors import UserError, suggest

T = TypeVar("T")


class Section:
    """A mapping whose keys are the fields of a dataclass; no others are valid."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True)
class Rule:
    """A condition on a value besides its type; metadata for `Annotated`.

    Attributes
    ----------
    read
        Converts a written value to the type's, or raises ValueError with the valid values.
    write
        The inverse, where the two differ.
    ge
        The smallest number that is valid, for the reference page.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None
    ge: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the schema by which pydantic applies the rule before it looks at the type."""
        function = {"type": "no-info", "function": self.read}
        schema = {"type": "function-before", "function": function, "schema": handler(source)}
        if self.write is not None:
            schema["serialization"] = {"type": "function-plain", "function": self.write}
        return schema


def load(cls: type[T], node: Any, where: str) -> T:
    """Fill a dataclass with the values of a mapping; a null is the default.

    Parameters
    ----------
    cls
        A :class:`Section`.
    node
        The mapping.
    where
        Its key, for messages.

    Raises
    ------
    UserError
        Naming the key, its value, what is valid and the nearest spelling.
    """
    if not isinstance(node, Mapping):
        raise _make_error(where, node, "expected keys below it, as in {key: value}")
    hints, values = get_type_hints(cls, include_extras=True), {}
    valid = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for key in node:
        if key not in valid:
            near = suggest(str(key), valid) or f"; valid are {', '.join(valid)}"
            raise UserError(f"{where}.{key}: there is no such key{near}")
    for name, item in valid.items():
        if node.get(name) is not None:
            values[name] = _value(hints[name], node[name], f"{where}.{name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise UserError(f"{where}.{name} is missing: it has no default")
    return cls(**values)


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
_WORDS |= {list: "a list, such as [a, b]", dict: "keys below it, as in {key: value}"}


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return a value in the form of its type."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        for rule in arguments[1:]:
            try:
                value = rule.read(value)
            except ValueError as error:
                raise _make_error(where, value, str(error)) from None
        return _value(arguments[0], value, where)
    if origin is Any or (value is None and type(None) in arguments):
        return value
    if origin is Literal:
        if value not in arguments:
            near = suggest(str(value), arguments)
            raise _make_error(where, value, f"expected one of {', '.join(arguments)}{near}")
        return value
    if is_dataclass(hint):
        return load(hint, value, where)  # type: ignore[arg-type]
    if origin not in _WORDS:
        # A union: of a type and None, or of text, keys and None.
        options = [option for option in arguments if option is not type(None)]
        return _value(options[-1 if isinstance(value, Mapping) else 0], value, where)
    types: Any = (int, float) if origin is float else origin
    if not isinstance(value, types) or (origin is not bool and isinstance(value, bool)):
        raise _make_error(where, value, f"expected {_WORDS[origin]}")
    if origin is list:
        return [_value(arguments[0], item, f"{where}.{number}") for number, item in enumerate(value)]
    if origin is dict and arguments:
        return {str(key): _value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return value


def _make_error(where: str, value: Any, problem: str) -> UserError:
    # Addresses may have what opens them.
    return UserError(f"{where}={re.sub('://[^,]*', '://...', repr(value))}: {problem}")


def one_line(value: Any) -> Any:
    """Return a value that can be part of a line of a script, if it is a text."""
    if isinstance(value, str) and re.search(r"[\0\n\r]", value):
        what = "a NUL character" if "\0" in value else "a line break"
        raise ValueError(f"{what} cannot be part of a value in a job script")
    return value


def read_text(value: Any) -> Any:
    """Return a text that is not empty, and can be part of a line."""
    if value == "":
        raise ValueError("expected text, and it is empty")
    return one_line(value)


def read_path(value: Any) -> Any:
    """Return the absolute path of a text or path."""
    if not isinstance(value, str | Path):
        raise ValueError("expected text, which is a path; a number needs quotes")
    return Path(read_text(str(value))).absolute()


def _whole(least: int, value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value, re.ASCII):
        value = int(value)
    if value is not None and (type(value) is not int or value < least):
        raise ValueError(f"expected a whole number, {least} or more")
    return value


def whole(least: int) -> Rule:
    """Return the rule for a whole number of at least `least`."""
    return Rule(partial(_whole, least), ge=least)


def _share_or_count(of: str, is_zero_valid: bool, value: Any) -> Any:
    """Return a share below 1, or a whole number; YAML 1.1 leaves some numbers as text, such as 1e-5."""
    if value is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        is_valid = 0 < number < 1 or (number >= 1 and number.is_integer()) or (is_zero_valid and number == 0)
        if is_valid and not isinstance(value, bool):
            return int(number) if number >= 1 else number
    raise ValueError(f"expected a share of {of} below 1, such as 0.001, or a whole number of them")


def share_or_count(of: str, is_zero_valid: bool) -> Rule:
    """Return the rule for a share or a number of something."""
    read = partial(_share_or_count, of, is_zero_valid)
    return Rule(read, read)


def _sha256(value: Any) -> Any:
    if value is not None and not re.fullmatch("[0-9a-fA-F]{64}", str(value)):
        raise ValueError("not a SHA-256, which has 64 hexadecimal digits")
    return value and str(value).lower()


def make_list(value: Any) -> Any:
    """Return a list of what may be written as a single value, or as null."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _path_or_keys(value: Any) -> Any:
    if value is None or isinstance(value, str | dict):
        return value
    raise ValueError("expected the path of a YAML file, or keys below it")


Line = Annotated[str, Rule(read_text)]
Place = Annotated[Path, Rule(read_path, str)]
Sha256 = Annotated[str | None, Rule(_sha256)]
Count = Annotated[int, whole(1)]
MaybeCount = Annotated[int | None, whole(1)]
PathOrKeys = Annotated[str | dict[str, Any] | None, Rule(_path_or_keys)]
ModelType = Literal["gpt", "t5", "bert"]
