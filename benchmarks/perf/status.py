"""The cost of `slipway status` and `watch` of 500 launched jobs, next to a submitit poll and a bare `squeue`.

    python benchmarks/perf/status.py [--jobs N] [--steps N] [--runs N]

On a throw-away Slurm of its own, with accounting where the machine has it: real jobs, four fifths of them
waiting, the others completed, each with the metrics of a training of 20,000 steps. The commands run in turn,
so that a noisy machine slows all; CPU seconds are the kernel's own account of each process and its children.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from launch_latency import Cost, measure

from launcher.errors import UserError
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.provenance import format_now, host, user
from launcher.sandbox.lifecycle import Sandbox, down, up
from launcher.sandbox.options import SandboxOptions
from launcher.sandbox.prerequisites import check

SLIPWAY = str(Path(sys.executable).with_name("slipway"))
COUNTED = ("squeue", "sacct", "scontrol", "sinfo", "scancel")
# The script writes the marks of a job's own script.
SCRIPT = """#!/bin/bash
#SBATCH --job-name=train --ntasks=1 --output=/dev/null
mkdir -p {directory}/marks
echo "$SLURM_JOB_ID" >{directory}/marks/job
printf '{{"job_id": "%s", "started": %s, "nodes": "n1"}}' "$SLURM_JOB_ID" "$(date +%s)" \
    >{directory}/marks/$SLURM_JOB_ID.0.started.json
printf '{{"job_id": "%s", "exit_code": 0, "ended": %s}}' "$SLURM_JOB_ID" "$(date +%s)" \
    >{directory}/marks/$SLURM_JOB_ID.0.ended.json
