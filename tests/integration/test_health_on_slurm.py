"""The gate before the tasks on a real Slurm: faults by stand-ins, dead mounts and stopped daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.state import load
from slipway.common.node.excluded import read_excluded
from slipway.common.node.marks import JobAttempt, chain_end, read_attempts
from tests.fakes import hung_mount
from tests.fakes.node_tools import write_node_tools
from tests.jobs.on_slurm.sandbox_runs import HEADER, SandboxRuns
from tests.sandbox.fixtures import booted

pytestmark = pytest.mark.slurm

TRAINING = [
    "training=gpt3/tiny", "training.model.data.data_impl=mock", "training.trainer.num_nodes=1",
    "training.trainer.devices=1", "training.model.tensor_model_parallel_size=1", "numa_mapping.enable=False",
]  # fmt: skip


@dataclass
class Gates:
    """A sandbox of five nodes whose tools say what a test wants."""

    runs: SandboxRuns
    sandbox_directory: Path
    programs: Path
    state: Path

    def sicken(self, **words: str) -> None:
        """Let the tools of these nodes report faults, and those of all others none."""
        for path in self.state.iterdir():
            path.unlink()
        for node, text in words.items():
            (self.state / node).write_text(text)

    def launch(self, run: str, *overrides: str) -> JobAttempt:
        """Launch a run, and return the attempt of its last job once that is over."""
        self.submit(*overrides)
        self.wait_until(lambda: not self.runs.slurm("squeue", "--noheader", "--format=%i").strip())
        return self.attempts(run)[-1]

    def submit(self, *overrides: str) -> None:
        command = ["launch", "cluster=sandbox", "resilience.health=quick", "--json", *overrides]
        done = self.runs.slipway(*command, programs=self.programs)
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.3)

    def command(self, run: str, nodes: int, spares: int, *overrides: str) -> JobAttempt:
        """Launch a command whose tasks print where they are."""
        words = "'echo task $SLURMD_NODENAME $RANK $WORLD_SIZE $MASTER_ADDR'"
        request = [f"command.nodes={nodes}", f"resilience.spares={spares}", "command.gpus_per_node=8"]
        stage = ["stages=[command]", f"command.argv=[bash,-c,{words}]", f"command.run.name={run}"]
        return self.launch(run, *stage, *request, *overrides)

    def directory(self, run: str) -> Path:
        return self.runs.directory / "results" / run

    def attempts(self, run: str) -> list[JobAttempt]:
        numbers = [int(path.name) for path in (self.directory(run) / "launches").iterdir()]
        return read_attempts(self.directory(run) / "launches" / str(max(numbers)))

    def log(self, run: str) -> str:
        paths = sorted(self.directory(run).glob("log-*.out"))
        return "".join(path.read_text() for path in paths if path.exists())

    def tasks(self, run: str) -> list[str]:
        lines = (line for line in self.log(run).splitlines() if line.startswith("task "))
        return sorted(line.removeprefix("task ") for line in lines)

    def excluded(self, run: str) -> list[str]:
        return [entry.node for entry in read_excluded(self.directory(run), time.time())]

    def status(self, run: str) -> dict[str, Any]:
        (row,) = json.loads(self.runs.slipway("status", run, "--json").stdout)
        return dict(row)

    def daemon(self, node: str) -> int:
        record = load(self.sandbox_directory)
        assert record
        return record.daemons[node].pid


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gates]:
    with booted(nodes=5, cloud_nodes=0) as sandbox:
        directory = tmp_path_factory.mktemp("gates")
        state = directory / "state"
        state.mkdir()
        programs = write_node_tools(directory / "programs", state)
        environment = {**os.environ, **sandbox.environment()}
        runs = SandboxRuns(directory, environment, accounting=False)
        yield Gates(runs, sandbox.options.directory, programs, state)


def test_healthy_nodes_run_the_tasks_in_slurms_order(gates: Gates) -> None:
    gates.sicken()
    attempt = gates.command("healthy", 3, 1)
    assert (attempt.exit_code, attempt.nodes, attempt.left_out) == (0, "n1,n2,n3", None)
    assert gates.tasks("healthy") == ["n1 0 3 n1", "n2 1 3 n1", "n3 2 3 n1"]
    assert gates.excluded("healthy") == []


def test_spares_take_the_place_of_sick_nodes(gates: Gates) -> None:
    gates.sicken(n2="ecc=3", n3="heat=Active", n4="xid=79")
    attempt = gates.command("spares", 2, 3)
    assert (attempt.exit_code, attempt.verdict, attempt.nodes) == (0, "done", "n1,n5")
    assert gates.tasks("spares") == ["n1 0 2 n1", "n5 1 2 n1"]
    left_out = (attempt.left_out or "").split("; ")
    assert [text.partition(":")[0] for text in left_out] == ["n2", "n3", "n4"]
    assert "n2: GPU 0: 3 uncorrected memory errors (and 7 more)" in left_out
    assert left_out[2].endswith("Xid 79: GPU has fallen off the bus")
    assert "without n2: GPU 0" in gates.runs.slipway("history", "spares").stdout


def test_a_sick_node_is_remembered(gates: Gates) -> None:
    gates.sicken(n2="gpus=7")
    attempt = gates.command("remembered", 2, 1)
    assert (attempt.nodes, attempt.left_out) == ("n1,n3", "n2: 7 of 8 GPUs are there")
    assert gates.excluded("remembered") == ["n2"]
    attempt = gates.command("remembered", 2, 1)
    assert (attempt.exit_code, attempt.left_out, attempt.avoids) == (0, None, "n2")
    assert "n2" not in (attempt.nodes or "").split(",")


def test_without_a_spare_the_job_leaves(gates: Gates) -> None:
    gates.sicken(n2="gpus=7")
    attempt = gates.command("no-spare", 2, 0)
    assert (attempt.exit_code, attempt.rule, attempt.verdict) == (1, "sick_node", "exclude")
    assert (attempt.nodes, attempt.excluded) == ("n1,n2", "n2")
    assert gates.tasks("no-spare") == []
    assert gates.excluded("no-spare") == ["n2"]
    status = gates.status("no-spare")
    assert (status["state"], status["why"]) == ("FAILED", "n2 is sick: 7 of 8 GPUs are there")


def test_a_job_whose_own_node_is_sick_leaves_it(gates: Gates) -> None:
    gates.sicken(n1="ecc=1")
    attempt = gates.command("own", 1, 2)
    assert (attempt.rule, attempt.excluded, gates.tasks("own")) == ("sick_node", "n1", [])
    assert gates.excluded("own") == ["n1"]


@contextmanager
def hung(gates: Gates, node: str, directory: Path) -> Iterator[None]:
    """Let no process on a node get an answer about a directory."""
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse, for a file system that hangs")
    pid = str(gates.daemon(node))
    server = subprocess.Popen(
        [sys.executable, hung_mount.__file__, pid, directory], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout
    try:
        assert server.stdout.readline() == "mounted\n"
        yield
    finally:
        server.kill()
        server.communicate()
        subprocess.run(["nsenter", "--mount", f"--target={pid}", "umount", "--lazy", directory], check=True)


def test_dead_mounts_and_daemons_are_found_out(gates: Gates, tmp_path: Path) -> None:
    """Nobody answers for the one, and all others still do; the tasks start within a minute."""
    gates.sicken()
    shared = tmp_path / "shared"
    shared.mkdir()
    with ExitStack() as stack:
        stack.enter_context(hung(gates, "n2", shared))
        os.kill(gates.daemon("n3"), signal.SIGSTOP)
        stack.callback(os.kill, gates.daemon("n3"), signal.SIGCONT)
        gates.submit(
            *[
                "stages=[command]",
                "command.run.name=dead",
                "command.argv=[bash,-c,'echo task $SLURMD_NODENAME']",
            ],
            *["command.nodes=2", "resilience.spares=2", f"command.writable=[{shared}]"],
        )
        gates.wait_until(lambda: "done: all is done" in gates.log("dead"))
    gates.wait_until(lambda: not gates.runs.slurm("squeue", "--noheader", "--format=%i").strip())
    (attempt,) = gates.attempts("dead")
    assert (attempt.nodes, gates.tasks("dead")) == ("n1,n4", ["n1", "n4"])
    left_out = attempt.left_out or ""
    assert f"n2: {shared}: no answer within 10 seconds" in left_out
    assert "n3: it does not answer" in left_out


def train(gates: Gates, run: str, *overrides: str) -> JobAttempt:
    """Launch a chain whose payload is done at once."""
    payload = gates.runs.directory / f"{run}.sh"
    payload.write_text(HEADER + "exit 0\n")
    payload.chmod(0o755)
    name = [f"training.run.name={run}", f"cluster.python={payload}", "cluster.gpus_per_node=8"]
    return gates.launch(run, *TRAINING, *name, "training.trainer.devices=1", *overrides)


def test_a_chain_goes_on_where_its_nodes_are_healthy(gates: Gates) -> None:
    gates.sicken(n1="gpus=7")
    last = train(gates, "heals", "resilience.links=3", "resilience.max_failures=1")
    first, _ = gates.attempts("heals")
    assert (first.nodes, first.rule, first.verdict, first.link) == ("n1", "sick_node", "exclude", 1)
    assert (last.nodes, last.verdict, last.link, last.failures) == ("n2", "done", 2, 0)


def test_a_chain_of_sick_nodes_ends(gates: Gates) -> None:
    """A fault of every node is rather one of the probes: it does not go on for ever."""
    gates.sicken(**{f"n{number}": "gpus=7" for number in range(1, 6)})
    last = train(gates, "ends", "resilience.links=5", "resilience.max_failures=1")
    assert [attempt.verdict for attempt in gates.attempts("ends")] == ["exclude", "stop"]
    assert last.why == "2 links in a row found sick nodes: n2 is sick: 7 of 8 GPUs are there"
    end = chain_end(gates.directory("ends") / "launches" / "1")
    assert end is not None
    assert end.why == last.why
