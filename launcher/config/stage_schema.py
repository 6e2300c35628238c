"""The nodes of the stages: what each of them is told, read strictly.

`training.trainer`, `training.exp_manager` and `training.model` are NeMo's and pass through: copying NeMo's
schema would rot.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from launcher.config.values import (
    ErrorLimit,
    FilterEntry,
    Line,
    LineList,
    Memory,
    Option,
    PathOrKeys,
    Positive,
    Sha256,
    SourceText,
    Splits,
    Steps,
    Text,
    TimeLimit,
    Whole,
)

ModelType = Literal["gpt", "t5", "bert"]
SourceFormat = Literal["auto", "txt", "jsonl", "parquet", "wikipedia", "tar"]

_building = threading.RLock()


@contextmanager
def without_plugins() -> Iterator[None]:
    """Keep pydantic, which builds a model at its first use, from a search for plugins in all packages.

    One thread at a time: the variable is the whole process's.
    """
    with _building:
        before = os.environ.get("PYDANTIC_DISABLE_PLUGINS")
        os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
        try:
            yield
        finally:
            os.environ.pop("PYDANTIC_DISABLE_PLUGINS", None)
            if before is not None:
                os.environ["PYDANTIC_DISABLE_PLUGINS"] = before


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Build the model, as pydantic does at its first use."""
        with without_plugins():
            return super().model_rebuild(**options)


class RunConfigNode(StrictModel):
    """The `run` node of a stage."""

    name: Text
    results_dir: Line
    time_limit: TimeLimit | None
    dependency: Option


class StageConfig(StrictModel):
    """The node of a stage."""

    run: RunConfigNode


class TrainingRunNode(RunConfigNode):
    """The `run` node of the training stage; `model_type` chooses the script that trains."""

    model_type: ModelType = "gpt"
    # mT5's, which say how its languages would be mixed.
    preprocessed_dir: Line | None = None
    blending_alpha: float | None = Field(default=None, ge=0)


class TrainerNode(StrictModel):
    """The keys of NeMo's `trainer` node that the launcher itself needs."""

    model_config = ConfigDict(extra="ignore")

    num_nodes: Whole = Field(ge=1)
    devices: Whole = Field(ge=1)


class ResumeNode(StrictModel):
    """The changes to a training that continues; our trainer reads the same node.

    `accept_data` is for every engine: the launcher looks at the data too.
    """

    checkpoint: Line | None = None
    load_optimizer: bool = True
    lr_scale: float = Field(default=1.0, gt=0)
    data_generation: Whole = Field(default=0, ge=0)
    trust_owner: Text | None = None
    accept_data: Line | None = None


class TrainingConfig(StageConfig):
    """The `training` node: `run` and `resume` are ours, the others are NeMo's."""

    run: TrainingRunNode
    resume: ResumeNode = Field(default_factory=ResumeNode)
    trainer: dict[str, Any]
    exp_manager: dict[str, Any]
    model: dict[str, Any]
    # NeMo's too, in the families that have them.
    name: Line | None = None
    restore_from_path: Line | None = None


class SourceConfig(StrictModel):
    """One source of a data preparation, where a path or URL alone does not say enough."""

    path: SourceText | None = None
    url: SourceText | None = None
    sha256: Sha256 | None = None
    format: SourceFormat | None = None
    text_key: Line | None = None
    name: Line | None = None


def _text_or_mapping(value: Any) -> str:
    return "[mapping]" if isinstance(value, (Mapping, SourceConfig)) else "[text]"


# Told apart by form, so that a mistake in one is not reported as one in the other too.
Source = Annotated[
    Annotated[SourceText, Tag("[text]")] | Annotated[SourceConfig, Tag("[mapping]")],
    Discriminator(_text_or_mapping),
]


class MinHashConfig(StrictModel):
    """The near duplicates that are dropped: see datatrove's `MinhashConfig`."""

    ngram: Whole = Field(5, ge=1)
    buckets: Whole = Field(14, ge=1)
    hashes_per_bucket: Whole = Field(8, ge=1)
    language: Line | None = None


class DeduplicationConfig(StrictModel):
    """The duplicate documents that are dropped."""

    exact: bool
    minhash: MinHashConfig | None


class TokenizerConfig(StrictModel):
    """The tokenizer of a data preparation, where it is neither in `tokenizer_dir` nor trained."""

    file: Line | None
    url: Line | None
    sha256: Sha256 | None
    vocab_url: Line | None
    vocab_sha256: Sha256 | None
    merges_url: Line | None
    merges_sha256: Sha256 | None
    end_of_document: Line | None


