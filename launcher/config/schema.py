"""The configuration of a launch, read strictly; the nodes of its stages are in `stage_schema`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from launcher.config.stage_schema import StrictModel, TrainingConfig, disable_plugins
from launcher.config.values import (
    Arguments,
    Constants,
    Debug,
    Exclusive,
    Flags,
    GpuCount,
    Line,
    LineList,
    Margin,
    Memory,
    NemoClusterType,
    NemoSecret,
    Option,
    Pattern,
    PluginFlags,
    Positive,
    Share,
    Text,
    TimeLimit,
    UniqueOutputDir,
    Utilization,
    Whole,
    explain,
)
from launcher.config.watch_schema import Watch
from launcher.errors import Mistakes
from launcher.slurm.queue_flags import QueueFlags
from slipway.common.section_types import Section

if TYPE_CHECKING:
    from launcher.config import late_stages

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
Engine = Literal["nemo", "megatron", "megatron_lm"]
StageName = Literal[
    "data_preparation", "training", "conversion", "evaluation", "workspace", "command", "image"
]


class GpuRow(StrictModel):
    """A site's figures of a type of GPU; the others are those of `slipway/arithmetic/gpus.json`."""

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


class ClusterConfig(StrictModel, QueueFlags):  # type: ignore[misc]  # by its configuration it is frozen
    """The cluster that jobs run on, in Slurm's words; ``None`` leaves an option out.

    Flags that are passed through are fields of `QueueFlags`.

    A field without a default has it in `conf/`. A new one needs a default here too, if launches that were
    stored before are to be rendered again.
    """

    scheduler: Literal["slurm", "local", "allocation"]
    engine: Engine
    container: Line | None
    python: Line | None
    slurm_conf: Line | None
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
    spank: PluginFlags = Field(default_factory=dict)
    job_name_prefix: Line
    mpi: Option
    srun_args: Arguments
    setup: LineList = Field(default_factory=list)
    task_prefix: Arguments = Field(default_factory=list)
    stderr_to_stdout: bool
    env_vars: dict[Line, Text | None]
    env_expand: dict[Line, Text | None] = Field(default_factory=dict)


@cache
def _make_stage_changes() -> type[BaseModel]:
    """Make all of the cluster's keys optional; unknown keys are refused in the merged cluster."""
    fields: dict[str, Any] = {
        name: (field.rebuild_annotation(), None) for name, field in ClusterConfig.model_fields.items()
    }
    return create_model("StageChanges", __config__=ConfigDict(extra="ignore"), **fields)


def _changes(value: Any) -> Any:
    # Here already, where a number for a text can be read as it was written.
    if isinstance(value, dict) and value:
        _make_stage_changes().model_validate(value)
    return value


StageChanges = Annotated[dict[str, Any], BeforeValidator(_changes)]


@dataclass(frozen=True)
class ContainerOptions(Section):
    """Options of a container; ``None`` leaves them to the site's `enroot.conf` and `plugstack.conf`.

    `stage_to` is a node-local directory that the image file is copied to before the tasks start;
    `gpu_flag` makes the GPUs visible where Apptainer, or Singularity, starts the tasks.
    """

    runtime: Literal["pyxis", "apptainer", "singularity"] = "pyxis"
    gpu_flag: Literal["nv", "rocm"] | None = "nv"
    stage_to: Line | None = None
    mount_home: bool | None = None
    writable: bool | None = None
    remap_root: bool | None = None
    entrypoint: bool | None = None
    workdir: Line | None = None
    name: Line | None = None
    env: LineList = field(default_factory=list)
    save: Line | None = None


class ImageJob(StrictModel):
    """The resources of the job that builds or imports an image."""

    cpus_per_task: Whole | None = Field(ge=1)
    mem: Memory | None
    time_limit: TimeLimit | None


class NumaMapping(StrictModel):
    """The cores that each task runs on, in the NeMo launcher's words, for its one mode.

    They are whole physical ones of its GPU's NUMA node, shared with no other task. `balanced` gives each task
    as many cores; `max_cores` is ``None`` for all there are.
    """

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


