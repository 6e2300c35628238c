"""The nodes of the configuration that are ours, read strictly.

`training.trainer`, `training.exp_manager` and `training.model` are NeMo's and pass through: copying NeMo's
schema would rot.
"""

import copy
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
)

from launcher.config.values import (
    Arguments,
    Constants,
    Debug,
    ErrorLimit,
    Exclusive,
    FilterEntry,
    Flags,
    GpuCount,
    Line,
    LineList,
    Margin,
    Memory,
    NemoClusterType,
    NemoSecret,
    Option,
    PathOrKeys,
    Pattern,
    Positive,
    Sha256,
    Share,
    SourceText,
    Splits,
    Steps,
    Text,
    TimeLimit,
    UniqueOutputDir,
    Utilization,
    Whole,
    Words,
)
from launcher.errors import Mistakes

Model = TypeVar("Model", bound=BaseModel)
Engine = Literal["nemo", "megatron", "megatron_lm"]
ModelType = Literal["gpt", "t5", "bert"]
SourceFormat = Literal["auto", "txt", "jsonl", "parquet", "wikipedia", "tar"]
StageName = Literal[
    "data_preparation", "training", "conversion", "evaluation", "workspace", "command", "image"
]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class GpuRow(StrictModel):
    """A site's figures of a type of GPU; the others are those of the table (`arithmetic/gpus.json`)."""

    memory_mib: Whole | None = Field(None, ge=1, description="what nvidia-smi reports in total")
    peak_tflops: dict[Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"], Positive] | None = Field(
        None, description="dense, by type: {bf16: 989.4, fp8: 1978.9}"
    )
    capability: tuple[Whole, Whole] | None = Field(None, description="CUDA's compute capability: [9, 0]")
    memory_gb_s: Positive | None = Field(None, description="bandwidth of the memory")
    nvlink_gb_s: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="bandwidth of NVLink in one direction, 0 without"
    )
    nvlink_gpus: Whole | None = Field(None, ge=1, description="how many GPUs NVLink connects: 8, 72, 2")
    nic_gbit_s: Positive | None = Field(None, description="a GPU's share of the network of its node")
    names: Pattern | None = Field(
        None, description="a regular expression of its names, in lower case with blanks: h100( sxm5?| 80gb)*"
    )


class ClusterConfig(StrictModel):
    """The cluster that jobs run on, in Slurm's words; ``None`` leaves an option out.

    A field without a default has it in `conf/`. A new one needs a default here too, if launches that were
    stored before are to be rendered again.
    """

    scheduler: Literal["slurm", "local", "allocation"]
    engine: Engine
    container: Line | None
    python: Line | None
    slurm_conf: Line | None
    partition: Option
    account: Option
    qos: Option
    reservation: Option
    constraint: Option
    nodelist: Words
    exclude: Words
    switches: Option
    licenses: Words
    begin: Option
    deadline: Option
    comment: Text | None
    mail_type: Words
    mail_user: Option
    signal: Option
    requeue: bool | None
    exclusive: Exclusive
    gpu_request: Literal["gpus_per_node", "gpus_per_task", "gres", "none"] | None
    gpus_per_task: GpuCount | None = Field(ge=0)
    gpus_per_node: GpuCount | None = Field(ge=0)
    gres: Option
    gpu: Option
    gpu_types: dict[Line, GpuRow]
    cpus_per_task: Whole | None = Field(ge=1)
    mem: Memory | None
    sbatch: Flags
    job_name_prefix: Line
    mpi: Option
    srun_args: Arguments
    stderr_to_stdout: bool
    env_vars: dict[Line, Text | None]


@cache
def _any_of_the_cluster() -> type[BaseModel]:
    """Make all of the cluster's keys optional; unknown keys are refused in the merged cluster."""
    fields = {name: copy.copy(field) for name, field in ClusterConfig.model_fields.items()}
    for field in fields.values():
        field.default = None
    given: dict[str, Any] = {name: (field.annotation, field) for name, field in fields.items()}
    return create_model("StageChanges", __config__=ConfigDict(extra="ignore"), **given)


def _changes(value: Any) -> Any:
    # Here already, where a number for a text can be read as it was written.
    if isinstance(value, dict) and value:
        _any_of_the_cluster().model_validate(value)
    return value


StageChanges = Annotated[dict[str, Any], BeforeValidator(_changes)]


class ContainerOptionsConfig(StrictModel):
    """Options of the container; ``None`` leaves them to the site's `enroot.conf` and `plugstack.conf`."""

    runtime: Literal["pyxis", "apptainer"]
    stage_to: Line | None
    mount_home: bool | None
    writable: bool | None
    remap_root: bool | None
    entrypoint: bool | None
    workdir: Line | None
    name: Line | None
    env: LineList
    save: Line | None


class ImageJob(StrictModel):
    """The resources of the job that builds or imports an image."""

    cpus_per_task: Whole | None = Field(ge=1)
    mem: Memory | None
    time_limit: TimeLimit | None


class NumaMapping(StrictModel):
    """The cores that each task runs on, in the NeMo launcher's words, for its one mode."""

    enable: bool
    mode: Literal["unique_contiguous"]
    scope: Literal["node"]
    cores: Literal["all_logical", "single_logical"]
    balanced: bool
    min_cores: Whole = Field(ge=1)
    max_cores: Whole | None = Field(ge=1)


class NodeRange(StrictModel):
    """The range of nodes of a job, which takes as many as are free when it starts."""

    min: Whole = Field(ge=1)
    max: Whole = Field(ge=1)


