"""The nodes of the stages besides training, which are imported once a configuration has one."""

from dataclasses import dataclass

from pydantic import Field

from launcher.config.stage_schema import StageConfig, StageSection
from launcher.config.values import Line, LineList, Memory, Text, Whole
from slipway.common.sections import Conversion, DataPreparation, Evaluation


@dataclass(frozen=True, kw_only=True)
class DataPreparationConfig(DataPreparation, StageSection):
    """The `data_preparation` node: sources to a tokenizer and Megatron's .bin/.idx."""


@dataclass(frozen=True, kw_only=True)
class ConversionConfig(Conversion, StageSection):
    """The `conversion` node: weights in one format to weights in another."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Evaluation, StageSection):
    """The `evaluation` node: a checkpoint measured on held-out data and on lm-eval's tasks."""


class WorkspaceConfig(StageConfig):
    """The `workspace` node: a shell on one node, in the environment of a training."""

    container: Line | None
    gpus: Whole | None = Field(ge=0)
    shell: Line
    workdir: Line | None


class CommandConfig(StageConfig):
    """The `command` node: a program of the site."""

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