def _name_off(value: Any) -> Any:
    return "off" if value is False else value  # YAML's word for false


class Resilience(StrictModel):
    """Settings for a job that ends before its training does."""

    links: Whole = Field(ge=1, le=1000)
    submit: Literal["job", "launch"]
    restarts: Whole = Field(ge=0, le=1000, default=0)
    max_failures: Whole = Field(ge=1, le=1000)
    save_before_end: Margin | None
    exclude_hours: float = Field(ge=0, le=87600)
    exclude_file: Line | None = None
    after_stage: Literal["afterok", "afterany"]
    nodes: NodeRange | None
    health: Annotated[Literal["off", "quick", "full"], BeforeValidator(_name_off)] = "off"
    health_command: LineList = Field(default_factory=list)
    spares: Whole = Field(default=0, ge=0, le=1000)


@dataclass(frozen=True)
class Assumptions(Section):
    """The user's settings of the estimates of time, cost and memory.

    `mfu` is a part of the GPUs' dense peak; `gpu_hour_price` is of one GPU; `memory_margin` is the part of a
    GPU's memory to leave free; `attained` changes constants of the speed model
    (launcher/attained.py).
    """

    mfu: Utilization | None = None
    gpu_hour_price: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    memory_margin: Share = 0.05
    attained: Constants = field(default_factory=dict)


if TYPE_CHECKING:
    Late: TypeAlias = T | None  # for mypy, to which a class that is imported late is as any other
else:

    class Late:
        """The node of a stage, or null: metadata for `Annotated`. A node alone imports its class."""

        def __init__(self, name: str) -> None:
            self._name = name.removeprefix("late_stages.")

        def __class_getitem__(cls, name: str) -> Any:
            return Annotated[Any, cls(name)] | None

        @cached_property
        def model(self) -> type:
            from launcher.config import late_stages

            return getattr(late_stages, self._name)

        @cached_property
        def _adapter(self) -> Any:
            from pydantic import TypeAdapter

            return TypeAdapter(self.model)

        def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
            """Return the schema by which pydantic reads and writes the node."""
            read = {"type": "no-info", "function": self._read}
            write = {"type": "function-plain", "function": self._write, "info_arg": True}
            return {"type": "function-plain", "function": read, "serialization": write}

        def _read(self, node: Any) -> Any:
            with disable_plugins():
                return self._adapter.validate_python(node)

        def _write(self, node: Any, info: Any) -> Any:
            return self._adapter.dump_python(node, exclude_unset=info.exclude_unset)


class RunConfig(StrictModel):
    """The whole configuration of one launch, checked.

    The nodes of stages are ``None`` unless their stage is requested; a workspace also has a training.
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
    container_options: ContainerOptions
    image_job: ImageJob
    env_vars: dict[Line, Text | None]
    env_expand: dict[Line, Text | None] = Field(default_factory=dict)
    env_files: dict[Line, Line | None]
    wandb_api_key_file: Line | None
    numa_mapping: NumaMapping
    enable_vboost: bool
    resilience: Resilience
    watch: Watch = Field(default_factory=Watch)
    estimates: Assumptions
    dry_run: bool
    cluster: ClusterConfig
    stage_cluster: dict[StageName, StageChanges]
    # The NeMo launcher's, which say nothing here.
    cluster_type: NemoClusterType
    debug: Debug
    bcp_no_redirect: bool
    wandb_api_bcp_secret_key: NemoSecret
    training: TrainingConfig | None = None
    data_preparation: Late["late_stages.DataPreparationConfig"] = None
    conversion: Late["late_stages.ConversionConfig"] = None
    evaluation: Late["late_stages.EvaluationConfig"] = None
    workspace: Late["late_stages.WorkspaceConfig"] = None
    command: Late["late_stages.CommandConfig"] = None


def parse(model: type[Model], node: Mapping[str, Any], path: str = "") -> Model:
    """Check a node against its schema; raise UserError with each wrong key, its value and what is valid."""
    try:
        return model.model_validate(node)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise Mistakes([explain(detail, model, path) for detail in details]) from error
