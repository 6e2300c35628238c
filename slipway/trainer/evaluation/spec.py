"""The root node ``evaluation``: which checkpoints are measured, and how. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipway.common import sections
from slipway.common.errors import UserError
from slipway.common.section_types import Place, load
from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.distillation import TEACHER
from slipway.trainer.config.layout import Layout, make_layout
from slipway.trainer.config.settings import Settings, read_settings

_NODE = "evaluation"
_SIZES = {
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
    "virtual": "model.virtual_pipeline_model_parallel_size",
    "context": "model.context_parallel_size",
}
_PREFIX = "model.data.data_prefix"


class Perplexity(sections.Perplexity):
    """The settings of the loss on held-out data."""

    def training_keys(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the training's configuration, changed so that a session of it evaluates these data.

        Raises
        ------
        UserError
            If the training names no data for the split.
        """
        keys = {name: value for name, value in flat.items() if not name.startswith("trainer.num_nodes")}
        keys.update(self._sizes())
        keys.update(self._data(flat))
        if self.batches is not None:
            keys["trainer.limit_val_batches"] = self.batches
        # As many processes as were started; nothing is reduced or gathered besides the computation.
        keys["trainer.devices"] = None
        # It is in no checkpoint, and does not restrict the layout.
        keys[TEACHER] = None
        off = ("optim.overlap_grad_sync", "optim.overlap_param_sync", "gradient_accumulation_fusion")
        return {**keys, **{f"model.{name}": False for name in off}}

    def _sizes(self) -> dict[str, int | None]:
        layout = self.layout
        sizes = {_SIZES[name]: size for name, size in vars(layout).items() if size is not None}
        if layout.pipeline is not None and layout.virtual is None:
            # Virtual stages are parts of the training's pipeline stages.
            sizes[_SIZES["virtual"]] = None
        return sizes

    def _data(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data sets as the validation's, where they are not the training's own."""
        whole = self.data_prefix
        if whole is None and self.split == "test" and flat.get(f"{_PREFIX}.train") is not None:
            whole = flat.get(f"{_PREFIX}.test")
            if whole is None:
                raise UserError(
                    f"{_NODE}.perplexity.split=test: {_PREFIX}.test is missing: expected the data to "
                    f"evaluate there, or in {_NODE}.perplexity.data_prefix"
                )
        if whole is None:
            return {}
        # The run's later weights are of its own data sets.
        data = {_PREFIX: None, f"{_PREFIX}.train": whole, f"{_PREFIX}.validation": whole}
        return {**data, "resume.data_weights": None}


@dataclass(frozen=True, kw_only=True)
class Evaluation(sections.Evaluation):
    """The measurements of checkpoints, whose source and place of results are known."""

    source: Place = field()
    perplexity: Perplexity = field(default_factory=Perplexity)
    results: Place = field()

    @property
    def follows(self) -> bool:
        """Return whether all checkpoints without a result are measured, regardless of `step`."""
        return self.every is not None

    def model_directory(self, step: int) -> Path:
        """Return where the checkpoint of a step is in Hugging Face's format."""
        assert self.converted is not None
        return Path(str(self.converted).replace("{step}", str(step)))

    def checkpoints(self, has_result: Callable[[Checkpoint], bool]) -> list[Checkpoint]:
        """Return the checkpoints to measure, the oldest first.

        Parameters
        ----------
        has_result
            Says of a checkpoint if all that is asked for was measured before.

        Raises
        ------
        UserError
            If `source` is or has no complete checkpoint, or none of a step.
        """
        single, wrong = store.open_checkpoint(self.source)
        if single is not None:
            return self._select(self.source, [single], has_result)
        if not self.source.is_dir():
            raise UserError(f"{_NODE}.source={self.source}: there is no such directory", "node")
        found = store.list_complete(self.source)
        if not found and (self.source / MARKER).exists():
            raise UserError(f"{_NODE}.source={self.source}: the checkpoint is damaged: {wrong}")
        if not found and not self.follows:
            raise UserError(
                f"{_NODE}.source={self.source}: there is no complete checkpoint; expected the directory of "
                "one, or of several, such as RUN/results/checkpoints"
            )
        return self._select(self.source, found, has_result)

    def _select(
        self, source: Path, found: list[Checkpoint], has_result: Callable[[Checkpoint], bool]
    ) -> list[Checkpoint]:
        # The newest of a step, where a training went back and came by again.
        by_step = {checkpoint.marker.step: checkpoint for checkpoint in found}
        if self.follows:
            return [by_step[step] for step in sorted(by_step) if not has_result(by_step[step])]
        steps = sorted(set(self.step))
        if not steps:
            return found[-1:]
        for step in steps:
            if step not in by_step:
                there = ", ".join(map(str, sorted(by_step)))
                raise UserError(f"{_NODE}.step={step}: the complete checkpoints in {source} are of {there}")
        return [by_step[step] for step in steps]


def read_evaluation(node: Mapping[str, Any]) -> Evaluation:
    """Read the node; no file is opened.

    Raises
    ------
    UserError
        Naming the key, its value and the valid ones.
    """
    node = {name: value for name, value in node.items() if name != "run"}
    evaluation = load(Evaluation, node, _NODE)
    if not evaluation.perplexity.enabled and not evaluation.lm_eval.tasks:
        raise UserError(
            f"{_NODE}.perplexity.enabled=False and {_NODE}.lm_eval.tasks=[]: there is nothing to measure"
        )
    if evaluation.lm_eval.tasks and evaluation.converted is None:
        raise UserError(
            f"{_NODE}.converted is missing: expected the directory of the model in Hugging Face's format, "
            "which lm-eval loads; {step} in it is the step"
        )
    return evaluation


def read_heldout_settings(flat: Mapping[str, Any], perplexity: Perplexity) -> Settings:
    """Return the settings of a training, with the data and the layout of an evaluation.

    Raises
    ------
    UserError
        As :func:`slipway.trainer.config.settings.read_settings`, or if nothing is held out.
    """
    settings = read_settings(perplexity.training_keys(flat))
    if not settings.val_batches:
        raise UserError(
            "trainer.limit_val_batches=0: the training holds nothing out; expected a number of batches in "
            "evaluation.perplexity.batches"
        )
    return settings


def evaluation_layout(settings: Settings, world: int) -> Layout:
    """Divide `world` processes; batches are padded for them, so that any number fits.

    Raises
    ------
    UserError
        If the processes are no multiple of those that share the model.
    """
    parallel = settings.parallel
    copies = max(1, world // parallel.model)
    batch = settings.micro_batch * copies * (parallel.pipeline if parallel.virtual > 1 else 1)
    try:
        return make_layout(replace(settings, global_batch=batch, rampup=None), world)
    except UserError as error:
        raise UserError(f"{error}; evaluation.perplexity.layout lays the model out in another way") from None
