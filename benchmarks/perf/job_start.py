"""The delay of the tasks under the supervisor, next to a bare `exec srun`, and its cost at rest.

    python benchmarks/perf/job_start.py [--runs N] [--seconds N] [--before COMMIT]

With --before the script of another commit is timed in turn with this one's: as a job by itself, as the first
link of a chain, which submits the second, and as the second, which looks back at the first.

The archive holds bytecode of the launcher's own Python. Where the nodes' Python is of another version it
compiles the sources: that is measured as well, if there is such a Python among pyenv's or on ``PATH``.

No Slurm is needed: `srun`, `scontrol` and `squeue` are played, and the first notes the time at which it
begins. The scripts run in turn, so that a noisy machine slows all. At rest the kernel's own account of the
supervisor alone is read, while its task sleeps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check import unpack

from launcher.config.compose import compose
from launcher.rendering.render import render
from launcher.rendering.supervision import supervisor_archive
from launcher.stages.planning import plan_launch

OVERRIDES = ["training=gpt3/126m", "cluster=bcm"]
TAG = "tag"
TOOLS = {
    "srun": 'echo "$EPOCHREALTIME" >"$STARTED"; [[ ! ${CODE-} ]] || exit "$CODE"; exec sleep "${REST-0}"',
    "scontrol": "printf 'n%s\\n' 1 2 3 4 5 6 7 8",
    "squeue": "echo RUNNING",
    "sbatch": "echo 4711",
    "scancel": "exit 0",
    "sacct": "exit 1",
}
FLOOR = "#!/bin/bash\nexec srun\n"


def other_python() -> str | None:
    """Return the oldest Python, from 3.6 on, whose bytecode differs from this one's."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for minor in range(6, 15):
        paths = [str(path) for path in sorted(root.glob(f"versions/3.{minor}.*/bin/python"))]
        for path in [*paths, shutil.which(f"python3.{minor}")]:
            if path is None or minor == sys.version_info.minor:
                continue
            if subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL, check=False).returncode == 0:
                return path  # one of pyenv's shims may be of no version that is there
    return None


def write(root: Path) -> dict[str, Path]:
    """Write the tools and the scripts."""
    (root / "bin").mkdir()
    for name, body in TOOLS.items():
        (root / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (root / "bin" / name).chmod(0o755)
    (root / "floor.sh").write_text(FLOOR)
    script = write_launch(root / "results")
    scripts = {"exec srun": root / "floor.sh", "the job script": script}
    python = other_python()
    if python is not None:
        text = script.read_text().replace("=/usr/bin/python3\n", f"={python}\n")
        (root / "other.sh").write_text(text)
        scripts[f"with {Path(python).resolve().name}, from source"] = root / "other.sh"
    return scripts


def write_launch(results: Path, *overrides: str) -> Path:
    """Write a launch directory, and return the path of its script."""
    chosen = [*OVERRIDES, *overrides, f"base_results_dir={results}"]
    plan = plan_launch(compose(chosen).config, number=1, tag=TAG)
    plan.paths.directory.mkdir(parents=True)
    for path, content in {**render(plan), plan.paths.supervisor: supervisor_archive()}.items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return plan.paths.script


def write_launch_of(checkout: Path, results: Path, *overrides: str) -> Path:
    """Write a launch directory with the launcher of another checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--write", results, *overrides]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Path(result.stdout.strip())


def compare(root: Path, checkout: Path, commit: str, runs: int) -> None:
    """Print the start of the tasks with the script of another checkout and with this one's, in turn."""
    print(f"start of the tasks, {runs} pairs in turn; median (min) in ms")
    print(f"{'':<20}{commit:>16}{'now':>16}   ratio")
    for title, links, link in (("a job", 1, 1), ("link 1 of a chain", 4, 1), ("link 2 of a chain", 4, 2)):
        chain = f"resilience.links={links}"
        scripts = {
            "before": write_launch_of(checkout, root / f"before-{links}-{link}", chain),
            "now": write_launch(root / f"now-{links}-{link}", chain),
        }
        times: dict[str, list[float]] = {name: [] for name in scripts}
        for job in range(1000, 1000 + 10 * runs, 10):
            for name, script in scripts.items():
                shutil.rmtree(script.parent / "marks", ignore_errors=True)
                for number in range(1, link + 1):
                    # Slurm calls it with the launch's tag, after the link's number if that is not the first.
                    place = [TAG] if number == 1 else [str(number), TAG]
                    (root / "started").unlink(missing_ok=True)
                    # Tasks that fail, so that the chain goes on; its next job is the one that sbatch names.
                    seconds = until_tasks(root, script, 4711 if number > 1 else job, *place, CODE="1")
                times[name].append(seconds)
        before, now = (statistics.median(seconds) for seconds in times.values())
        cells = [
            f"{1000 * statistics.median(values):.1f} ({1000 * min(values):.1f})" for values in times.values()
        ]
        print(f"{title:<20}{cells[0]:>16}{cells[1]:>16}{now / before:>8.2f}")


def start(root: Path, script: Path, job: int, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start a script as Slurm does."""
    environment = {
        **os.environ,
        "PATH": f"{root}/bin:{os.environ['PATH']}",
        "STARTED": str(root / "started"),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "n[1-8]",
        **variables,
    }
    return subprocess.Popen(["bash", script, *arguments], env=environment, stdout=subprocess.DEVNULL)


def until_tasks(root: Path, script: Path, job: int, *arguments: str, **variables: str) -> float:
    """Return the seconds from a script's start to that of its srun."""
    start_time = time.time()
    start(root, script, job, *arguments, **variables).wait()
    return float((root / "started").read_text()) - start_time


def at_rest(root: Path, script: Path, seconds: float) -> tuple[float, float]:
    """Return the part of a core, and the MB, that the supervisor and its looks take while its task sleeps."""
    (root / "started").unlink(missing_ok=True)
    process = start(root, script, 1, REST=str(seconds + 5))
    try:
        while not (root / "started").exists():
            time.sleep(0.05)
        time.sleep(1)
        before = _ticks(process.pid)
        time.sleep(seconds)
        cpu_seconds = (_ticks(process.pid) - before) / os.sysconf("SC_CLK_TCK")
        status = Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1]
    finally:
        process.wait()
    return cpu_seconds / seconds, int(status.split()[0]) / 1024


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))  # its own, and those of its children that have ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--before", metavar="COMMIT", help="compare with another commit")
    parser.add_argument("--write", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        print(write_launch(Path(args.write[0]), *args.write[1:]))
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        scripts = write(root)
        times: dict[str, list[float]] = {name: [] for name in scripts}
        for job in range(args.runs):
            for name, script in scripts.items():
                times[name].append(until_tasks(root, script, 100 + job))
        print(f"start of the tasks, {args.runs} runs in turn    median ms       min")
        for name, seconds in times.items():
            print(f"{name:<36} {1000 * statistics.median(seconds):>13.1f} {1000 * min(seconds):>9.1f}")
        resting = {"now": scripts["the job script"]}
        if args.before:
            checkout = unpack(args.before, root)
            compare(root, checkout, args.before, args.runs)
            resting[args.before] = write_launch_of(checkout, root / "before-at-rest")
        for name, script in resting.items():
            cores, megabytes = at_rest(root, script, args.seconds)
            print(
                f"at rest for {args.seconds:g} s, {name}: {100 * cores:.3f} % of a core, {megabytes:.1f} MB"
            )


if __name__ == "__main__":
    main()
