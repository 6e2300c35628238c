"""Chains on a sandbox of their own, whose nodes can be lost: to launch, to break and to look at."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

from launcher.runs.paths import launch_numbers
from launcher.sandbox import state
from launcher.sandbox.lifecycle import Sandbox
from launcher.sandbox.state import Process, load
from slipway.common.node.marks import ChainEnd, JobAttempt, chain_end, link_jobs, read_attempts
from tests.jobs.on_slurm.sandbox_runs import Done, SandboxRuns
from tests.warm import WarmPool

PREFIX = "chain-"
NODES = 14
# Long enough that only a wait in vain reaches it, however busy the machine is.
PATIENCE_SECONDS = 900
# Between two looks; squeue, called by all chains at once, would take a processor of its own.
LOOK_SECONDS, SQUEUE_SECONDS = 0.3, 1.0
ACTIVE = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING"
# One node with one task, unless an override says otherwise. Nothing is trained: the payload of each chain is
# a script.
CHAIN = [
    "cluster=sandbox",
    "training=gpt3/tiny",
    "training.trainer.num_nodes=1",
    "training.trainer.devices=1",
    "training.model.tensor_model_parallel_size=1",
    "training.model.data.data_impl=mock",
    f"cluster.job_name_prefix={PREFIX}",
    "numa_mapping.enable=False",
]
# Each link adds a line to `begun`, so that a payload knows its number. The launcher asks the interpreter of a
# job what it has; outside of a job these answer at once.
HEADER = r"""#!/bin/bash
[[ ${SLURM_JOB_ID:-} ]] || exit 0
set -u
# As the program, without a process: dozens of payloads wait at a time.
exec {silence}<> <(:)
sleep() { read -rt "$1" -u "$silence" || true; }
work=${0%.sh}
if [[ $RANK == 0 ]]; then
    echo "$SLURM_JOB_ID" >>"$work/begun"
else
    until grep -qx "$SLURM_JOB_ID" "$work/begun" 2>/dev/null; do sleep 0.1; done
