"""The sections of a configuration that a job reads: their keys, types, rules and defaults, declared once.

What each key means is said in `conf/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from slipway.common.errors import suggest
from slipway.common.section_types import (
    Count,
    Line,
    MaybeCount,
    ModelType,
    PathOrKeys,
    Place,
    Rule,
    Section,
    Sha256,
    make_list,
    read_path,
    read_text,
    share_or_count,
    whole,
)

# --- data_preparation

Phase = Literal["fetch", "tokenize", "merge"]
SourceFormat = Literal["auto", "txt", "jsonl", "parquet", "wikipedia", "tar"]
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
    return read_text(value)


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
        options["model"] = str(read_path(options["model"]))
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
    return value and [str(item) if isinstance(item, int | float) else item for item in make_list(value)]


def _task(value: Any) -> Any:
    """Return the path of a task's own file, or the name of one that comes with lm-eval."""
    return str(read_path(value)) if str(value).endswith((".yaml", ".yml")) else value


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

    tasks: Annotated[list[Annotated[Line, Rule(_task)]], Rule(make_list)] = field(default_factory=list)
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
    step: Annotated[list[Annotated[int, whole(0)]], Rule(make_list)] = field(default_factory=list)
    every: MaybeCount = None
    training: PathOrKeys = None
    perplexity: Perplexity = Perplexity()
    lm_eval: LmEval = LmEval()
    converted: Place | None = None
    results: Place | None = None
    processes: MaybeCount = None
    cpus_per_task: MaybeCount = None
