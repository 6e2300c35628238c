"""One training with one fault: launched, held at a step, broken, and launched again as its user would."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.cluster import PREFIX, Cluster, CommandResult, Job, read_journal
from slipway.watch import detectors
from slipway.watch.alerts import Alert, read_alerts

STEPS, EVERY, LINKS = 10, 3, 6
# Seconds that the next step may take, and after which a job that vanished is one for `slipway watch`.
SILENCE, PATIENCE = 30, 3
_CHECKPOINTS = "training.exp_manager.checkpoint_callback_params"
# Dropout, so that a random generator that is not put back shows.
_TRAINING = [
    "cluster=sandbox",
    f"cluster.job_name_prefix={PREFIX}",
    "cluster.partition=low",
    "numa_mapping.enable=False",
    "training=gpt3/tiny",
    f"training.trainer.max_steps={STEPS}",
    "training.trainer.limit_val_batches=0",
    "training.model.micro_batch_size=2",
    "training.model.global_batch_size=4",
    "training.model.encoder_seq_length=32",
    "training.model.max_position_embeddings=32",
    "training.model.num_layers=1",
    "training.model.hidden_size=32",
    "training.model.hidden_dropout=0.1",
    "training.model.attention_dropout=0.1",
    "training.model.data.data_impl=mock",
    "+training.model.override_vocab_size=512",
    f"{_CHECKPOINTS}.every_n_train_steps={EVERY}",
    f"{_CHECKPOINTS}.save_top_k=-1",
    f"resilience.links={LINKS}",
    "watch.tell.every=1",
    f"watch.no_step={{least: {SILENCE}, pause: {SILENCE}, first: 240}}",
]
# Nodes, tasks on each, tensor parallel size.
SHAPES = {"1x1": (1, 1, 1), "1x2": (1, 2, 2), "2x1": (2, 1, 1)}


def warm_up() -> None:
    """Let `slipway watch`, in the process that forks launches, wait for a job's mark for `PATIENCE` alone."""
    detectors._PATIENCE = PATIENCE


