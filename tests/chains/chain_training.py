"""Runs of the real trainer on a sandbox, and the training that each kind of failure interrupts once."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

from tests.chains import paced_trainer
from tests.chains.chain_runs import PREFIX, ChainRuns
from tests.chains.paced_trainer import PACE

STEPS, EVERY = 72, 4
CHECKPOINTS = "training.exp_manager.checkpoint_callback_params"
# Dropout, so that a random generator which is not put back shows.
TRAINING = [
    "cluster=sandbox",
    f"cluster.job_name_prefix={PREFIX}",
    "cluster.partition=low",
    "training=gpt3/tiny",
    "training.trainer.num_nodes=1",
    f"training.trainer.max_steps={STEPS}",
    "training.trainer.val_check_interval=25",
    "training.trainer.limit_val_batches=1",
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
    f"{CHECKPOINTS}.every_n_train_steps={EVERY}",
]
SLOW, FAST = "0.7", "0"
# The pace of the link that comes near its time limit, in 45 seconds.
SLOWEST = "1.4"
STAGES_AFTER = ("conversion", "evaluation")


class Training:
    """A run of the real trainer on a sandbox."""

    def __init__(self, runs: ChainRuns, name: str, nodes: str | None = None) -> None:
        self._runs, self.name, self._nodes = runs, name, nodes
        self._pace = runs.work(name) / "pace"

    def launch(self, *overrides: str, pace: str) -> None:
        work = self._runs.work(self.name)
        work.mkdir(exist_ok=True)
        self.set_pace(pace)
        interpreter = work / "python"
        self._runs.pool.write_interpreter(interpreter, paced_trainer.__name__)
        own = [f"training.run.name={self.name}", f"cluster.python={interpreter}"]
        own.append(f"env_vars.{PACE}={self._pace}")
        done = self._runs.begin(*TRAINING, *own, *overrides, nodes=self._nodes)
        assert done.returncode == 0, done

    def set_pace(self, seconds: str) -> None:
        new = self._pace.with_name("pace.new")
        new.write_text(seconds)
        new.replace(self._pace)

    def all_events(self) -> list[dict[str, Any]]:
        """Return the events of rank 0 in all links; a kill may have cut a line."""
        path = self._runs.launch_directory(self.name) / "results" / "metrics.jsonl"
        events = []
        for line in path.read_text().splitlines() if path.exists() else []:
            with suppress(ValueError):
                events.append(json.loads(line))
        return events

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.all_events() if event["kind"] == kind]

    def events_by_link(self) -> list[list[dict[str, Any]]]:
        """Return the events of each link that began to train."""
        links: list[list[dict[str, Any]]] = []
        for event in self.all_events():
            if event["kind"] == "start":
                links.append([])
            links[-1].append(event)
        return links

    def last_steps(self) -> list[int]:
        """Return the last step of each link."""
        steps = [
            [e["step"] for e in events if e["kind"] in ("start", "train")] for events in self.events_by_link()
        ]
        return [link_steps[-1] for link_steps in steps]

    def saved_steps(self) -> list[int]:
        """Return the newest checkpoint at the end of each link, by the trainer's events."""
        steps = [0]
        for events in self.events_by_link():
            steps.append(max([steps[-1], *(e["step"] for e in events if e["kind"] == "checkpoint")]))
        return steps[1:]

    def values_by_step(self) -> dict[tuple[str, int], set[tuple[Any, ...]]]:
        """Return all values that were ever computed at each step: one value if all links agree."""
        values: dict[tuple[str, int], set[tuple[Any, ...]]] = {}
        fields = {"train": ("loss", "grad_norm", "lr", "consumed_samples"), "validation": ("val_loss",)}
        for kind, names in fields.items():
            for event in self.events(kind):
                values.setdefault((kind, event["step"]), set()).add(tuple(event[name] for name in names))
        return values

    def wait_for_steps(self, link: int, steps: int = 2, saves: int = 0) -> str:
        """Wait until a link has trained some steps and saved some times; return its job."""
        runs = self._runs

        def trained() -> bool:
            links = self.events_by_link()
            kinds = [event["kind"] for event in links[-1]] if len(links) == link else []
            return bool(kinds) and kinds.count("train") >= steps and kinds.count("checkpoint") >= saves

        runs.until(f"link {link} of {self.name} trains", trained, self.name)
        return runs.links(self.name)[link - 1]

    def order(self, rank: int, word: str) -> None:
        """Have a rank fail once at its next step."""
        self._pace.with_name(f"order.{rank}").write_text(word)

    def ranks(self, job: str) -> list[int]:
        """Return the processes of a job's ranks."""
        events = [event for event in self._runs.pool.journal(paced_trainer.__name__) if event["job"] == job]
        ended = {event["pid"] for event in events if event["event"] == "end"}
        return [event["pid"] for event in events if event["pid"] not in ended]


def interrupted(runs: ChainRuns, run: str) -> None:
    """Interrupt a training once by each kind of failure; nothing interrupts the same one named `calm`.

    A conversion and an evaluation follow it.
    """
    calm = Training(runs, "calm", "n8")
    calm.launch(pace=FAST)
    tried = Training(runs, run, "n9,n10")
    chain = ["resilience.links=9", "resilience.max_failures=2"]
    tried.launch(*chain, "stages=[training,conversion,evaluation]", pace=SLOWEST)

    runs.near_its_limit(tried.wait_for_steps(1))

    preempted = tried.wait_for_steps(2)
    tried.set_pace(SLOW)
    preemptor = runs.preempt(preempted)
    runs.until_gone(run, preempted)
    runs.slurm("scancel", preemptor)

    # The last checkpoint has to be newer than the one before, and not of the last step.
    job = tried.wait_for_steps(3, EVERY + 2, saves=1)
    os.kill(tried.ranks(job)[-1], signal.SIGKILL)

    job = tried.wait_for_steps(4, EVERY + 2, saves=1)
    node = runs.nodes_of(job)
    runs.kill_node(node)
    tried.wait_for_steps(5)
    tried.set_pace(FAST)
    for name in (run, *(f"{run}_{stage}" for stage in STAGES_AFTER), "calm"):
        runs.until_over(name)


def rewound(runs: ChainRuns, run: str) -> None:
    """Launch a training again from an early checkpoint, as a chain that may not fail once."""
    training = Training(runs, run, "n8")
    own = ["training.trainer.max_steps=8", "training.trainer.limit_val_batches=0"]
    own += [f"{CHECKPOINTS}.every_n_train_steps=2", f"{CHECKPOINTS}.save_top_k=-1"]
    training.launch(*own, pace=FAST)
    runs.until_over(run)
    saved = runs.directory / "results" / run / "checkpoints"
    (early,) = (path.name for path in saved.glob("*step=2-*") if not path.is_symlink())
    own += [f"training.resume.checkpoint='{early}'", "resilience.links=4", "resilience.max_failures=1"]
    training.launch(*own, pace=SLOW)
    # Told to save at once, it has done less steps than the first launch had.
    runs.slurm("scancel", "--batch", "--signal=USR1", training.wait_for_steps(1, steps=1))
    training.wait_for_steps(2, steps=1)
    training.set_pace(FAST)
    runs.until_over(run)
