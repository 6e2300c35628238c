"""Tasks of EleutherAI's lm-eval (Gao et al. 2024, zenodo.12608602) on a model in Hugging Face's format."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError, suggest
from slipway.common.sections import LmEval
from slipway.trainer import requirements
from slipway.trainer.checkpoint.files import text_checksum

_KEY = "evaluation.lm_eval"
# What accelerate would take for ranks to wait for: lm-eval runs in one process.
_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_LIBRARIES = ("lm_eval", "transformers", "accelerate")
PACKAGES = ("lm_eval", "transformers", "datasets", "accelerate")
_NO_ERROR = "N/A"


@dataclass(frozen=True)
class Outcome:
    """The metrics of tasks by name, and the provenance of each requested task."""

    metrics: dict[str, dict[str, Any]]
    provenance: dict[str, dict[str, Any]]


class Tasks:
    """The tasks of a configuration, loaded once for all models that are measured.

    Raises
    ------
    UserError
        If a library is missing, or a task is unknown or cannot be loaded.
    """

    def __init__(self, harness: LmEval) -> None:
        requirements.check(_LIBRARIES, extra="evaluation")
        for task in harness.tasks:
            if _is_file(task) and not Path(task).is_file():
                raise UserError(f"{_KEY}.tasks={task}: there is no such file")
        self._harness, include = harness, harness.include_path
        if include is not None and not include.is_dir():
            raise UserError(f"{_KEY}.include_path={include}: there is no such directory")
        _prepare_environment()
        from lm_eval.tasks import TaskManager

        own = [str(include)] if include else None
        # The index of lm-eval's own tasks takes a while: it reads 14,000 files.
        self._manager = TaskManager(include_path=own, include_defaults=False)
        if not all(self._is_known(task) for task in harness.tasks):
            self._manager = TaskManager(include_path=own)
        self._loaded = {task: self._load(task) for task in harness.tasks}

    def _is_known(self, task: str) -> bool:
        return _is_file(task) or task in self._manager.all_tasks

    def _load(self, task: str) -> list[Any]:
        """Return the task, or the group, or the tasks of a tag."""
        if not self._is_known(task):
            raise UserError(
                f"{_KEY}.tasks={task}: lm-eval has no such task{suggest(task, self._manager.all_tasks)}; "
                f"expected one of `lm-eval ls tasks`, one of {_KEY}.include_path, or a YAML file"
            )
        try:
            loaded = self._manager.load([task])
        except Exception as error:
            # Of a task's file, of its data, or of the network on the way to them.
            line = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"{_KEY}.tasks={task}: lm-eval cannot load it: {type(error).__name__}: {line}"
            ) from error
        members = {name for names in loaded.get("group_map", {}).values() for name in names}
        groups = [group for name, group in loaded.get("groups", {}).items() if name not in members]
        return groups or list(loaded["tasks"].values())

    def measure(self, model: Path, tasks: Iterable[str]) -> Outcome:
        """Return the metrics of requested tasks on a model in Hugging Face's format."""
        import lm_eval

        harness, requested, began = self._harness, list(tasks), time.perf_counter()
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": harness.dtype},
            tasks=[task for name in requested for task in self._loaded[name]],
            num_fewshot=harness.num_fewshot,
            limit=harness.limit,
            # Without a number lm-eval tries how many fit into memory.
            batch_size=harness.batch_size or "auto",
            device=harness.device or "cpu",
            task_manager=self._manager,
            log_samples=False,
        )
        assert results is not None, "one process is the first rank"
        seconds = time.perf_counter() - began
        return Outcome(
            {task: _metrics(values) for task, values in results["results"].items()},
            {task: self._provenance(results, task, model, seconds) for task in requested},
        )

    def _provenance(
        self, results: Mapping[str, Any], task: str, model: Path, seconds: float
    ) -> dict[str, Any]:
        names = {name for item in self._loaded[task] for name in _names(item)}
        return {
            "conditions": conditions(self._harness, task, model),
            "model": str(model),
            "device": self._harness.device or "cpu",
            "metrics": sorted(names & results["results"].keys()),
            "documents": {
                name: counts["effective"] for name, counts in results["n-samples"].items() if name in names
            },
            "task_versions": {
                name: version for name, version in results["versions"].items() if name in names
            },
            "seconds_together": round(seconds, 1),
        }


def conditions(harness: LmEval, task: str, model: Path) -> dict[str, Any]:
    """Return the settings, besides the weights, that determine the metrics of a task."""
    found: dict[str, Any] = {
        "num_fewshot": harness.num_fewshot,
        "limit": harness.limit,
        "dtype": harness.dtype,
        "converted": str(model),
    }
    if _is_file(task) and Path(task).is_file():
        found["definition"] = text_checksum(Path(task).read_text(encoding="utf-8"))
    return found


def format_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each metric: ``task | metric value ± standard error``."""
    found = []
    for task, values in metrics.items():
        for name, value in values.items():
            base, _, variant = name.partition(",")
            if base.endswith("_stderr") or not isinstance(value, float | int):
                continue
            error = values.get(f"{base}_stderr,{variant}" if variant else f"{base}_stderr")
            spread = f" ± {error:.4f}" if isinstance(error, float | int) else ""
            found.append(f"{task} | {name} {value:.4f}{spread}")
    return found


def _names(item: Any) -> Iterator[str]:
    """Yield the names of a task of lm-eval's, or of a group and all that is in it."""
    if hasattr(item, "task_name"):
        yield item.task_name
        return
    yield item.name
    for member in item:
        yield from _names(member)


def _metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a task; lm-eval writes a filter behind each name, mostly ``none``."""
    kept = {name: value for name, value in values.items() if "," in name and value != _NO_ERROR}
    return {name.removesuffix(",none"): float(value) for name, value in kept.items()}


def _prepare_environment() -> None:
    for name in _WORLD:
        os.environ.pop(name, None)
    if not sys.stderr.isatty():
        # Progress bars are for terminals; a log would have each of their states. lm-eval's own cannot be
        # switched off, and say now and then how far it is.
        os.environ.setdefault("TQDM_MININTERVAL", "60")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))