class Resilience(StrictModel):
    """Settings for a job that ends before its training does."""

    links: Whole = Field(ge=1, le=1000)
    submit: Literal["job", "launch"]
    max_failures: Whole = Field(ge=1, le=1000)
    save_before_end: Margin | None
    exclude_hours: float = Field(ge=0, le=87600)
    after_stage: Literal["afterok", "afterany"]
    nodes: NodeRange | None


class Estimates(StrictModel):
    """Settings of the estimates of time, cost and memory."""

    mfu: Utilization | None
    gpu_hour_price: float | None = Field(ge=0, allow_inf_nan=False)
    memory_margin: Share
    attained: Constants


class RunConfigNode(StrictModel):
    """The `run` node of a stage."""

    name: Text
    results_dir: Line
    time_limit: TimeLimit | None
    dependency: Option


class TrainingRunNode(RunConfigNode):
    """The `run` node of the training stage; `model_type` chooses the script that trains."""

    model_type: ModelType = "gpt"
    # mT5's, which say how its languages would be mixed.
    preprocessed_dir: Line | None = None
    blending_alpha: float | None = Field(default=None, ge=0)


class TrainerNode(BaseModel):
    """The keys of NeMo's `trainer` node that the launcher itself needs."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

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


class TrainingConfig(StrictModel):
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


class DataPreparationConfig(StrictModel):
    """The `data_preparation` node: sources to a tokenizer and Megatron's .bin/.idx."""

    run: RunConfigNode
    inputs: list[Source] = Field(min_length=1)
    pattern: Line
    format: SourceFormat
    text_key: Line
    filters: list[FilterEntry]
    deduplicate: DeduplicationConfig
    tokenizer_dir: Line
    vocab_size: int = Field(ge=257)
    tokenizer: TokenizerConfig
    append_eod: bool
    splits: Splits | None
    output_prefix: Line
    work_dir: Line
    shard_bytes: Whole = Field(ge=1024)
    tasks: Whole = Field(ge=1)
    workers: int = Field(ge=1)
    phase: Literal["fetch", "tokenize", "merge"] | None
    on_error: Literal["raise", "skip"]
    max_errors: ErrorLimit
    max_files: int | None = Field(ge=1)
    max_bytes: int | None = Field(ge=1)
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


class ConversionConfig(StrictModel):
    """The `conversion` node: weights in one format to weights in another.

    `model_type` and `training` describe the training that the weights are from, where the launcher knows it.
    """

    run: RunConfigNode
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


class EvaluationConfig(StrictModel):
    """The `evaluation` node: a checkpoint measured on held-out data and on lm-eval's tasks."""

    run: RunConfigNode
    source: Line | None
    step: Steps
    every: Whole | None = Field(ge=1)
    training: PathOrKeys
    perplexity: PerplexityConfig
    lm_eval: LmEvalConfig
    converted: Line
    results: Line | None
    processes: Whole | None = Field(ge=1)
    cpus_per_task: Whole | None = Field(ge=1)


class WorkspaceConfig(StrictModel):
    """The `workspace` node: a shell on one node, with what a training would see there."""

    run: RunConfigNode
    container: Line | None
    gpus: Whole | None = Field(ge=0)
    shell: Line
    workdir: Line | None


class CommandConfig(StrictModel):
    """The `command` node: a program of the site's own."""

    run: RunConfigNode
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


StageConfig = (
    DataPreparationConfig
    | TrainingConfig
    | ConversionConfig
    | EvaluationConfig
    | WorkspaceConfig
    | CommandConfig
)


class RunConfig(StrictModel):
    """The whole configuration of one launch, checked.

    The nodes of stages are ``None`` unless their stage was asked for; a workspace has a training beside it.
    """

    stages: list[str] = Field(min_length=1)
    launcher_scripts_path: Line
    data_dir: Line
    base_results_dir: Line
    unique_output_dir: UniqueOutputDir = False
    images_dir: Line
    engine: Engine
    nemo_path: Line
    megatron_lm_path: Line
    container: Line | None
    container_mounts: LineList
    container_options: ContainerOptionsConfig
    image_job: ImageJob
    env_vars: dict[Line, Text | None]
    env_files: dict[Line, Line | None]
    wandb_api_key_file: Line | None
    numa_mapping: NumaMapping
    enable_vboost: bool
    resilience: Resilience
    estimates: Estimates
    dry_run: bool
    cluster: ClusterConfig
    stage_cluster: dict[StageName, StageChanges]
    # The NeMo launcher's, which say nothing here.
    cluster_type: NemoClusterType
    debug: Debug
    bcp_no_redirect: bool
    wandb_api_bcp_secret_key: NemoSecret
    training: TrainingConfig | None = None
    data_preparation: DataPreparationConfig | None = None
    conversion: ConversionConfig | None = None
    evaluation: EvaluationConfig | None = None
    workspace: WorkspaceConfig | None = None
    command: CommandConfig | None = None


def parse(model: type[Model], node: Mapping[str, Any], path: str = "") -> Model:
    """Check a node against its schema.

    Raises
    ------
    UserError
        Naming each wrong key, its value and what would be valid.
    """
    try:
        return model.model_validate(node)
    except ValidationError as error:
        # Imported late: most configurations have no mistake.
        from launcher.config.values import explain

        raise Mistakes(
            [explain(detail, model, path) for detail in error.errors(include_url=False)]
        ) from error
