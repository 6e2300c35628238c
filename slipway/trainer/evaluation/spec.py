"""The root node ``evaluation``: which checkpoints are measured, and how. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slipway.common.errors import UserError, suggest
from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.layout import Layout, make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.config.values import Values

_NODE = "evaluation"
_SIZES = {
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
    "virtual": "model.virtual_pipeline_model_parallel_size",
    "context": "model.context_parallel_size",
}
_PREFIX = "model.data.data_prefix"
# The launcher's: how the job runs.
_LAUNCHER = ("run", "training", "processes", "cpus_per_task")
_KEYS = {
    *("source", "step", "every", "converted", "results"),
    *(f"perplexity.{name}" for name in ("enabled", "batches", "split", "data_prefix")),
    *(f"perplexity.layout.{name}" for name in _SIZES),
    *("lm_eval.tasks", "lm_eval.include_path", "lm_eval.limit", "lm_eval.batch_size"),
    *("lm_eval.num_fewshot", "lm_eval.device", "lm_eval.dtype"),
}
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Perplexity:
    """The settings of the loss on held-out data.

    Attributes
    ----------
    batches
        Global batches to evaluate; None for the training's ``trainer.limit_val_batches``.
    split
        The split of the data.
    data_prefix
        Other data sets, which are taken whole, as ``model.data.data_prefix`` names them; None for the
        training's.
    layout
        Parallel sizes that differ from the training's.
    """

    batches: int | None
    split: Literal["validation", "test"]
    data_prefix: Any
    layout: Mapping[str, int]

    def training_keys(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the training's configuration, changed so that a session of it evaluates these data.

        Parameters
        ----------
        flat
            The training's dotted keys.

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
        off = ("optim.overlap_grad_sync", "optim.overlap_param_sync", "gradient_accumulation_fusion")
        return {**keys, **{f"model.{name}": False for name in off}}

    def _sizes(self) -> dict[str, int | None]:
        sizes: dict[str, int | None] = {_SIZES[name]: size for name, size in self.layout.items()}
        if "pipeline" in self.layout and "virtual" not in self.layout:
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
        return {_PREFIX: None, f"{_PREFIX}.train": whole, f"{_PREFIX}.validation": whole}


@dataclass(frozen=True)
class Harness:
    """The settings of lm-eval; a task is a name, or the path of a YAML file."""

    tasks: tuple[str, ...]
    include_path: Path | None
    limit: int | float | None
    batch_size: int | str
    num_fewshot: int | None
    device: str
    dtype: str


@dataclass(frozen=True)
class Evaluation:
    """The measurements of checkpoints.

    Attributes
    ----------
    source
        A checkpoint, or a directory of checkpoints.
    steps
        The steps to measure; empty for the newest.
    follows
        Whether all checkpoints without a result are measured, whatever `steps` says.
    converted
        The directory of a checkpoint in Hugging Face's format; ``{step}`` in it is the step.
    results
        The directory of the results, a file for each step.
    perplexity, harness
        What is measured; None for not at all.
    """

    source: Path
    steps: tuple[int, ...]
    follows: bool
    converted: str | None
    results: Path
    perplexity: Perplexity | None
    harness: Harness | None

    def model_directory(self, step: int) -> Path:
        """Return where the checkpoint of a step is in Hugging Face's format."""
        assert self.converted is not None
        return Path(self.converted.replace("{step}", str(step)))

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
            return self._of(self.source, [single], has_result)
        if not self.source.is_dir():
            raise UserError(f"{_NODE}.source={self.source}: there is no such directory", "node")
        found = store.complete(self.source)
        if not found and (self.source / MARKER).exists():
            raise UserError(f"{_NODE}.source={self.source}: the checkpoint is damaged: {wrong}")
        if not found and not self.follows:
            raise UserError(
                f"{_NODE}.source={self.source}: there is no complete checkpoint; expected the directory of "
                "one, or of several, such as RUN/results/checkpoints"
            )
        return self._of(self.source, found, has_result)

    def _of(
        self, source: Path, found: list[Checkpoint], has_result: Callable[[Checkpoint], bool]
    ) -> list[Checkpoint]:
        # The newest of a step, where a training went back and came by again.
        by_step = {checkpoint.marker.step: checkpoint for checkpoint in found}
        if self.follows:
            return [by_step[step] for step in sorted(by_step) if not has_result(by_step[step])]
        if not self.steps:
            return found[-1:]
        for step in self.steps:
            if step not in by_step:
                there = ", ".join(map(str, sorted(by_step)))
                raise UserError(f"{_NODE}.step={step}: the complete checkpoints in {source} are of {there}")
        return [by_step[step] for step in self.steps]