fi
link=$(grep -nx "$SLURM_JOB_ID" "$work/begun") link=${link%%:*}
save() { # save STEP, as the trainer does: under a hidden name, and whole from one moment to the next
    [[ $RANK == 0 ]] || return 0
    local name="megatron_gpt--val_loss=1.00-step=$1-consumed_samples=$1"
    local into=${work%/*}/results/${work##*/}/checkpoints
    mkdir -p "$into/.unfinished-$name"
    local serial=$(($(find "$into" -maxdepth 1 -name 'megatron*' | wc -l) + 1))
    echo "{\"step\": $1, \"serial\": $serial}" >"$into/.unfinished-$name/complete.json"
    mv "$into/.unfinished-$name" "$into/$name"
}
ready() { # once all ranks are: srun ends the others with the first that ends, though they have not begun
    local rank attempt=$link.${SLURM_RESTART_COUNT:-0} # a requeued job has the same link
    touch "$work/ready.$attempt.$RANK"
    [[ $RANK == 0 ]] || return 0
    for ((rank = 1; rank < WORLD_SIZE; rank++)); do
        until [[ -e $work/ready.$attempt.$rank ]]; do sleep 0.1; done
    done
    echo "$link" >>"$work/ready"
}
wait_to_save() { # wait_to_save STEP: until it is told that its end is near
    trap "save $1; exit 75" USR1
    trap 'exit 143' TERM
    ready
    # A process: bash then runs the traps of signals that came meanwhile by their numbers, USR1 before TERM.
    while :; do command sleep 0.2; done
}
be_deaf() {
    trap '' USR1 TERM
    ready
    while :; do sleep 0.2; done
}
"""


@dataclass
class ChainRuns(SandboxRuns):
    """The runs of a sandbox that some of them break."""

    sandbox_directory: Path = Path()
    pool: WarmPool = field(default_factory=lambda: WarmPool(Path()))
    # A launch takes a processor for a second, and there may be two.
    turns: Semaphore = field(default_factory=lambda: Semaphore(2))
    is_closed: bool = False
    # Id and name of each job that waits or runs, at the last look at the queue, and the time of that look.
    _queue: list[list[str]] = field(default_factory=list)
    _looked: float = 0
    _looking: Lock = field(default_factory=Lock)

    def chain(
        self, run: str, body: str, *overrides: str, nodes: str | None = None, programs: Path | None = None
    ) -> None:
        """Launch a chain whose payload is a script.

        Parameters
        ----------
        nodes
            The only ones that it may run on, separated by commas.
        programs
            A folder that is in front of the others on PATH, for the launcher and in its jobs.
        """
        payload, work = self.directory / f"{run}.sh", self.work(run)
        work.mkdir()
        payload.write_text(HEADER + body)
        payload.chmod(0o755)
        chosen = [*CHAIN, f"training.run.name={run}", f"cluster.python={payload}"]
        done = self.begin(*chosen, *overrides, nodes=nodes, programs=programs)
        assert done.returncode == 0, f"{run}\n{done.stdout}{done.stderr}"
        answer = json.loads(done.stdout)
        self.jobs[run] = (answer[0] if isinstance(answer, list) else answer)[
            "job_id"
        ]  # of several stages the first

    def begin(self, *overrides: str, nodes: str | None = None, programs: Path | None = None) -> Done:
        """Launch something, on some of the nodes."""
        limits = []
        if nodes is not None:
            others = [f"n{number}" for number in range(1, NODES + 1) if f"n{number}" not in nodes.split(",")]
            limits = [f"cluster.exclude='{','.join(others)}'"]
        with self.turns:
            return self.slipway("launch", *overrides, *limits, "--json", programs=programs)

    def launch_directory(self, run: str) -> Path:
        """Return the directory of a run's newest launch."""
        run_dir = self.directory / "results" / run
        return run_dir / "launches" / str(max(launch_numbers(run_dir), default=1))

    def work(self, run: str) -> Path:
        return self.directory / run

    def is_ready(self, run: str, link: int) -> bool:
        """Return True if the payload of a link has said that it waits for what comes."""
        return str(link) in _lines(self.work(run) / "ready")

    def begun_jobs(self, run: str) -> list[str]:
        """Return the jobs whose payloads began."""
        return _lines(self.work(run) / "begun")

    def until(
        self,
        event: str,
        condition: Callable[[], object],
        run: str | None = None,
        every: float = LOOK_SECONDS,
    ) -> None:
        """Wait for a condition; fail after too long a wait, or once no job of the run is left."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for turn in count(1):
            is_hopeless = turn % 40 == 0 and run is not None and not self.queued(run)
            if condition():
                return
            is_late = time.monotonic() > deadline
            assert not (is_hopeless or is_late or self.is_closed), (
                f"in vain: {event}\n{run and self.report(run)}"
            )
            time.sleep(every)

    def until_ready(self, run: str, link: int) -> None:
        self.until(f"link {link} of {run} is ready", lambda: self.is_ready(run, link), run)

    def until_over(self, run: str) -> None:
        """Wait until no job of a chain is left in the queue, and none will come."""
        began = time.monotonic()
        self.until(f"{run} has ended", lambda: not self.queued(run, began), run, SQUEUE_SECONDS)

    def until_gone(self, run: str, job: str) -> None:
        began = time.monotonic()
        self.until(f"{job} is gone", lambda: job not in self.queued(run, began), run, SQUEUE_SECONDS)

    def queued(self, run: str, since: float | None = None) -> list[str]:
        """Return the jobs of a run that wait or run, as Slurm tells now.

        All who wait for a change share a look at the queue, if it is recent and not before `since`.
        """
        now = time.monotonic()
        with self._looking:
            if self._looked <= (now if since is None else max(since, now - SQUEUE_SECONDS)):
                began = time.monotonic()
                output = self.slurm("squeue", "--noheader", "--format=%i %j", ACTIVE)
                self._queue, self._looked = [line.split(maxsplit=1) for line in output.splitlines()], began
            return [job for job, name in self._queue if name == f"{PREFIX}{run}"]

    def job(self, run: str, link: int) -> str:
        """Return the job of a link that has begun."""
        return self.begun_jobs(run)[link - 1]

    def attempts(self, run: str) -> list[JobAttempt]:
        """Return the attempts of a chain's links, in their order."""
        return sorted(read_attempts(self.launch_directory(run)), key=lambda attempt: attempt.link)

    def links(self, run: str) -> list[str]:
        return link_jobs(self.launch_directory(run))

    def end(self, run: str) -> ChainEnd | None:
        return chain_end(self.launch_directory(run))

    def log(self, run: str) -> str:
        """Return the logs of all links, in their order."""
        logs = sorted(self.launch_directory(run).glob("log-*.out"))
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def report(self, run: str) -> str:
        """Return everything that is known of a run, for a failed test."""
        marks = self.launch_directory(run) / "marks"
        texts = [f"{path.name}: {path.read_text()}" for path in sorted(marks.glob("[!.]*"))]
        known = self.command("squeue", "--states=all", "--format=%i %j %T %r %N %E", f"--name={PREFIX}{run}")
        return "\n".join([known.stdout, *texts, self.log(run)])

    def near_its_limit(self, job: str) -> None:
        """Let a job end in 45 seconds: Slurm looks every 30 seconds, once before and once after that."""
        self.slurm("scontrol", "update", f"JobId={job}", "EndTime=now+45")

    def preempt(self, job: str) -> str:
        """Have a higher partition take the nodes of a job; return the job that did."""
        node = self.nodes_of(job)
        return self.submit("--partition=high", f"--nodelist={node}", "--exclusive")

    def nodes_of(self, job: str) -> str:
        return self.slurm("squeue", "--noheader", "--format=%N", f"--jobs={job}").strip()

    def kill_daemon(self, name: str) -> Process:
        """Kill a node's slurmd with `kill -9`: the processes of its jobs go on."""
        record = load(self.sandbox_directory)
        assert record
        daemon = record.daemons[name]
        assert daemon.is_alive
        daemon.signal(signal.SIGKILL)
        return daemon

    def kill_node(self, name: str) -> None:
        """Cut the power of a node: all that runs there is gone at once, without notice."""
        record = load(self.sandbox_directory)
        assert record
        # The open file keeps the namespace's number from being given to a node of another sandbox.
        with state.mount_namespace(record.daemons[name].pid).open("rb"):
            namespace = _namespace(record.daemons[name].pid)
            assert namespace not in (None, _namespace(os.getpid()))
            # slurmd first, so that it sees none of the others end.
            daemon = self.kill_daemon(name)
            while mates := [pid for pid in state.processes() if _namespace(pid) == namespace]:
                for pid in mates:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
                state.reap(daemon.pid)

    def ask_json(self, verb: str, *words: str) -> Any:
        """Return the JSON of a verb."""
        done = self.slipway(verb, *words, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)


def open_runs(directory: Path, sandbox: Sandbox, pool: WarmPool) -> ChainRuns:
    """Return a sandbox without runs, whose index is not the user's own."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "TMPDIR": str(directory),
        "SLIPWAY_CACHE_DIR": str(directory / "cache"),
        "SLURM_CONF": sandbox.environment()["SLURM_CONF"],
        "COLUMNS": "250",
    }
    return ChainRuns(
        directory, env, sandbox.options.accounting, sandbox_directory=sandbox.directory, pool=pool
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _namespace(pid: int) -> int | None:
    try:
        return state.mount_namespace(pid).stat().st_ino
    except OSError:
        return None
