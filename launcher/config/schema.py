"""The nodes of the configuration that are ours, read strictly.

`training.trainer`, `training.exp_manager` and `training.model` are NeMo's and pass through: copying NeMo's
schema would rot.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from launcher.errors import Mistakes

Model = TypeVar("Model", bound=BaseModel)
Engine = Literal["nemo", "megatron"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _drop_nulls(value: Any) -> Any:
    # The NeMo launcher's default is the list [null]; null is none at all.
    if value is None:
        return []
    return [item for item in value if item is not None] if isinstance(value, list) else value


def _as_text(value: Any) -> Any:
    # YAML reads `mem: 0` and a time limit of `30` as integers; Slurm takes both as words.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _scalar_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, (int, float)) else value


def _one_line(value: str) -> str:
    if re.search(r"[\0\n\r]", value):
        what = "a NUL character" if "\0" in value else "a line break"
        raise ValueError(f"{what} cannot be part of a value in a job script")
    return value


# Every text of ours reaches a script, where it is part of a line.
Line = Annotated[str, AfterValidator(_one_line)]
Text = Annotated[Line, BeforeValidator(_as_text)]
Variable = Annotated[Line, BeforeValidator(_scalar_as_text)]
LineList = Annotated[list[Line], BeforeValidator(_drop_nulls)]


class ClusterConfig(_Strict):
    """Where jobs run, in Slurm's words; ``None`` leaves an option out."""

    scheduler: Literal["slurm", "local"]
    engine: Engine
    container: Line | None
    python: Line | None
    slurm_conf: Line | None
    partition: Text | None
    account: Text | None
    exclusive: bool
    gpus_per_task: int | None = Field(ge=0)
    gpus_per_node: int | None = Field(ge=0)
    gres: Text | None
    cpus_per_task: int | None = Field(ge=1)
    mem: Text | None
    job_name_prefix: Line
    srun_args: LineList
    stderr_to_stdout: bool


class RunConfigNode(_Strict):
    """The `run` node of a stage."""

    name: Text
    results_dir: Line
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
    inputs: list[Line] = Field(min_length=1)
    pattern: Line
    output_prefix: Line
    tokenizer_dir: Line
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
    launcher_scripts_path: Line
    data_dir: Line
    base_results_dir: Line
    engine: Engine
    container: Line | None
    container_mounts: LineList
    env_vars: dict[Line, Variable | None]
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
        # Imported late: most configurations have no mistake.
        from launcher.config.wording import explain

        raise Mistakes(
            [explain(detail, model, path) for detail in error.errors(include_url=False)]
        ) from error