def read_evaluation(node: Mapping[str, Any]) -> Evaluation:
    """Read the node; no file is opened.

    Raises
    ------
    UserError
        Naming the key, its value and what is valid.
    """
    flat = _checked(node)
    values = Values({f"{_NODE}.{name}": value for name, value in flat.items()})
    perplexity = _perplexity(values) if values.flag(f"{_NODE}.perplexity.enabled", True) else None
    harness = _harness(values)
    if perplexity is None and harness is None:
        raise UserError(
            f"{_NODE}.perplexity.enabled=False and {_NODE}.lm_eval.tasks=[]: there is nothing to measure"
        )
    converted = _text(values, "converted")
    if harness is not None and converted is None:
        raise UserError(
            f"{_NODE}.converted is missing: expected the directory of the model in Hugging Face's format, "
            "which lm-eval loads; {step} in it is the step"
        )
    return Evaluation(
        source=Path(values.text(f"{_NODE}.source")),
        steps=_steps(values),
        follows=values.is_set(f"{_NODE}.every") and values.integer(f"{_NODE}.every", minimum=1) > 0,
        converted=converted,
        results=Path(values.text(f"{_NODE}.results")),
        perplexity=perplexity,
        harness=harness,
    )


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
    """Divide `world` processes; batches are padded to what they take, so that any number fits.

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


def _checked(node: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in flatten(dict(node)).items() if value != {}}
    for name, value in flat.items():
        if name not in _KEYS and name.split(".")[0] not in _LAUNCHER:
            # A node in place of its keys, such as `perplexity: null`, asks for the defaults.
            if value is None and any(key.startswith(f"{name}.") for key in _KEYS):
                continue
            raise UserError(f"{_NODE}.{name}={value!r}: unknown key{suggest(name, _KEYS)}")
    return flat


def _perplexity(values: Values) -> Perplexity:
    node = f"{_NODE}.perplexity"
    batches, layout = f"{node}.batches", {}
    for name in _SIZES:
        if values.is_set(f"{node}.layout.{name}"):
            layout[name] = values.integer(f"{node}.layout.{name}", minimum=1)
    split = values.choice(f"{node}.split", ("validation", "test"), "validation")
    return Perplexity(
        batches=values.integer(batches, minimum=1) if values.is_set(batches) else None,
        split="test" if split == "test" else "validation",
        data_prefix=values.raw(f"{node}.data_prefix"),
        layout=layout,
    )


def _harness(values: Values) -> Harness | None:
    node = f"{_NODE}.lm_eval"
    tasks = values.raw(f"{node}.tasks") or []
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(tasks, list) or not all(isinstance(task, str) and task for task in tasks):
        values.fail(f"{node}.tasks", "a list of names of lm-eval's tasks, or of paths of YAML files")
    if not tasks:
        return None
    include, shots = _text(values, "lm_eval.include_path"), f"{node}.num_fewshot"
    size = f"{node}.batch_size"
    return Harness(
        tasks=tuple(tasks),
        include_path=Path(include) if include else None,
        limit=_limit(values, f"{node}.limit"),
        # Without a number lm-eval tries how many fit into memory.
        batch_size=values.integer(size, minimum=1) if values.is_set(size) else "auto",
        num_fewshot=values.integer(shots, minimum=0) if values.is_set(shots) else None,
        device=values.text(f"{node}.device", "cpu"),
        dtype=values.choice(f"{node}.dtype", DTYPES, "auto"),
    )


def _limit(values: Values, key: str) -> int | float | None:
    """Return the number of documents of a task, or below 1 the share of them."""
    if not values.is_set(key):
        return None
    limit = values.number(key, minimum=0.0)
    if limit == 0 or (limit >= 1 and limit != int(limit)):
        values.fail(key, "a whole number of documents of each task, or a share of them below 1")
    return int(limit) if limit >= 1 else limit


def _steps(values: Values) -> tuple[int, ...]:
    key = f"{_NODE}.step"
    raw = values.raw(key)
    steps = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(type(step) is int and step >= 0 for step in steps):
        values.fail(key, "the step of a checkpoint, a list of them, or null for the newest")
    return tuple(sorted(set(steps)))


def _text(values: Values, name: str) -> str | None:
    key = f"{_NODE}.{name}"
    return values.text(key) if values.is_set(key) else None
