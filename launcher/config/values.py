"""The types of single values: from YAML's and Hydra's to those that Slurm takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from launcher.attained import InvalidEntry, attained
from launcher.errors import UserError, did_you_mean, escape, nearest, setting
from launcher.slurm.notations import parse_time_limit
from launcher.slurm.queue_flags import Line as Line
from launcher.slurm.queue_flags import Option as Option
from launcher.slurm.queue_flags import Text as Text
from launcher.slurm.queue_flags import Whole as Whole
from launcher.slurm.queue_flags import as_text, as_whole
from launcher.slurm.sbatch_options import check_array, check_plugin_name, checked_name, key_hint
from slipway.common.section_types import one_line

# How long before the time limit Slurm can send a signal, in seconds: ``sbatch --signal``.
_LONGEST_WARNING = 65535


def matching(pattern: str, problem: str) -> AfterValidator:
    """Return a validator of a text, or of a list of texts, of this form."""

    def check(value: Any) -> Any:
        for text in [value] if isinstance(value, str) else value:
            if not re.fullmatch(pattern, text, re.ASCII):
                raise ValueError(problem)
        return value

    return AfterValidator(check)


def _validate_by(read: Callable[[Any], object]) -> AfterValidator:
    """Return a validator of values that `read` raises no error for."""

    def check(value: Any) -> Any:
        try:
            read(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value

    return AfterValidator(check)


def _drop_nulls(value: Any) -> Any:
    # The NeMo launcher's default is the list [null]; null is an empty list.
    if value is None:
        return []
    return [item for item in value if item is not None] if isinstance(value, list) else value


# Keys with values for a shell, or for a program.
AS_WRITTEN = re.compile(r"\b(env_(vars|expand)\.|(setup|srun_args|task_prefix|comment|argv)$)")
_HOME = re.compile(r"(?:~|\$HOME|\$\{HOME\})(?=/|$)")


def expand_home(path: str) -> str:
    """Return a path with the user's home in place of ``~`` or ``$HOME`` at its start."""
    return _HOME.sub(lambda _: str(Path.home()), path, count=1) if _HOME.match(path) else path


def map_texts(node: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return a configuration with all texts changed, by a function of the key and the text."""
    if isinstance(node, Mapping):
        start = f"{key}." if key else ""
        return {name: map_texts(child, change, f"{start}{name}") for name, child in node.items()}
    if isinstance(node, list | tuple):
        return [map_texts(child, change, key) for child in node]
    return change(key, node) if isinstance(node, str) else node


def expand_homes(node: Any) -> Any:
    """Return a configuration with the user's home expanded, except where a shell or program does that."""
    return map_texts(node, lambda key, text: text if AS_WRITTEN.search(key) else expand_home(text))


def _arguments(value: Any) -> Any:
    # The NeMo launcher's clusters have them as a list, its documents as one text.
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{str(error)[:1].lower()}{str(error)[1:]}") from error
    return _drop_nulls(value)


def _flag_value(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, (int, float, str)):
        raise ValueError("expected text, a number, or true for a flag without a value")
    return one_line(as_text(value))


def _check_flag_array(flags: dict[str, bool | str | None]) -> dict[str, bool | str | None]:
    try:
        check_array(flags.get("array"))
    except ValueError as error:
        raise InvalidEntry("array", str(error), flags["array"]) from error
    return flags


def _seconds_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= _LONGEST_WARNING):
        return value
    raise ValueError(f"expected auto, or seconds from 1 to {_LONGEST_WARNING}")


