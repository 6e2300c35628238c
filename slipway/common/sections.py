"""The sections of a configuration that a job reads: their keys, types, rules and defaults, declared once.

A job fills the classes by :func:`load`. The launcher checks the same classes by pydantic, which knows their
annotations, and takes a :class:`Rule` by the schema that it gives. What each key means is said in `conf/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
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


def _text(value: Any) -> Any:
    if value == "":
        raise ValueError("expected text, and it is empty")
    return one_line(value)


def _path(value: Any) -> Any:
    if not isinstance(value, str | Path):
        raise ValueError("expected text, which is a path; a number needs quotes")
    return Path(_text(str(value))).absolute()


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


def _make_list(value: Any) -> Any:
    """Return a list of what may be written as a single value, or as null."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _path_or_keys(value: Any) -> Any:
    if value is None or isinstance(value, str | dict):
        return value
    raise ValueError("expected the path of a YAML file, or keys below it")


Line = Annotated[str, Rule(_text)]
Place = Annotated[Path, Rule(_path, str)]
Sha256 = Annotated[str | None, Rule(_sha256)]
Count = Annotated[int, whole(1)]
MaybeCount = Annotated[int | None, whole(1)]
PathOrKeys = Annotated[str | dict[str, Any] | None, Rule(_path_or_keys)]
ModelType = Literal["gpt", "t5", "bert"]
Phase = Literal["fetch", "tokenize", "merge"]
SourceFormat = Literal["auto", "txt", "jsonl", "parquet", "wikipedia", "tar"]


# --- data_preparation

# Of URLs of sources (slipway/corpus/remotes.py).
SCHEMES = ("https", "http", "s3")
# datatrove's filters (slipway/corpus/cleaning.py).
FILTERS = (
    *("gopher_quality", "gopher_repetition", "c4_quality", "c4_paragraph"),
    *("fineweb_quality", "regex", "language", "fasttext"),
)
# Part of the names of files.
_SPLIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)


def _address(value: Any) -> Any:
    scheme, separator, _ = str(value).partition("://")
    if separator and scheme not in SCHEMES:
        hint = "; a local file is named by its path" if scheme == "file" else suggest(scheme, SCHEMES)
        raise ValueError(f"no source can be read by {scheme}; valid: {', '.join(SCHEMES)}, or a path{hint}")
    return _text(value)


def _input(value: Any) -> Any:
    if isinstance(value, str):
        return {"path": _address(value)}
    if isinstance(value, Mapping) and (value.get("path") is None) is (value.get("url") is None):
        raise ValueError("expected either `url` or `path`")
    return value


@dataclass(frozen=True)
class Input(Section):
    """An entry of `inputs`; a text alone is its path or address.

    Attributes
    ----------
    path, url
        A path, glob, directory, or ``https://`` or ``s3://`` URL.
    sha256
        The expected digest of a single file.
    format, text_key
        In place of the preparation's; None takes those.
    name
        The name for the manifest, in place of the location.
    """

    path: Annotated[str, Rule(_address)] | None = None
    url: Annotated[str, Rule(_address)] | None = None
    sha256: Sha256 = None
    format: Annotated[SourceFormat | None, Rule(lambda value: None if value == "auto" else value)] = None
    text_key: Line | None = None
    name: Line | None = None

    @property
    def location(self) -> str:
        return self.path or self.url or ""

    def to_config(self) -> str | dict[str, Any]:
        """Return the entry as one writes it: a path alone, or the keys that are set."""
        node = {name: value for name, value in vars(self).items() if value is not None}
        return node if len(node) > 1 or self.path is None else self.path


def _filter(value: Any) -> Any:
    if isinstance(value, str):
        value = {value: None}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError("expected the name of a filter, or {NAME: {OPTION: VALUE}}")
    ((name, options),) = value.items()
    if not isinstance(options, Mapping | None):
        raise ValueError("expected the name of a filter, or {NAME: {OPTION: VALUE}}")
    if name not in FILTERS:
        valid = ", ".join(FILTERS)
        raise ValueError(f"there is no filter {name}; valid are {valid}{suggest(str(name), FILTERS)}")
    options = dict(options or {})
    if isinstance(options.get("model"), str):
        options["model"] = str(_path(options["model"]))
    return {"name": name, "options": options}


@dataclass(frozen=True)
class Filter(Section):
    """A quality filter of datatrove by its name here, and its options."""

    name: str
    options: dict[str, Any]

    def to_config(self) -> str | dict[str, Any]:
        """Return the filter as one writes it."""
        return {self.name: self.options} if self.options else self.name


@dataclass(frozen=True)
class MinHash(Section):
    """The near duplicates that are dropped: see datatrove's `MinhashConfig`.

    `language` is the code of a language whose words datatrove's tokenizer shall find; None takes the text
    between spaces.
    """

    ngram: Count = 5
    buckets: Count = 14
    hashes_per_bucket: Count = 8
    language: Line | None = None