class DataPreparationConfig(StageConfig):
    """The `data_preparation` node: sources to a tokenizer and Megatron's .bin/.idx."""

    inputs: list[Source] = Field(min_length=1)
    pattern: Line
    format: SourceFormat
    text_key: Line
    filters: list[FilterEntry]
    deduplicate: DeduplicationConfig
    tokenizer_dir: Line
    vocab_size: int | None = Field(ge=257)
    tokenizer: TokenizerConfig
    append_eod: bool
    splits: Splits | None
    output_prefix: Line
    replace: bool
    work_dir: Line
    shard_bytes: Whole = Field(ge=1024)
    tasks: Whole = Field(ge=1)
    workers: int = Field(ge=1)
    phase: Literal["fetch", "tokenize", "merge"] | None
    on_error: Literal["raise", "skip"]
    max_errors: ErrorLimit
    max_files: int | None = Field(ge=1)
    max_bytes: int | None = Field(ge=1)
    max_document_bytes: Whole = Field(ge=1)
    max_expansion: Whole = Field(ge=1)
    download_timeout: Whole = Field(ge=1)
    seed: int


class TrainedRun(StrictModel):
    """The run that a checkpoint is from."""

    run: Line
    directory: Line


class ConversionCheckConfig(StrictModel):
    """The comparison of a converted model with ours."""

    enabled: bool
    text: Line | None
    sequences: Whole = Field(ge=1)


class ConversionConfig(StageConfig):
    """The `conversion` node: weights in one format to weights in another.

    `model_type` and `training` describe the training that the weights are from, where the launcher knows it.
    """

    source: Line | None
    step: Whole | None = Field(ge=0)
    source_format: Literal["auto", "slipway", "huggingface", "megatron_lm", "dcp", "deepspeed"]
    to: Literal["huggingface", "slipway", "safetensors", "nemo"]
    output: Line
    dtype: Literal["float32", "bfloat16", "float16"] | None
    shard_bytes: Whole = Field(ge=1)
    tokenizer_dir: Line | None
    model: PathOrKeys
    model_type: ModelType | None
    training: TrainedRun | None
    check: ConversionCheckConfig
    every: Whole | None = Field(ge=1)


class LayoutConfig(StrictModel):
    """The parallel sizes of an evaluation; ``None`` is the training's."""

    tensor: Whole | None = Field(ge=1)
    pipeline: Whole | None = Field(ge=1)
    virtual: Whole | None = Field(ge=1)
    context: Whole | None = Field(ge=1)


class PerplexityConfig(StrictModel):
    """The held-out loss of an evaluation, by our own trainer."""

    enabled: bool
    batches: Whole | None = Field(ge=1)
    split: Literal["validation", "test"]
    data_prefix: list[Line] | None
    layout: LayoutConfig


class LmEvalConfig(StrictModel):
    """The tasks of lm-eval that an evaluation runs on the converted model."""

    tasks: list[Line]
    include_path: Line | None
    limit: Positive | None
    batch_size: Whole | None = Field(ge=1)
    num_fewshot: Whole | None = Field(ge=0)
    device: Literal["cpu", "cuda"] | None
    dtype: Line


class EvaluationConfig(StageConfig):
    """The `evaluation` node: a checkpoint measured on held-out data and on lm-eval's tasks."""

    source: Line | None
    step: Steps
    every: Whole | None = Field(ge=1)
    training: PathOrKeys
    perplexity: PerplexityConfig
    lm_eval: LmEvalConfig
    converted: Line | None
    results: Line | None
    processes: Whole | None = Field(ge=1)
    cpus_per_task: Whole | None = Field(ge=1)


class WorkspaceConfig(StageConfig):
    """The `workspace` node: a shell on one node, with what a training would see there."""

    container: Line | None
    gpus: Whole | None = Field(ge=0)
    shell: Line
    workdir: Line | None


class CommandConfig(StageConfig):
    """The `command` node: a program of the site's own."""

    argv: list[Text] = Field(min_length=1)
    container: Line | None
    nodes: Whole = Field(ge=1)
    tasks_per_node: Whole = Field(ge=1)
    gpus_per_node: Whole | None = Field(ge=0)
    cpus_per_task: Whole | None = Field(ge=1)
    mem: Memory | None
    workdir: Line | None
    every: Whole | None = Field(ge=1)
    env_vars: dict[Line, Text | None]
    writable: LineList
