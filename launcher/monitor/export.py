"""The export of a run to a tracker: one run there over all launches, forked where the training went back."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import WENT_WRONG, UserError, end_of
from launcher.jobs.launches import Launch, readable_launches
from launcher.monitor.provenance_report import changes_between, provenance
from launcher.monitor.readers import LogsReader, open_reader
from launcher.runs.manifest import read_yaml
from launcher.runs.trust import is_own
from launcher.secrecy import hidden, printable
from slipway.common.extras import install_command
from slipway.common.node.events import Event, EventReader, Start, Train, Validation

_PROVENANCE = (
    *("run", "run_dir", "user", "host", "version", "git_commit", "git_dirty", "image", "image_digest"),
    *("engine", "nodes", "tasks_per_node", "created", "tag", "jobs"),
)
_METRICS = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
_LONGEST_NAME = 100
_PROJECT = "slipway"
# Seconds for an answer at the beginning, and for the upload of all that is left at the end.
_BEGIN_SECONDS, _END_SECONDS = 30, 600


class ExportError(UserError):
    """The tracker refused or did not answer; the export can be repeated."""

    exit_code = WENT_WRONG


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of the tracker, which begins with a launch; a fork leaves its parent after a step."""

    key: str
    name: str
    launch: Launch = field(repr=False)
    parent: str | None = None
    parent_step: int | None = None

    def describe(self) -> dict[str, Any]:
        """Return the configuration and the provenance with secrets masked."""
        try:
            config = read_yaml(self.launch.paths.root_config)
        except (OSError, ValueError):
            config = {}
        record = provenance(self.launch)
        ours = {name: record[name] for name in _PROVENANCE} | {"launch": self.launch.paths.number}
        ours |= {"parent": self.parent, "parent_step": self.parent_step} if self.parent else {}
        return {name: hidden(name, value) for name, value in {**config, "slipway": ours}.items()}


# The values of a step by their names, after the step and its time in Unix seconds.
Row = tuple[int, float, dict[str, float]]


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
        """Begin or continue the run of a branch; return the last step there, or -1."""
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
        step, time, values = row
        self._run.log({**values, "_timestamp": time}, step=step)

    def flush(self) -> None:
        """Leave the upload to wandb's own process."""

    def close(self) -> str:
        """End the run; return where to look at it."""
        run, directory = self._run, Path(self._run.settings.sync_dir)
        run.finish()
        if not run.offline:
            return str(run.url)
        # An upload begins with the first step: an earlier one would replace what this one uploads. The file
        # is whole once wandb's process has ended.
        self._wandb.teardown()
        for earlier in directory.parent.glob(f"offline-run-*-{run.id}*"):
            if earlier.name != directory.name and is_own(earlier):
                shutil.rmtree(earlier)
        return f"{directory} (to upload it: wandb sync {directory})"


# Tags: of a branch; its last step that was sent, and the one up to which steps are being sent.
_KEY, _SENT, _SENDING = "slipway.key", "slipway.sent", "slipway.sending"
# MLflow's limits of a request and of a value.
_MOST_ROWS, _MOST_PARAMS, _LONGEST_VALUE = 1000 // (len(_METRICS) + 1), 100, 500


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
        for begin in range(0, len(params), _MOST_PARAMS):
            items = [self._mlflow.entities.Param(*pair) for pair in params[begin : begin + _MOST_PARAMS]]
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
        if len(self._rows) >= _MOST_ROWS:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        metrics = [
            self._mlflow.entities.Metric(name, value, round(time * 1000), step)
            for step, time, values in rows
            for name, value in values.items()
            if (name, step) not in self._known
        ]
        if rows:
            self._client.set_tag(self._id, _SENDING, str(rows[-1][0]))
            self._client.log_batch(self._id, metrics=metrics)
            self._client.set_tag(self._id, _SENT, str(rows[-1][0]))

    def close(self) -> str:
        self.flush()
        self._client.set_terminated(self._id)
        return f"run {self._id} in {printable(self._mlflow.get_tracking_uri())}"


TRACKERS: dict[str, type[WandbTracker] | type[MlflowTracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


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


class Exporter:
    """The export of a run, each step once; `exported` has a sentence about each branch."""

    def __init__(self, run_dir: Path, tracker: WandbTracker | MlflowTracker) -> None:
        self.exported: list[str] = []
        self._run_dir, self._tracker = run_dir, tracker
        self._readers: dict[int, EventReader | LogsReader] = {}
        self._before: Launch | None = None
        self._is_other = False
        self._branch: Branch | None = None
        # The last step of the branch, its last one in the tracker, and the number of new ones.
        self._last = self._there = -1
        self._new = 0
        self._row: Row | None = None

    def take_new(self, *, is_over: bool) -> None:
        """Export the steps since the last call; of a run that goes on the last waits, for its validation."""
        for launch in readable_launches(self._run_dir):
            number = launch.paths.number
            if launch.manifest.job_id is None or launch.manifest.stage != "training":
                continue
            if number not in self._readers:
                self._readers[number] = open_reader(launch)
                self._is_other |= self._before is not None and _is_other_training(self._before, launch)
                self._before = launch
            for event in self._readers[number].stream():
                self._take(event, launch)
        if is_over:
            self._pass_on()
        if self._branch is not None:
            self._tracker.flush()

    def close(self) -> None:
        """End the branch that is open, if one is."""
        if self._branch is not None:
            where = self._tracker.close()
            self.exported.append(f"{self._branch.name}: {self._new} new steps, up to {self._last}: {where}")

    def _take(self, event: Event, launch: Launch) -> None:
        if isinstance(event, Start):
            self._pass_on()
            if self._branch is None or (self._is_other and event.step < self._last):
                self.close()
                parent, self._branch = self._branch, None
                branch = _begin_branch(launch, parent, event.step)
                self._there, self._new = self._tracker.open(branch), 0
                self._branch, self._last = branch, event.step if parent else -1
            self._is_other = False
        # A later link repeats what a crash lost, which is there already.
        if isinstance(event, Train | Validation) and self._branch and event.step > self._last:
            if self._row is not None and self._row[0] != event.step:
                self._pass_on()
            self._row = self._row or (event.step, event.time, {})
            if isinstance(event, Validation):
                self._row[2]["validation/loss"] = event.loss
            else:
                values = {f"train/{name}": getattr(event, name) for name in _METRICS}
                self._row[2].update((name, value) for name, value in values.items() if value is not None)

    def _pass_on(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            self._last = row[0]
            if self._last > self._there:
                self._tracker.log(row)
                self._new += 1


def _begin_branch(launch: Launch, parent: Branch | None, step: int) -> Branch:
    manifest = launch.manifest
    # A tag is of one launch alone, on every cluster; a copy of the run keeps it.
    key = hashlib.sha256(f"{manifest.run}\0{manifest.tag}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    name = printable(manifest.run)[:_LONGEST_NAME]
    if parent is None:
        return Branch(key, name, launch)
    return Branch(key, f"{name} from step {step}, launch {launch.paths.number}", launch, parent.key, step)


def _is_other_training(before: Launch, launch: Launch) -> bool:
    """Return True if a launch is another training than the one before, or intervenes in it."""
    changes = changes_between(before.manifest.overrides, launch.manifest.overrides)
    words = (*changes.added, *changes.removed, *changes.changed)
    return launch.manifest.differs is not None or any("training.resume." in word for word in words)