def _minhash(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


@dataclass(frozen=True)
class Deduplication(Section):
    """The duplicate documents that are dropped."""

    exact: bool = False
    minhash: Annotated[MinHash | None, Rule(_minhash)] = None


@dataclass(frozen=True)
class TokenizerSource(Section):
    """The origin of a tokenizer that is neither in `tokenizer_dir` already nor trained."""

    file: Place | None = None
    url: Line | None = None
    sha256: Sha256 = None
    vocab_url: Line | None = None
    vocab_sha256: Sha256 = None
    merges_url: Line | None = None
    merges_sha256: Sha256 = None
    end_of_document: Line | None = None


def _inputs(value: Any) -> Any:
    if value == []:
        raise ValueError("expected at least one path, glob or URL, or mapping with `url` or `path`")
    return [value] if isinstance(value, str) else value


def _splits(value: Any) -> Any:
    if not isinstance(value, Mapping) or not value:
        return value or None
    for name, share in value.items():
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        if not is_share or not _SPLIT.fullmatch(str(name)):
            raise ValueError("expected names and shares, such as {train: 0.98, validation: 0.01, test: 0.01}")
    if abs(sum(value.values()) - 1) > 1e-9:
        raise ValueError(f"the shares are {sum(value.values()):g} in all, and must be 1")
    return {str(name): float(share) for name, share in value.items()}


@dataclass(frozen=True, kw_only=True)
class DataPreparation(Section):
    """The node `data_preparation`: sources to a tokenizer and Megatron's .bin/.idx."""

    inputs: Annotated[list[Annotated[Input, Rule(_input, Input.to_config)]], Rule(_inputs)]
    pattern: Line = "*"
    format: SourceFormat = "auto"
    text_key: Line = "text"
    filters: list[Annotated[Filter, Rule(_filter, Filter.to_config)]] = field(default_factory=list)
    deduplicate: Deduplication = Deduplication()
    tokenizer_dir: Place
    # The 256 bytes and the end-of-text token, at least.
    vocab_size: Annotated[int | None, whole(257)] = None
    tokenizer: TokenizerSource = TokenizerSource()
    append_eod: bool = True
    splits: Annotated[dict[str, float] | None, Rule(_splits)] = None
    output_prefix: Place
    replace: bool = False
    work_dir: Place
    shard_bytes: Annotated[int, whole(1024)] = 1 << 26
    tasks: Count = 1
    workers: Count = 2
    phase: Phase | None = None
    on_error: Literal["raise", "skip"] = "raise"
    max_errors: Annotated[float, share_or_count("the documents", is_zero_valid=True)] = 0.001
    max_files: MaybeCount = None
    max_bytes: MaybeCount = None
    max_document_bytes: Count = 1 << 32
    max_expansion: Count = 100
    download_timeout: Count = 60
    seed: Annotated[int, whole(0)] = 1234


# --- conversion

Target = Literal["huggingface", "slipway", "safetensors", "nemo"]
WeightsFormat = Literal["auto", "slipway", "huggingface", "megatron_lm", "dcp", "deepspeed"]
WeightType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TrainedRun(Section):
    """The run that a checkpoint is from."""

    run: Line | None = None
    directory: Place | None = None


@dataclass(frozen=True)
class ConversionCheck(Section):
    """The comparison of a converted model with ours."""

    enabled: bool = False
    text: Place | None = None
    sequences: Count = 8


@dataclass(frozen=True, kw_only=True)
class Conversion(Section):
    """The node `conversion`: weights in one format to weights in another.

    `model_type` and `training` describe the training that the weights are from, where the launcher knows it.
    """

    source: Place | None = None
    step: Annotated[int | None, whole(0)] = None
    source_format: WeightsFormat = "auto"
    to: Target
    output: Place
    dtype: WeightType | None = None
    shard_bytes: Count = 5_000_000_000
    tokenizer_dir: Place | None = None
    model: PathOrKeys = None
    model_type: ModelType | None = None
    training: TrainedRun | None = None
    check: ConversionCheck = ConversionCheck()
    every: MaybeCount = None


# --- evaluation


def _texts(value: Any) -> Any:
    """Return the entries of a blend as text, which may have been written as numbers."""
    return value and [str(item) if isinstance(item, int | float) else item for item in _make_list(value)]


def _task(value: Any) -> Any:
    """Return the path of a task's own file, or the name of one that comes with lm-eval."""
    return str(_path(value)) if str(value).endswith((".yaml", ".yml")) else value


@dataclass(frozen=True)
class LayoutSizes(Section):
    """The parallel sizes of an evaluation; ``None`` is the training's."""

    tensor: MaybeCount = None
    pipeline: MaybeCount = None
    virtual: MaybeCount = None
    context: MaybeCount = None


@dataclass(frozen=True)
class Perplexity(Section):
    """The held-out loss of an evaluation, by our own trainer."""

    enabled: bool = True
    batches: MaybeCount = None
    split: Literal["validation", "test"] = "validation"
    data_prefix: Annotated[list[Line] | None, Rule(_texts)] = None
    other_data: bool = False
    layout: LayoutSizes = LayoutSizes()


@dataclass(frozen=True)
class LmEval(Section):
    """The tasks of lm-eval for the converted model; a task is a name, or the path of a YAML file."""

    tasks: Annotated[list[Annotated[Line, Rule(_task)]], Rule(_make_list)] = field(default_factory=list)
    include_path: Place | None = None
    limit: Annotated[float | None, share_or_count("the documents of each task", is_zero_valid=False)] = None
    batch_size: MaybeCount = None
    num_fewshot: Annotated[int | None, whole(0)] = None
    device: Literal["cpu", "cuda"] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """The node `evaluation`: a checkpoint measured on held-out data and on lm-eval's tasks."""

    source: Place | None = None
    step: Annotated[list[Annotated[int, whole(0)]], Rule(_make_list)] = field(default_factory=list)
    every: MaybeCount = None
    training: PathOrKeys = None
    perplexity: Perplexity = Perplexity()
    lm_eval: LmEval = LmEval()
    converted: Place | None = None
    results: Place | None = None
    processes: MaybeCount = None
    cpus_per_task: MaybeCount = None
