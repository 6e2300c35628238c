"""The node of the training stage, and what all stages have, read strictly.

`training.trainer`, `training.exp_manager` and `training.model` are NeMo's and pass through: copying NeMo's
schema would rot.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from launcher.config.values import Line, Option, Text, TimeLimit, Whole
from slipway.common.section_types import ModelType

_building = threading.RLock()


@contextmanager
def disable_plugins() -> Iterator[None]:
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
        with disable_plugins():
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


@dataclass(frozen=True, kw_only=True)
class StageSection:
    """The node of a stage; the job reads its other keys again."""

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
    load_optimizer: Literal[True, False, "masters"] = True
    lr_scale: float = Field(default=1.0, gt=0)
    lr_freeze_steps: Whole = Field(default=0, ge=0)
    data_generation: Whole = Field(default=0, ge=0)
    skip_samples: list[list[Whole]] = Field(default=[])
    data_weights: list[list[Any]] = Field(default=[])
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