def _memory(value: str) -> str:
    """Slurm's notation, ``64G``; people write ``64GB`` too."""
    match = re.fullmatch(r"(\d+)([KMGT])?(B)?", value, re.ASCII | re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise ValueError("not an amount of memory; valid: 64G, 64GB, 65536 (megabytes) or 0 (all)")
    return value[:-1] if match[3] else value


def _exclusive(value: Any) -> Any:
    if value in ("user", "mcs", "topo"):
        return value
    if not isinstance(value, (bool, str)) or str(value).lower() not in ("true", "false"):
        raise ValueError("expected true or false, or user, mcs or topo")
    return str(value).lower() == "true"


def _unique_output_dir(value: Any) -> Any:
    if str(value).lower() in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        return value
    raise ValueError("expected true or false; where it is not set, the variable UNIQUE_OUTPUT_DIR decides")


def _require_slurm(value: str | None) -> str | None:
    if value not in (None, "bcm"):
        raise ValueError("Slipway launches on Slurm, bcm; cluster=local runs on this machine without it")
    return value


def _refuse_debugging(value: bool) -> bool:
    if value:
        raise ValueError("there is no such mode; dry_run=True shows what would be submitted")
    return value


def _refuse_bcp(value: Any) -> Any:
    if value is not None:
        raise ValueError("for Base Command Platform; env_files={WANDB_API_KEY: FILE} reads a key in the job")
    return value


def _gpu_count(value: Any) -> Any:
    typed = re.fullmatch(r"([A-Za-z][\w.-]*):(\d+)", value) if isinstance(value, str) else None
    if typed:
        raise ValueError(
            f"expected a whole number; cluster.gres=gpu:{value} and cluster.gpu_request=gres ask for a type"
        )
    return as_whole(value)


def _positive(value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError("expected a number above 0")
    return value


def _utilization(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"expected a part of the GPUs' peak, above 0 and up to 1{_hint_if_percent(value)}")
    return value


def _share(value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"expected a part of the whole, from 0 to below 1{_hint_if_percent(value)}")
    return value


def _hint_if_percent(value: float) -> str:
    return f"; did you mean {value / 100:g}?" if 1 <= value <= 100 else ""


LineList = Annotated[list[Line], BeforeValidator(_drop_nulls)]
Arguments = Annotated[list[Line], BeforeValidator(_arguments)]
Margin = Annotated[int | Literal["auto"], BeforeValidator(_seconds_or_auto)]
TimeLimit = Annotated[Text, _validate_by(parse_time_limit)]
Constants = Annotated[dict[str, Any], _validate_by(attained)]
Pattern = Annotated[Text, _validate_by(re.compile)]
Utilization = Annotated[float, AfterValidator(_utilization)]
Share = Annotated[float, AfterValidator(_share)]
GpuCount = Annotated[int, BeforeValidator(_gpu_count)]
Positive = Annotated[float, AfterValidator(_positive)]
Memory = Annotated[Text, AfterValidator(_memory)]
FlagName = Annotated[Line, AfterValidator(checked_name)]
Flags = Annotated[
    dict[FlagName, Annotated[bool | str | None, BeforeValidator(_flag_value)]],
    AfterValidator(_check_flag_array),
]
PluginFlags = dict[
    Annotated[Line, AfterValidator(check_plugin_name)],
    Annotated[bool | str | None, BeforeValidator(_flag_value)],
]
UniqueOutputDir = Annotated[bool, BeforeValidator(_unique_output_dir)]
Exclusive = Annotated[bool | Literal["user", "mcs", "topo"], BeforeValidator(_exclusive)]

# The NeMo launcher's keys that say nothing here: their harmless values alone.
NemoClusterType = Annotated[Line | None, AfterValidator(_require_slurm)]
NemoSecret = Annotated[Any, AfterValidator(_refuse_bcp)]
Debug = Annotated[bool, AfterValidator(_refuse_debugging)]


# --- pydantic's errors in words

_KEYS = "keys below it, as in {{key: value}}"

# pydantic's types of error, by the beginning of their names: the expected value, with pydantic's context.
_EXPECTED = {
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_type": "text",
    "list_": "a list, such as [a, b]",
    "dict_": _KEYS,
    "model_": _KEYS,
    "dataclass_": _KEYS,
    "mapping_": _KEYS,
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "greater_than_equal": "{ge:g} or more",
    "too_short": "at least {min_length} of them",
}


# Of more valid keys a mistake lists the nearest few.
MOST_KEYS = 12


class NumberForText(UserError):
    """A number where text is meant: how it was written decides."""

    def __init__(self, path: str, value: Any) -> None:
        super().__init__(f"{setting(path, value)}: expected text; a number needs quotes", key=path)
        self.path, self.value = path, value


def explain(detail: Any, model: type[BaseModel], path: str) -> UserError:
    """Turn an error of pydantic's into ours; `path` is the node that the model describes."""
    # "[key]": a mapping's key, not its value, is wrong. Other words in brackets are forms of a value.
    location = [part for part in detail["loc"] if not str(part).startswith("[")]
    key = ".".join(str(part) for part in ([path] if path else []) + location)
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        near = did_you_mean(str(location[-1]), _fields_at(model, location[:-1]), MOST_KEYS)
        if key.rpartition(".")[0] == "cluster":
            near = key_hint(str(location[-1])) or near
        return UserError(f"{escape(key)}: there is no such key", key=key, hint=near)
    if detail["type"] == "missing":
        return UserError(f"{escape(key)}: this key is needed", key=key)
    if detail["type"] == "number_for_text":
        return NumberForText(key, detail["input"])
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, InvalidEntry):
        key = f"{key}.{inner.key}"
        start = setting(key, inner.value[0]) if inner.value else escape(key)
        return UserError(f"{start}: {inner.problem}", key=key)
    value = escape(key) if "[key]" in detail["loc"] else setting(key, detail["input"])
    valid = re.findall(r"'([^']*)'", detail["ctx"]["expected"]) if detail["type"] == "literal_error" else []
    meant = nearest(str(detail["input"]), valid)
    hint = f"did you mean {meant[0]!r}?" if meant else None
    return UserError(f"{value}: {_describe_problem(detail)}", key=key, hint=hint)


def _describe_problem(detail: Any) -> str:
    context = detail.get("ctx", {})
    if detail["type"] == "value_error":  # our own validators
        return str(context["error"])
    if detail["type"] == "string_unicode":
        return "not valid UTF-8"
    if detail["type"] == "string_type" and isinstance(detail["input"], (int, float)):
        return "expected text; a number needs quotes"
    for beginning, words in _EXPECTED.items():
        if detail["type"].startswith(beginning):
            return f"expected {words.format_map(context)}"
    return str(detail["msg"][:1].lower() + detail["msg"][1:])


def fields_of(model: type) -> dict[str, FieldInfo]:
    """Return the keys of a node with a model of pydantic, or a dataclass."""
    if issubclass(model, BaseModel):
        return model.model_fields
    hints = get_type_hints(model, include_extras=True)
    return {name: FieldInfo.from_annotation(hint) for name, hint in hints.items()}


def _fields_at(model: type, location: list[Any]) -> Iterator[str]:
    """Return the keys that are valid in the node at `location` below `model`."""
    for part in location:
        if part not in fields_of(model):
            continue  # a name in a mapping of nodes
        model = next(models_in(fields_of(model)[part].annotation))
    yield from fields_of(model)


def models_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for late in getattr(annotation, "__metadata__", ()):  # of a stage's node
        yield from models_in(getattr(late, "model", None))
    for part in getattr(annotation, "__args__", ()):
        yield from models_in(part)