"""
SUBMITIT = """
import sys, submitit
from submitit.slurm.slurm import SlurmJob
jobs = [SlurmJob(sys.argv[1], job_id) for job_id in sys.argv[2:]]
jobs[0].watcher.update()
states = [job.watcher.get_state(job.job_id, mode="cache") for job in jobs]
print(len(states), "jobs,", jobs[0].watcher.num_calls, "question")
"""


def metrics(steps: int) -> str:
    """Return the events of a training as lines, one for each step and a validation every 2,000."""
    start = {"kind": "start", "time": 1e9, "step": 0, "max_steps": 10 * steps, "tokens_per_step": 524288}
    lines = [{**start, "tensor": 2, "data": 4, "parameters": 126_000_000, "world_size": 8}]
    for step in range(1, steps + 1):
        common = {"time": 1e9 + step * 0.51234, "step": step}
        more = {"grad_norm": 1.4924693215953622, "consumed_samples": step * 256, "step_time": 0.512344}
        loss = {"loss": 7.64372444152832, "lr": 0.00023809523809, "tokens_per_second": 1023312.14341331}
        lines.append({"kind": "train", **common, **loss, **more})
        if step % 2000 == 0 and step < steps:
            lines.append({"kind": "validation", **common, "val_loss": 7.1})
    return "".join(json.dumps(line) + "\n" for line in lines)


def launch(base: Path, number: int, environment: Mapping[str, str], template: Path) -> str:
    """Write a run's files as a launcher does and submit its job; return the job's id."""
    name = f"gpt3_126m_{number:03}"
    directory = base / name / "launches" / "1"
    (directory / "results").mkdir(parents=True)
    shutil.copyfile(template, directory / "results" / "metrics.jsonl")
    script = directory / "nemo-megatron-train_submission.sh"
    script.write_text(SCRIPT.format(directory=directory))
    tag = f"20261121-000000-{number:06x}"
    partition = "gpu" if number % 5 == 0 else "cloud"  # in which jobs wait for ever
    command = ["sbatch", "--parsable", f"--partition={partition}", str(script), tag]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    job = result.stdout.strip()
    values = {"engine": "megatron", "scheduler": "slurm", "job_name": "train", "stage": "training"}
    manifest = Manifest(
        run=name,
        launch=1,
        tag=tag,
        **values,
        nodes=1,
        tasks_per_node=8,
        time_limit="1-00:00:00",
        command=["slipway", "launch"],
        overrides=["training=gpt3/126m", "cluster=bcm"],
        choices={"training": "gpt3/126m"},
        created=format_now(),
        version="0",
        user=user(),
        host=host(),
        slurm_conf=environment["SLURM_CONF"],
        job_id=job,
    )
    write_manifest(directory, manifest)
    return job


def calls(command: list[str], directory: Path, environment: Mapping[str, str]) -> str:
    """Count the Slurm commands that a command runs, with wrappers in front of them."""
    wrappers, log = directory / "bin", directory / "calls"
    wrappers.mkdir(parents=True)
    for name in COUNTED:
        real = shutil.which(name)
        (wrappers / name).write_text(f'#!/bin/bash\necho {name} >>{log}\nexec {real} "$@"\n')
        (wrappers / name).chmod(0o755)
    path = f"{wrappers}:{environment['PATH']}"
    subprocess.run(command, env={**environment, "PATH": path}, check=True, capture_output=True)
    logged = log.read_text().split()
    return ", ".join(f"{logged.count(name)} {name}" for name in COUNTED if name in logged)


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--jobs", type=int, default=500, help="launched jobs (default: 500)")
    parser.add_argument("--steps", type=int, default=20_000, help="of each training (default: 20,000)")
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each (default: 9)")
    args = parser.parse_args()
    accounting = has_accounting()
    directory = Path(tempfile.mkdtemp(prefix="slipway-bench-", dir="/tmp"))
    try:
        sandbox = up(SandboxOptions(directory=directory / "sandbox", nodes=4, accounting=accounting))
        compare(args, directory, sandbox, accounting)
    finally:
        down(directory / "sandbox")
        shutil.rmtree(directory)


def has_accounting() -> bool:
    try:
        check(True)
    except UserError:
        return False
    return True


def compare(args: argparse.Namespace, directory: Path, sandbox: Sandbox, accounting: bool) -> None:
    """Measure all commands in turn and print the table."""
    environment = {**sandbox.environment(), "SLIPWAY_CACHE_DIR": str(directory / "cache")}
    os.environ.update(environment)  # measure() passes it on
    base, template = directory / "results", directory / "metrics.jsonl"
    template.write_text(metrics(args.steps))
    jobs = [launch(base, number, environment, template) for number in range(args.jobs)]
    while len(list(base.glob("*/launches/1/marks/*.ended.json"))) < len(jobs[::5]):
        time.sleep(0.2)
    time.sleep(3 if accounting else 0)  # the accounting is late

    status = [SLIPWAY, "status", "--base-results-dir", str(base)]
    commands = {
        "bare squeue": [str(shutil.which("squeue")), f"--jobs={','.join(jobs)}", "--states=all"],
        "submitit, one poll": [sys.executable, "-c", SUBMITIT, str(directory), *jobs],
        "slipway status": status,
        "slipway status --json": [*status, "--json"],
        "slipway watch": [SLIPWAY, "watch", "--base-results-dir", str(base)],
    }
    if not accounting:
        del commands["submitit, one poll"]  # it asks nothing but sacct
    for command in commands.values():
        measure(command)  # warms the caches and the bytecode
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(args.runs):
        for name, command in commands.items():
            costs[name].append(measure(command))
    size = template.stat().st_size / 1e6
    print(f"{len(jobs)} jobs, {size:.1f} MB of metrics each; medians of {args.runs} interleaved runs;")
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, accounting: {accounting}\n")
    print(f"{'':24}{'CPU [s]':>10}{'min-max [s]':>16}")
    for name, runs in costs.items():
        cpu = sorted(cost.cpu for cost in runs)
        spread = f"{cpu[0]:.3f}-{cpu[-1]:.3f}"
        print(f"{name:24}{statistics.median(cpu):>10.3f}{spread:>16}")
    print(f"\nSlurm commands of slipway status: {calls(status, directory, environment)}.")
    watch = commands["slipway watch"]
    print(f"Slurm commands of slipway watch: {calls(watch, directory / 'watch', environment)}.")
    print("Aim: less than a second of CPU, and as many Slurm commands for 500 jobs as for one.")


if __name__ == "__main__":
    main()
