"""The gate before the tasks on a sandbox of four nodes: seconds, healthy starts refused, faults found.

    python benchmarks/perf/health_gate.py [HEALTHY] [SICK]

Each gate is a job whose tasks do nothing: HEALTHY of them (200) with healthy nodes, then SICK (5) of each
fault, with a spare node and without one. The tools of the nodes are stand-ins, the dead mount and the stopped
slurmd are real.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.sandbox.lifecycle import down, up
from launcher.sandbox.options import SandboxOptions
from launcher.sandbox.state import load
from slipway.common.files import read_json
from slipway.common.node.marks import JobAttempt, read_attempts
from tests.fakes import hung_mount
from tests.fakes.node_tools import write_node_tools

_AT_ONCE = 3
_SLIPWAY = Path(sys.executable).with_name("slipway")


@dataclass
class Bench:
    """A sandbox, and the scripts that are submitted again and again: with a spare node and without one."""

    directory: Path
    sandbox: Path
    environment: dict[str, str]

    def write_script(self, run: str, nodes: int, spares: int) -> Path:
        """Launch a run once, for its script; return the directory of the launch."""
        command = [
            *[_SLIPWAY, "launch", "cluster=sandbox", "stages=[command]", "command.argv=['true']"],
            *[f"command.run.name={run}", f"command.nodes={nodes}", "command.gpus_per_node=8"],
            *[
                "resilience.health=full",
                "resilience.health_command=[site-tool]",
                f"resilience.spares={spares}",
            ],
            *[f"command.writable=[{self.directory}/shared]", "command.run.dependency=null"],
            *["resilience.exclude_hours=0", f"base_results_dir={self.directory}/results"],
        ]
        subprocess.run(command, env=self.environment, check=True, stdout=subprocess.DEVNULL)
        self.wait()
        return self.directory / "results" / run / "launches" / "1"

    def slurm(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    def wait(self, at_most: int = 0) -> None:
        while len(self.slurm("squeue", "--noheader", "--format=%i").split()) > at_most:
            time.sleep(0.1)

    def run(self, launch: Path, number: int) -> list[tuple[JobAttempt, float]]:
        """Submit a script again and again; return the attempts, each with the seconds of its gate."""
        (script,) = launch.glob("*_submission.sh")
        jobs = []
        for _ in range(number):
            self.wait(_AT_ONCE - 1)
            jobs.append(self.slurm("sbatch", "--parsable", str(script)))
        self.wait()
        attempts = {attempt.job_id: attempt for attempt in read_attempts(launch)}
        return [
            (attempts[job], float(read_json(launch / "marks" / f"{job}.0.health.json")["seconds"]))
            for job in jobs
        ]

    def daemon(self, node: str) -> int:
        record = load(self.sandbox)
        assert record
        return record.daemons[node].pid

    @contextmanager
    def said(self, node: str, text: str) -> Iterator[None]:
        """Let the tools of a node report a fault."""
        path = self.directory / "state" / node
        path.write_text(text)
        yield
        path.unlink()

    @contextmanager
    def hung(self, node: str) -> Iterator[None]:
        pid, directory = str(self.daemon(node)), f"{self.directory}/shared"
        command = [sys.executable, hung_mount.__file__, pid, directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout
            server.stdout.readline()
            yield
            server.kill()
        subprocess.run(["nsenter", "--mount", f"--target={pid}", "umount", "--lazy", directory], check=True)

    @contextmanager
    def stopped(self, node: str) -> Iterator[None]:
        os.kill(self.daemon(node), signal.SIGSTOP)
        stopper = subprocess.Popen(["sh", "-c", f"sleep 35; kill -CONT {self.daemon(node)}"])
        yield
        stopper.wait()


def _row(name: str, gates: Sequence[tuple[JobAttempt, float]], right: Callable[[JobAttempt], bool]) -> bool:
    seconds = [each for _, each in gates]
    good = sum(right(attempt) for attempt, _ in gates)
    middle, most = statistics.median(seconds), max(seconds)
    print(f"{name:42} {len(gates):6} {good:6} {middle:8.1f} {most:8.1f}", flush=True)
    return good == len(gates)


def main(healthy: int, sick: int) -> int:
    """Print the table; return 1 if a healthy node was refused, or a fault not found."""
    with tempfile.TemporaryDirectory(prefix="gate-", dir="/tmp") as folder, ExitStack() as stack:
        directory = Path(folder)
        for name in ("state", "shared"):
            (directory / name).mkdir()
        stack.callback(down, directory / "s")
        sandbox = up(SandboxOptions(directory=directory / "s", nodes=4, cloud_nodes=0))
        programs = write_node_tools(directory / "programs", directory / "state")
        environment = {**os.environ, **sandbox.environment()}
        environment["PATH"] = f"{programs}:{environment['PATH']}"
        bench = Bench(directory, directory / "s", environment)
        spared, bare = bench.write_script("spared", 3, 1), bench.write_script("bare", 4, 0)
        faults = [
            ("a GPU is missing", "n2", bench.said("n2", "gpus=7")),
            ("memory errors", "n3", bench.said("n3", "ecc=2")),
            ("slowed down by heat", "n4", bench.said("n4", "heat=Active")),
            ("Xid 79", "n2", bench.said("n2", "xid=79")),
            ("the site's tool says so", "n3", bench.said("n3", "verdict=sick")),
            ("a mount hangs", "n2", bench.hung("n2")),
            ("slurmd is stopped", "n4", bench.stopped("n4")),
        ]
        print(f"{'nodes':42} {'gates':>6} {'right':>6} {'median s':>8} {'most s':>8}")
        results = [_row("all healthy", bench.run(spared, healthy), lambda each: _ran(each, "n1,n2,n3"))]
        for name, node, fault in faults:
            number = 1 if "stopped" in name else sick  # of the others Slurm would know that it is not there
            with fault:
                gates = bench.run(spared, number)
                left = ",".join(host for host in ("n1", "n2", "n3", "n4") if host != node)
                results.append(_row(name, gates, lambda each, nodes=left: _ran(each, nodes)))
                if number == sick:
                    gates = bench.run(bare, number)
                    results.append(
                        _row(f"{name}, no spare", gates, lambda each, node=node: _left(each, node))
                    )
        with bench.said("n1", "ecc=1"):
            results.append(
                _row("the job's own node", bench.run(spared, sick), lambda each: _left(each, "n1"))
            )
        return int(not all(results))


def _ran(attempt: JobAttempt, nodes: str) -> bool:
    return attempt.exit_code == 0 and attempt.nodes == nodes


def _left(attempt: JobAttempt, node: str) -> bool:
    return attempt.rule == "sick_node" and attempt.excluded == node


if __name__ == "__main__":
    sys.exit(main(*(int(text) for text in [*sys.argv[1:], "200", "5"][:2])))