@dataclass
class Trial:
    """A run on nodes of its own.

    Attributes
    ----------
    chance
        All random choices are drawn from it, so that a seed repeats them.
    notes
        The choices and actions, for the record.
    torn
        The steps of checkpoints that were damaged.
    is_forgotten
        True if Slurm lost its state: a launch may stay UNKNOWN then.
    overrides
        Those of this run besides those of all.
    right_alerts
        The right alerts where they depend on the moment, else empty: `Fault.alerts`.
    has_stopped
        True if its user had to launch it again after it had run.
    """

    seed: int
    kind: str
    shape: str
    cluster: Cluster
    nodes: list[str]
    chance: random.Random
    run: str = ""
    results: Path = Path()
    notes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    torn: set[int] = field(default_factory=set)
    is_forgotten: bool = False
    launches: int = 0
    down: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    right_alerts: tuple[tuple[str, ...], ...] = ()
    has_stopped: bool = False

    def __post_init__(self) -> None:
        self.run = f"{self.kind}_{self.seed}"
        self.results = self.cluster.results
        self._control = self.cluster.directory / "control" / self.run
        self._control.mkdir(parents=True)
        (self._control / "pace").write_text("0.02")

    # --- what a user does ---

    @property
    def words(self) -> list[str]:
        """Return the command that launches the run."""
        nodes, tasks, tensor = SHAPES[self.shape]
        other_nodes = [
            f"n{number}" for number in range(1, self.cluster.size + 1) if f"n{number}" not in self.nodes
        ]
        overrides = [
            f"training.run.name={self.run}",
            f"base_results_dir={self.results}",
            f"cluster.python={self.cluster.interpreter}",
            f"env_vars.SOAK_CONTROL={self._control}",
            "env_vars.OMP_NUM_THREADS='1'",
            f"training.trainer.num_nodes={nodes}",
            f"training.trainer.devices={tasks}",
            f"training.model.tensor_model_parallel_size={tensor}",
        ]
        excluded = [f"cluster.exclude='{','.join(other_nodes)}'"] if other_nodes else []
        return ["launch", *_TRAINING, *overrides, *self.overrides, *excluded, "--json"]

    def launch(self, **order: Any) -> CommandResult:
        """Launch the run, or launch it again."""
        result = self.cluster.slipway(*self.words, **order)
        self.launches += result.code == 0
        if result.code:
            messages = [line for line in result.stderr.splitlines() if line.startswith("slipway: ")]
            messages = [line.removeprefix("slipway: ") for line in messages if "warning: " not in line]
            self.note(f"launch: exit code {result.code}{': ' + messages[0] if messages else ''}")
        return result

    def status(self) -> dict[str, Any]:
        """Return the row of `slipway status --json`; empty where it lists no such run."""
        result = self.cluster.slipway("status", str(self.run_dir), "--json")
        try:
            rows = json.loads(result.stdout)
        except ValueError:
            return {"state": f"exit code {result.code}: {result.stderr[-300:]}"}
        return rows[0] if rows else {}

    def history(self) -> list[dict[str, Any]]:
        """Return the rows of `slipway history --json`."""
        result = self.cluster.slipway("history", str(self.run_dir), "--json")
        try:
            rows: list[dict[str, Any]] = json.loads(result.stdout)
        except ValueError:
            self.violations.append(f"history: exit code {result.code}: {result.stderr[-300:]}")
            return []
        return rows

    def finish(self, max_launches: int) -> None:
        """Wait for the end of the run; launch it again, at most so often, as long as it is not completed."""
        for turn in range(max_launches + 3):
            self.until_over()
            row = self.status()
            if row.get("state") == "COMPLETED" and row.get("step") == STEPS:
                break
            self.note(f"ended {row.get('state')} at step {row.get('step')}: {row.get('reason')}")
            if self.is_done() and not self.is_forgotten:
                self.violations.append(f"it is done, and status says {row.get('state')}: {row.get('reason')}")
            if row.get("state") == "CANCELLED" and max_launches == 0 and not self.is_forgotten:
                self.violations.append(f"nobody cancelled it, and status says CANCELLED: {row.get('reason')}")
            self.watch()
            if self.journal():
                self.has_stopped = True
                if not any(alert.is_open for alert in self.alerts()):
                    self.violations.append("it has stopped, and no alert is open")
            if turn == max_launches:
                self.violations.append(
                    f"needs a further launch by hand: {row.get('state')}: {row.get('reason')}"
                )
            self.launch()
        else:
            self.violations.append("never completes, launched again and again")

    def watch(self) -> None:
        """Run `slipway watch` twice, as cron would; a job that vanished is one for it the second time."""
        for pause in (0, PATIENCE + 1):
            time.sleep(pause)
            result = self.cluster.slipway("watch", str(self.run_dir))
            line = (result.stdout + result.stderr).partition("\n")[0]
            self.note(f"watch: exit code {result.code}: {line}")

    def alerts(self) -> list[Alert]:
        """Return the alerts of the run."""
        return read_alerts(self.run_dir)

    # --- waiting ---

    @property
    def run_dir(self) -> Path:
        return self.results / self.run

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def events(self) -> list[dict[str, Any]]:
        """Return rank 0's reports of all launches, in order; a kill or a full disk may have cut a line."""
        launches = self.run_dir / "launches"
        numbers = sorted(int(path.name) for path in launches.glob("[1-9]*")) if launches.is_dir() else []
        events = []
        for number in numbers:
            path = launches / str(number) / "results" / "metrics.jsonl"
            for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
                with suppress(ValueError):
                    events.append(json.loads(line))
        return events

    def is_done(self) -> bool:
        """Return True if the trainer reported its last step and the save of it."""
        return any(event["kind"] == "end" and event["step"] == STEPS for event in self.events())

    def live_jobs(self, fresh: int = 0) -> list[Job]:
        """Return the jobs of the run that wait or run."""
        return [job for job in self.cluster.jobs(self.run, fresh) if job.is_live]

    def jobs_at_last(self) -> list[Job]:
        """Return the jobs of the run, as Slurm reports them now."""
        return self.cluster.jobs(self.run, fresh=2)

    def until_over(self) -> None:
        """Wait until no job of the run is left."""
        deadline = time.monotonic() + 300
        while jobs := self.live_jobs(fresh=2):
            if time.monotonic() > deadline:
                self.violations.append(f"does not end: {jobs}")
                for job in jobs:
                    self.cluster.slurm("scancel", job.id)
                deadline += 60

    def until_gone(self, job: str) -> None:
        self.cluster.until(
            f"{job} is gone",
            lambda: all(entry.id != job or entry.state == "PENDING" for entry in self.live_jobs(2)),
        )

    def hold(self, step: int, *, deaf: bool = False) -> None:
        """Hold the training once it has done a step; `deaf`: also when it is asked to stop."""
        if deaf:
            (self._control / "deaf").write_text("1")
        (self._control / "hold").write_text(str(step))
        self.note(f"after step {step}{', deaf' if deaf else ''}")

    def order(self, word: str, number: int) -> None:
        """Let every link `crash` or `diverge` after a step, or `load` for some seconds, until the release."""
        (self._control / word).write_text(str(number))
        self.note(f"{word} {number}")

    def release(self) -> None:
        """Let the training go on."""
        for name in ("hold", "deaf", "at", "crash", "diverge", "load"):
            (self._control / name).unlink(missing_ok=True)

    def wait_until_held(self) -> str:
        """Wait until the training is held; return its job."""
        held_file = self._control / "at"
        self._wait("is held", lambda: held_file.exists() and held_file.read_text())
        return held_file.read_text()

    def ranks(self) -> list[tuple[str, int]]:
        """Return the job and the process of each rank that runs."""
        running: dict[int, str] = {}
        for line in self.journal():
            if line["event"] == "begin":
                running[line["pid"]] = line["job"]
            else:
                running.pop(line["pid"], None)
        return [(job, pid) for pid, job in running.items()]

    def journal(self) -> list[dict[str, Any]]:
        """Return the journal lines of this run's ranks."""
        return [line for line in read_journal(self.cluster) if line["control"] == str(self._control)]

    def moment(self, *, earliest: int = 0, deaf: bool = False) -> str:
        """Launch the run and wait for the moment that the seed says; return the job that runs then."""
        phase = self.chance.choice(("starting", "held", "held", "moving"))
        step = self.chance.randrange(earliest, STEPS)
        delay = self.chance.uniform(0, 0.5)
        if deaf or earliest:
            phase = "held"
        if phase == "starting":
            self.note(f"{delay:.2f} s after the ranks began")
            self.launch()
            self._wait("trains", self.journal)
            time.sleep(delay)
            return str(self.journal()[-1]["job"])
        self.hold(step, deaf=deaf)
        self.launch()
        job = self.wait_until_held()
        if phase == "moving":
            self.note(f"{delay:.2f} s later")
            self.release()
            time.sleep(delay)
        return job

    def _wait(self, description: str, condition: Any) -> None:
        def is_over() -> bool:
            if condition():
                return True
            if not self.live_jobs(fresh=2) and not condition():
                raise RuntimeError(f"no job is left, and in vain: {description}")
            return False

        self.cluster.until(f"{self.run} {description}", is_over)

    # --- breaking ---

    def note(self, text: str) -> None:
        self.notes.append(text)

    def kill(self, pid: int | None, description: str) -> None:
        """Kill a process with SIGKILL, unless it has just ended by itself."""
        try:
            if pid is None:
                raise ProcessLookupError
            os.kill(pid, signal.SIGKILL)
            self.note(f"killed {description}")
        except ProcessLookupError:
            self.note(f"{description} was gone")

    def kill_a_rank(self) -> None:
        ranks = sorted(pid for _, pid in self.ranks())
        self.kill(self.chance.choice(ranks) if ranks else None, "a rank")

    def nodes_of(self, job: str) -> list[str]:
        hostlist = next((entry.nodes for entry in self.live_jobs(fresh=2) if entry.id == job), "")
        return self.cluster.slurm("scontrol", "show", "hostnames", hostlist).split() if hostlist else []
