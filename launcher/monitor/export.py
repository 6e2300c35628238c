"""The steps of a run for trackers: as one run of theirs over all launches, forked where the run went back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launcher.jobs.launches import Launch, readable_launches
from launcher.monitor.provenance_report import changes_between, provenance
from launcher.monitor.readers import LogsReader, open_reader
from launcher.runs.manifest import read_yaml
from launcher.secrecy import hidden, printable
from slipway.common.node.events import Event, EventReader, Start, Train, Validation

_PROVENANCE = (
    *("run", "run_dir", "user", "host", "version", "git_commit", "git_dirty", "image", "image_digest"),
    *("engine", "nodes", "tasks_per_node", "created", "tag", "jobs"),
)
_LONGEST_NAME = 100


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


@dataclass(slots=True)
class Row:
    """The values of a step, at `time` in Unix seconds."""

    step: int
    time: float
    values: dict[str, float]


class Tracker(Protocol):
    """A tracker: `open` begins or continues the run of a branch and returns the last step there, or -1.

    `close` ends that run and returns where to look at it.
    """

    def open(self, branch: Branch) -> int: ...

    def log(self, row: Row) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> str: ...


class Exporter:
    """The export of a run, each step once; `exported` has a sentence about each branch."""

    def __init__(self, run_dir: Path, tracker: Tracker) -> None:
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
            if self._row is not None and self._row.step != event.step:
                self._pass_on()
            self._row = self._row or Row(event.step, event.time, {})
            self._row.values |= _values(event)

    def _pass_on(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            self._last = row.step
            if row.step > self._there:
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


def _values(event: Train | Validation) -> dict[str, float]:
    if isinstance(event, Validation):
        return {"validation/loss": event.loss}
    names = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
    return {f"train/{name}": value for name in names if (value := getattr(event, name)) is not None}
