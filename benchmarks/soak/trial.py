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

from benchmarks.soak.cluster import PREFIX, Cluster, Done, Job, read_journal

STEPS, EVERY, LINKS = 10, 3, 6
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
]
# Nodes, tasks on each, tensor parallel size.
SHAPES = {"1x1": (1, 1, 1), "1x2": (1, 2, 2), "2x1": (2, 1, 1)}


@dataclass
class Trial:
    """A run on nodes of its own.

    Attributes
    ----------
    chance
        What is left to chance is drawn from it, so that a seed says all of it.
    notes
        What was drawn and done, for the record.
    torn
        The steps of checkpoints that were damaged.
    is_forgotten
        Whether Slurm lost what it knew: a launch may stay UNKNOWN then.
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
        others = [
            f"n{number}" for number in range(1, self.cluster.size + 1) if f"n{number}" not in self.nodes
        ]
        own = [
            f"training.run.name={self.run}",
            f"base_results_dir={self.results}",
            f"cluster.python={self.cluster.interpreter}",
            f"env_vars.SOAK_CONTROL={self._control}",
            "env_vars.OMP_NUM_THREADS='1'",
            f"training.trainer.num_nodes={nodes}",
            f"training.trainer.devices={tasks}",
            f"training.model.tensor_model_parallel_size={tensor}",
        ]
        excluded = [f"cluster.exclude='{','.join(others)}'"] if others else []
        return ["launch", *_TRAINING, *own, *excluded, "--json"]

    def launch(self, **order: Any) -> Done:
        """Launch the run, or launch it again."""
        done = self.cluster.slipway(*self.words, **order)
        self.launches += done.code == 0
        if done.code:
            told = [line for line in done.stderr.splitlines() if line.startswith("slipway: ")]
            told = [line.removeprefix("slipway: ") for line in told if "warning: " not in line]
            self.note(f"launch: exit code {done.code}{': ' + told[0] if told else ''}")
        return done

    def status(self) -> dict[str, Any]:
        """Return the row of `slipway status --json`; empty where it tells of no such run."""
        done = self.cluster.slipway("status", str(self.run_dir), "--json")
        try:
            rows = json.loads(done.stdout)
        except ValueError:
            return {"state": f"exit code {done.code}: {done.stderr[-300:]}"}
        return rows[0] if rows else {}

    def history(self) -> list[dict[str, Any]]:
        """Return the rows of `slipway history --json`."""
        done = self.cluster.slipway("history", str(self.run_dir), "--json")
        try:
            rows: list[dict[str, Any]] = json.loads(done.stdout)
        except ValueError:
            self.violations.append(f"history: exit code {done.code}: {done.stderr[-300:]}")
            return []
        return rows

    def finish(self, most: int) -> None:
        """Wait for the end of the run; launch it again, at most so often, as long as it is not completed."""
        for turn in range(most + 3):
            self.until_over()
            row = self.status()
            if row.get("state") == "COMPLETED" and row.get("step") == STEPS:
                break
            self.note(f"ended {row.get('state')} at step {row.get('step')}: {row.get('reason')}")
            if self.is_done() and not self.is_forgotten:
                self.violations.append(f"it is done, and status says {row.get('state')}: {row.get('reason')}")
            if row.get("state") == "CANCELLED" and most == 0 and not self.is_forgotten:
                self.violations.append(f"nobody cancelled it, and status says CANCELLED: {row.get('reason')}")
            if turn == most:
                self.violations.append(
                    f"needs a further launch by hand: {row.get('state')}: {row.get('reason')}"
                )
            self.launch()
        else:
            self.violations.append("never completes, launched again and again")

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
        found = []
        for number in numbers:
            path = launches / str(number) / "results" / "metrics.jsonl"
            for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def is_done(self) -> bool:
        """Return True if the trainer reported its last step and the save of it."""
        return any(event["kind"] == "end" and event["step"] == STEPS for event in self.events())

    def live(self, fresh: int = 0) -> list[Job]:
        """Return the jobs of the run that wait or run."""
        return [job for job in self.cluster.jobs(self.run, fresh) if job.is_live]

    def jobs_at_last(self) -> list[Job]:
        """Return the jobs of the run, as Slurm reports them now."""
        return self.cluster.jobs(self.run, fresh=2)

    def until_over(self) -> None:
        """Wait until no job of the run is left."""
        deadline = time.monotonic() + 300
        while left := self.live(fresh=2):
            if time.monotonic() > deadline:
                self.violations.append(f"does not end: {left}")
                for job in left:
                    self.cluster.slurm("scancel", job.id)
                deadline += 60

    def until_gone(self, job: str) -> None:
        self.cluster.until(
            f"{job} is gone", lambda: all(each.id != job or each.state == "PENDING" for each in self.live(2))
        )

    def hold(self, step: int, *, deaf: bool = False) -> None:
        """Hold the training once it has done a step; `deaf`: also when it is asked to stop."""
        if deaf:
            (self._control / "deaf").write_text("1")
        (self._control / "hold").write_text(str(step))
        self.note(f"after step {step}{', deaf' if deaf else ''}")

    def release(self) -> None:
        """Let the training go on."""
        for name in ("hold", "deaf", "at"):
            (self._control / name).unlink(missing_ok=True)

    def held(self) -> str:
        """Wait until the training is held; return its job."""
        at = self._control / "at"
        self._wait("is held", lambda: at.exists() and at.read_text())
        return at.read_text()

    def ranks(self) -> list[tuple[str, int]]:
        """Return the job and the process of each rank that runs."""
        found: dict[int, str] = {}
        for line in self.journal():
            if line["event"] == "begin":
                found[line["pid"]] = line["job"]
            else:
                found.pop(line["pid"], None)
        return [(job, pid) for pid, job in found.items()]

    def journal(self) -> list[dict[str, Any]]:
        """Return what is noted of the ranks of this run."""
        return [line for line in read_journal(self.cluster) if line["control"] == str(self._control)]

    def moment(self, *, earliest: int = 0, deaf: bool = False) -> str:
        """Launch the run and wait for the moment that the seed says; return the job that runs then."""
        how = self.chance.choice(("starting", "held", "held", "moving"))
        step = self.chance.randrange(earliest, STEPS)
        delay = self.chance.uniform(0, 0.5)
        if deaf or earliest:
            how = "held"
        if how == "starting":
            self.note(f"{delay:.2f} s after the ranks began")
            self.launch()
            self._wait("trains", self.ranks)
            time.sleep(delay)
            return str(self.journal()[-1]["job"])
        self.hold(step, deaf=deaf)
        self.launch()
        job = self.held()
        if how == "moving":
            self.note(f"{delay:.2f} s later")
            self.release()
            time.sleep(delay)
        return job

    def _wait(self, what: str, happened: Any) -> None:
        def gave_up() -> bool:
            if happened():
                return True
            if not self.live(fresh=2) and not happened():
                raise RuntimeError(f"no job is left, and in vain: {what}")
            return False

        self.cluster.until(f"{self.run} {what}", gave_up)

    # --- breaking ---

    def note(self, text: str) -> None:
        self.notes.append(text)

    def kill(self, pid: int | None, what: str) -> None:
        """Kill a process with SIGKILL, unless it has just ended by itself."""
        try:
            if pid is None:
                raise ProcessLookupError
            os.kill(pid, signal.SIGKILL)
            self.note(f"killed {what}")
        except ProcessLookupError:
            self.note(f"{what} was gone")

    def kill_a_rank(self) -> None:
        ranks = sorted(pid for _, pid in self.ranks())
        self.kill(self.chance.choice(ranks) if ranks else None, "a rank")

    def nodes_of(self, job: str) -> list[str]:
        told = next((each.nodes for each in self.live(fresh=2) if each.id == job), "")
        return self.cluster.slurm("scontrol", "show", "hostnames", told).split() if told else []
