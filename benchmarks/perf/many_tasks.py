"""The start of a thousand tasks under Slipway, next to a bare `srun` of the same tasks, on a real Slurm.

    python benchmarks/perf/many_tasks.py [--nodes 64] [--tasks-per-node 16]

The nodes are a sandbox's and share this machine's processors: compare the seconds by their ratio alone. The
tasks are stubs that write down when they began. Slurm's commands are counted by wrappers in front of them on
`PATH`, of the launch and of the job together. The files that a task opens are counted by `strace` in a job of
two tasks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from launcher.sandbox.lifecycle import Sandbox, down, up
from launcher.sandbox.options import SandboxOptions

COMMANDS = ("sbatch", "srun", "squeue", "sinfo", "scontrol", "sacct", "sacctmgr", "scancel")
STUB = '#!/bin/bash\necho "$EPOCHREALTIME" >"$STARTS/$SLURM_JOB_ID.$SLURM_PROCID"\n'
FLOOR = "#!/bin/bash\n#SBATCH --output=/dev/null\nexec srun {}\n"
# Files in the launch's own directory, apart from all others.
OWN = "of the launch"


def write_wrappers(directory: Path, calls: Path) -> None:
    """Write a wrapper for each command of Slurm, which records its calls."""
    directory.mkdir()
    for name in COMMANDS:
        if program := shutil.which(name):
            (directory / name).write_text(f'#!/bin/bash\necho {name} >>"{calls}"\nexec "{program}" "$@"\n')
            (directory / name).chmod(0o755)


class Bench:
    """The sandbox, the stub of a task, and what both sides leave."""

    def __init__(self, root: Path, sandbox: Sandbox) -> None:
        self.root, self.calls, self.starts = root, root / "calls", root / "starts"
        self.starts.mkdir()
        write_wrappers(root / "bin", self.calls)
        (root / "stub").write_text(STUB)
        (root / "stub").chmod(0o755)
        path = f"{root}/bin:{os.environ['PATH']}"
        self.conf = sandbox.environment()["SLURM_CONF"]
        own = {"PATH": path, "STARTS": str(self.starts), "SLIPWAY_CACHE_DIR": str(root / "cache")}
        self.environment = {**os.environ, **sandbox.environment(), **own}

    def run(self, *command: str) -> str:
        """Run a command in the sandbox's environment; return its output."""
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def submit_floor(self, nodes: int, each: int) -> str:
        """Submit a bare srun of the stub; return the job's id."""
        (self.root / "floor.sh").write_text(FLOOR.format(self.root / "stub"))
        flags = [f"--nodes={nodes}", f"--ntasks-per-node={each}", "--parsable"]
        return self.run("sbatch", *flags, str(self.root / "floor.sh")).strip()

    def launch(self, nodes: int, each: int, *more: str) -> str:
        """Launch a training whose tasks are the stub; return the job's id."""
        overrides = [
            *("training=gpt3/tiny", "cluster=sandbox", f"cluster.slurm_conf={self.conf}"),
            *(f"cluster.python={self.root}/stub", "training.model.data.data_impl=mock"),
            *(f"training.trainer.num_nodes={nodes}", f"training.trainer.devices={each}"),
            *("training.model.tensor_model_parallel_size=1", "training.model.micro_batch_size=1"),
            *(f"training.model.global_batch_size={nodes * each}", "cluster.gpus_per_node=1"),
            *("training.exp_manager.create_checkpoint_callback=False", f"env_vars.STARTS={self.starts}"),
        ]
        skipped = [f"--no-check={name}" for name in ("layout.gpus", "schedule.warmup")]
        slipway = str(Path(sys.executable).with_name("slipway"))
        output = self.run(slipway, "launch", *overrides, *more, *skipped)
        return re.findall(r"job (\d+)", output)[0]

    def wait(self, job: str, tasks: int) -> list[float]:
        """Return when the tasks of a job began, once all have, and the job is gone."""
        end = time.monotonic() + 900
        while time.monotonic() < end:
            found = list(self.starts.glob(f"{job}.*"))
            if len(found) == tasks and not self._queue(job):
                return sorted(float(path.read_text()) for path in found)
            time.sleep(0.2)
        sys.exit(f"job {job}: {len(found)} of {tasks} tasks began")

    def _queue(self, job: str) -> str:
        command = [shutil.which("squeue") or "squeue", "--noheader", f"--job={job}"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout.strip()

    def began(self, job: str) -> float:
        """Return when Slurm started a job, in whole seconds."""
        text = self.run(shutil.which("scontrol") or "scontrol", "--oneliner", "show", "job", job)
        return time.mktime(time.strptime(re.findall(r"StartTime=(\S+)", text)[0], "%Y-%m-%dT%H:%M:%S"))

    def take_calls(self) -> Counter[str]:
        """Return the calls of Slurm's commands since the last time."""
        calls = Counter(self.calls.read_text().split())
        self.calls.write_text("")
        return calls


def count_opened(bench: Bench) -> Counter[str]:
    """Return the files that one task opens before its program begins, those of the launch apart."""
    trace = bench.root / "trace"
    prefix = f"cluster.task_prefix=[strace,-f,-qq,-e,'trace=open,openat',-o,{trace}]"
    job = bench.launch(1, 1, prefix, "training.run.name=traced")
    bench.wait(job, 1)
    opened = re.findall(r'open(?:at)?\([^"]*"([^"]+)".*= \d+$', trace.read_text(), re.MULTILINE)
    before_stub = opened[: next((i for i, path in enumerate(opened) if path.endswith("/stub")), len(opened))]
    return Counter(OWN if "/results/traced/" in path else "others" for path in before_stub)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--tasks-per-node", type=int, default=16)
    args = parser.parse_args()
    tasks = args.nodes * args.tasks_per_node
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/dev/shm") as directory:
        root = Path(directory)
        options = SandboxOptions(directory=root / "sb", nodes=args.nodes, gpus=1, cpus=args.tasks_per_node)
        sandbox = up(options)
        try:
            measure(Bench(root, sandbox), args.nodes, args.tasks_per_node, tasks)
        finally:
            down(options.directory)


def measure(bench: Bench, nodes: int, each: int, tasks: int) -> None:
    """Print the table of both sides."""
    print(f"{tasks} tasks on {nodes} nodes of {os.cpu_count()} processors in all")
    print(f"{'':<14}{'first task [s]':>16}{'last task [s]':>16}   Slurm's commands")
    for name, submit in (("bare srun", bench.submit_floor), ("slipway", bench.launch)):
        submit(1, 1)  # fills the caches
        time.sleep(5)
        bench.take_calls()
        job = submit(nodes, each)
        starts, began = bench.wait(job, tasks), bench.began(job)
        calls = ", ".join(f"{number} {command}" for command, number in sorted(bench.take_calls().items()))
        print(f"{name:<14}{starts[0] - began:>16.1f}{starts[-1] - began:>16.1f}   {calls}", flush=True)
    if shutil.which("strace"):
        opened = count_opened(bench)
        print(f"files that a task opens before its program: {opened[OWN]} {OWN}, {opened['others']} others")


if __name__ == "__main__":
    main()
