"""The trackers that runs are exported to, Weights & Biases and MLflow, each by its library and settings."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import WENT_WRONG, UserError, end_of
from launcher.monitor.export import Branch, Row, Tracker
from launcher.runs.trust import is_own
from launcher.secrecy import printable
from slipway.common.extras import install_command

_PROJECT = "slipway"
# Seconds for an answer at the beginning, and for the upload of all that is left at the end.
_BEGIN_SECONDS, _END_SECONDS = 30, 600


class ExportError(UserError):
    """The tracker refused or did not answer; the export can be repeated."""

    exit_code = WENT_WRONG


class WandbTracker:
    """Weights & Biases, which numbers its rows by steps; offline a run is written as a whole each time."""

    def __init__(self) -> None:
        self._wandb = _import("wandb")
        self._run: Any = None
        # This machine and this process are not the training's.
        kinds = ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta", "x_disable_machine_info")
        settings = dict.fromkeys((*kinds, "silent", "finish_timeout_raises"), True)
        limits = {"init_timeout": _BEGIN_SECONDS, "finish_timeout": _END_SECONDS}
        others = {"console": "off", "x_save_requirements": False}
        self._settings = self._wandb.Settings(**settings, **limits, **others)

    def open(self, branch: Branch) -> int:
        self._run = self._wandb.init(
            id=branch.key,
            resume="allow",
            name=branch.name,
            group=printable(branch.launch.manifest.run)[:100],
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            config=branch.describe(),
            settings=self._settings,
        )
        return int(self._run.starting_step) - 1

    def log(self, row: Row) -> None:
        self._run.log({**row.values, "_timestamp": row.time}, step=row.step)

    def flush(self) -> None:
        """Leave the upload to wandb's own process."""

    def close(self) -> str:
        run, directory = self._run, Path(self._run.settings.sync_dir)
        run.finish()
        if not run.offline:
            return str(run.url)
        # An upload begins with the first step: an earlier file's would replace the newest one's, which is whole
        # once wandb's process has ended.
        self._wandb.teardown()
        for earlier in directory.parent.glob(f"offline-run-*-{run.id}*"):
            if earlier.name != directory.name and is_own(earlier):
                shutil.rmtree(earlier)
        return f"{directory} (to upload it: wandb sync {directory})"


# Tags: of a branch; its last step that was sent, and the one up to which steps are being sent.
_KEY, _SENT, _SENDING = "slipway.key", "slipway.sent", "slipway.sending"
# MLflow's limits of a request and of a value.
_MOST_METRICS, _MOST_PARAMS, _LONGEST_VALUE = 1000, 100, 500


class MlflowTracker:
    """MLflow, which keeps each value as often as it is sent: tags of its run say how far that is."""

    def __init__(self) -> None:
        # Its own patience is minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_BEGIN_SECONDS))
        self._mlflow = _import("mlflow", "mlflow.tracking")
        self._client = self._mlflow.tracking.MlflowClient()
        self._ids: dict[str, str] = {}
        self._id = ""
        self._rows: list[Row] = []
        self._known: set[tuple[str, int]] = set()

    def open(self, branch: Branch) -> int:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {_KEY: branch.key}
        if branch.parent is not None:
            tags |= {"slipway.parent": branch.parent, "slipway.parent_step": str(branch.parent_step)}
            tags |= {"mlflow.parentRunId": self._ids[branch.parent]}
        runs = self._client.search_runs([number], f"tags.`{_KEY}` = '{branch.key}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(number, run_name=branch.name, tags=tags)
        self._id = self._ids[branch.key] = run.info.run_id
        params = [pair for pair in _flatten(branch.describe()) if pair[0] not in run.data.params]
        for some in _parts(params, _MOST_PARAMS):
            items = [self._mlflow.entities.Param(*pair) for pair in some]
            self._client.log_batch(self._id, params=items)
        sent = run.data.tags.get(_SENT, "-1")
        self._known = set()
        if run.data.tags.get(_SENDING, sent) != sent:  # an export was interrupted
            for key in run.data.metrics:
                history = self._client.get_metric_history(self._id, key)
                self._known |= {(key, metric.step) for metric in history}
        return int(sent)

    def log(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= _MOST_METRICS:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        metrics = [
            self._mlflow.entities.Metric(name, value, round(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
            if (name, row.step) not in self._known
        ]
        if rows:
            self._client.set_tag(self._id, _SENDING, str(rows[-1].step))
            for some in _parts(metrics, _MOST_METRICS):
                self._client.log_batch(self._id, metrics=some)
            self._client.set_tag(self._id, _SENT, str(rows[-1].step))

    def close(self) -> str:
        self.flush()
        self._client.set_terminated(self._id)
        return f"run {self._id} in {printable(self._mlflow.get_tracking_uri())}"


TRACKERS: Mapping[str, type[Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


def _import(name: str, *modules: str) -> Any:
    try:
        return [importlib.import_module(module) for module in (*modules, name)][-1]
    except ImportError as error:
        hint = install_command(name)
        raise UserError(f"--to {name} needs {error.name}, which is not installed", hint=hint) from error


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Raise the errors of a tracker's library as one that the user can act on."""
    try:
        yield
    except Exception as error:
        library = type(error).__module__.partition(".")[0]
        is_of_network = isinstance(error, OSError) and error.filename is None
        if library not in (name, "sqlalchemy") and not is_of_network:
            raise
        message = end_of(" ".join(printable(str(error) or repr(error)).split()))
        raise ExportError(f"{name}: {message}", hint="the same command goes on from where it was") from error


def _flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a configuration by their dotted keys, as MLflow takes them."""
    for name, value in node.items():
        key = f"{prefix}{re.sub(r'[^A-Za-z0-9_./ -]', '_', str(name))}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{key}.")
        else:
            yield key[: _LONGEST_VALUE // 2], str(value)[:_LONGEST_VALUE]


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
