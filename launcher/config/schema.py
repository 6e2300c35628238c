"""The nodes of the configuration that are ours, read strictly.

`training.trainer`, `training.exp_manager` and `training.model` are NeMo's and pass through: copying NeMo's
schema would rot.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from launcher.errors import UserError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
Engine = Literal["nemo", "megatron"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _drop_nulls(value: Any) -> Any:
    # The NeMo launcher's default is the list [null].
    return [item for item in value if item is not None] if isinstance(value, list) else value


def _as_text(value: Any) -> Any:
    # YAML reads `mem: 0` and a time limit of `30` as integers; Slurm takes both as words.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_as_text)]
TextList = Annotated[list[str], BeforeValidator(_drop_nulls)]


class ClusterConfig(_Strict):
    """Where jobs run, in Slurm's words; ``None`` leaves an option out."""

    scheduler: Literal["slurm", "local"]
    engine: Engine
    container: str | None
    python: str | None
    slurm_conf: str | None
    partition: Text | None
    account: Text | None
    exclusive: bool
    gpus_per_task: int | None = Field(ge=0)
    gpus_per_node: int | None = Field(ge=0)
    gres: Text | None
    cpus_per_task: int | None = Field(ge=1)
    mem: Text | None
    job_name_prefix: str
    srun_args: TextList
    stderr_to_stdout: bool


class RunConfigNode(_Strict):
    """The `run` node of a stage."""

    name: Text
    results_dir: str
    time_limit: Text | None
    dependency: Text | None


class TrainerNode(BaseModel):
    """What the launcher itself needs of NeMo's `trainer` node."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    num_nodes: int = Field(ge=1)
    devices: int = Field(ge=1)


class TrainingConfig(_Strict):
    """The `training` node: `run` is ours, the others are NeMo's."""

    run: RunConfigNode
    trainer: dict[str, Any]
    exp_manager: dict[str, Any]
    model: dict[str, Any]


class TextPreparationConfig(_Strict):
    """The `data_preparation` node: text files to a tokenizer and Megatron's .bin/.idx."""

    run: RunConfigNode
    inputs: list[str] = Field(min_length=1)
    pattern: str
    output_prefix: str
    tokenizer_dir: str
    vocab_size: int = Field(ge=257)
    max_files: int | None = Field(ge=1)
    max_bytes: int | None = Field(ge=1)
    workers: int = Field(ge=1)
    seed: int


class RunConfig(_Strict):
    """The whole configuration of one launch, checked.

    `training` and `data_preparation` are ``None`` unless their stage was asked for.
    """

    stages: list[str] = Field(min_length=1)
    launcher_scripts_path: str
    data_dir: str
    base_results_dir: str
    engine: Engine
    container: str | None
    container_mounts: TextList
    env_vars: dict[str, Text | float | bool | None]
    dry_run: bool
    cluster: ClusterConfig
    training: TrainingConfig | None = None
    data_preparation: TextPreparationConfig | None = None


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
        lines = [_explain(detail, model, path) for detail in error.errors(include_url=False)]
        raise UserError("\n".join(lines)) from error


def _explain(detail: Any, model: type[BaseModel], path: str) -> str:
    location = [part for part in detail["loc"] if part not in ("function-before", "str", "float", "bool")]
    key = ".".join(str(part) for part in ([path] if path else []) + location)
    if detail["type"] == "extra_forbidden":
        near = did_you_mean(str(location[-1]), _fields_at(model, location[:-1]))
        return f"{key}: there is no such key; {near}"
    if detail["type"] == "missing":
        return f"{key}: missing"
    return f"{key}={detail['input']!r}: {_lower_first(detail['msg'])}"


def _fields_at(model: type[BaseModel], location: list[Any]) -> Iterator[str]:
    """The keys that are valid in the node at `location` below `model`."""
    for part in location:
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    yield from model.model_fields


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
