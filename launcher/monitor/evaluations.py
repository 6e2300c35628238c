"""The evaluations of a run's checkpoints, which jobs write as ``RUN/evaluations/step-N.json``."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import escape
from launcher.runs.paths import CHECKPOINTS, EVALUATIONS
from launcher.runs.trained import find_marked_checkpoints, newest_training, node
from launcher.ui import tables
from slipway.common.files import names_in, read_json

_NAME = re.compile(r"step-(\d{1,15})\.json", re.ASCII)
_STDERR = "_stderr"
# The identity of a checkpoint's weights, with defaults for checkpoints that do not record it.
_WEIGHTS: Mapping[str, Any] = {"training": "", "serial": 0, "step": 0, "checksums": {}}
# A task's most telling metrics, in this order; others are in the files.
_MAIN = ("acc_norm", "acc", "exact_match", "f1", "word_perplexity", "perplexity")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of one checkpoint.

    `loss` is that of the held-out data in nats per token, None if it was not measured. `metrics` has the main
    metric of each task of lm-eval: its name, its value, and its standard error or None. An abandoned one is
    of weights from which the training went back.
    """

    step: int
    loss: float | None
    metrics: Mapping[str, tuple[str, float, float | None]]
    is_abandoned: bool = False

    @property
    def perplexity(self) -> float | None:
        return math.exp(self.loss) if self.loss is not None and self.loss < 700 else None

    def to_json(self) -> dict[str, Any]:
        """Return the results for programs."""
        names = ("metric", "value", "stderr")
        metrics = {task: dict(zip(names, values, strict=True)) for task, values in self.metrics.items()}
        numbers = {"step": self.step, "loss": self.loss, "perplexity": self.perplexity}
        return {**numbers, "lm_eval": metrics, "abandoned": self.is_abandoned}


# Where trainers began: the step, and the time in Unix seconds. Each forgot the later steps taken before.
Starts = Iterable[tuple[int, float]]


def read_evaluations(run_dir: Path, starts: Starts = ()) -> list[Evaluation]:
    """Return the evaluations of a run in the order of their steps; what cannot be read is left out.

    `starts` are those of the run's trainers.
    """
    directory, evaluations = run_dir / EVALUATIONS, []
    steps = sorted(int(match[1]) for match in map(_NAME.fullmatch, names_in(directory)) if match)
    starts, saved = tuple(starts), _read_save_times(run_dir) if steps else {}
    for step in steps:
        with contextlib.suppress(OSError, ValueError):
            path = directory / f"step-{step}.json"
            content, time = read_json(path), path.stat().st_mtime
            tasks = node(content, "lm_eval")
            mains = [(escape(task), _main_metric(node(tasks, task))) for task in tasks]
            metrics = {task: main for task, main in mains if main is not None}
            digest, there = str(node(content, "provenance").get("weights") or ""), saved.get(step, {})
            # The newest checkpoint of a step is that of the training that goes on.
            is_other = bool(digest and there) and digest != next(reversed(there))
            time = there.get(digest, time)
            is_abandoned = is_other or any(step > start and time < began for start, began in starts)
            loss = _to_finite_float(node(content, "perplexity").get("loss"))
            evaluations.append(Evaluation(step, loss, metrics, is_abandoned))
    return evaluations


def _read_save_times(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return when a run's checkpoints were complete, by their steps and their weights' digests, oldest first.

    The digest is that of slipway/trainer/evaluation/results.py, `weights_digest`.
    """
    training, saved = newest_training(run_dir), dict[int, dict[str, float]]()
    with contextlib.suppress(OSError):
        for item in find_marked_checkpoints(training.checkpoints if training else run_dir / CHECKPOINTS):
            parts = [item.content.get(key, empty) for key, empty in _WEIGHTS.items()]
            digest = f"{zlib.crc32(json.dumps(parts).encode()):08x}"
            saved.setdefault(item.step, {})[digest] = item.time
    return saved


def _main_metric(values: Mapping[str, Any]) -> tuple[str, float, float | None] | None:
    numbers = {name: number for name in values if (number := _to_finite_float(values[name])) is not None}
    names = [*_MAIN, *sorted(numbers)]
    main = next((name for name in names if name in numbers and not name.endswith(_STDERR)), None)
    return (escape(main), numbers[main], numbers.get(f"{main}{_STDERR}")) if main is not None else None


def _to_finite_float(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def evaluation_table(evaluations: Sequence[Evaluation]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of a table: a row for each checkpoint, a column for each task."""
    metrics: dict[str, str] = {}  # of each task that of the first evaluation with it
    for item in evaluations:
        metrics |= {task: main[0] for task, main in item.metrics.items() if task not in metrics}
    columns = ("STEP", "HELD-OUT LOSS", "PERPLEXITY", *map(" ".join, metrics.items()))
    rows = []
    for item in evaluations:
        perplexity = tables.text(None if item.perplexity is None else f"{item.perplexity:.2f}")
        cells = (_cell(item, task, metric) for task, metric in metrics.items())
        step = f"{item.step}, abandoned" if item.is_abandoned else str(item.step)
        rows.append((step, tables.loss(item.loss), perplexity, *cells))
    return columns, rows


def _cell(evaluation: Evaluation, task: str, metric: str) -> str:
    name, value, stderr = evaluation.metrics.get(task, ("", 0.0, None))
    if name != metric:
        return tables.UNKNOWN
    return f"{value:.4f}" + (f" ± {stderr:.4f}" if stderr is not None else "")


def progress_rows(evaluations: Sequence[Evaluation]) -> list[tuple[str, str]]:
    """Return a line for each measure: its first and its last value over the checkpoints."""
    series: dict[str, list[tuple[int, float]]] = {}
    for evaluation in (item for item in evaluations if not item.is_abandoned):
        if evaluation.loss is not None:
            series.setdefault("evaluated loss", []).append((evaluation.step, evaluation.loss))
        for task, (metric, value, _) in evaluation.metrics.items():
            series.setdefault(f"{task} {metric}", []).append((evaluation.step, value))
    rows = []
    for name, points in series.items():
        (first_step, first), (last_step, last) = points[0], points[-1]
        progress = f"{first:.4f} → {last:.4f}, steps {first_step} to {last_step}, {len(points)} checkpoints"
        rows.append((name, progress if len(points) > 1 else f"{last:.4f} at step {last_step}"))
    return rows
