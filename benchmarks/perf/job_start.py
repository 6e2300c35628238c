"""The delay of the tasks under the supervisor, next to a bare `exec srun`, and its cost at rest.

    python benchmarks/perf/job_start.py [--runs N] [--seconds N]

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

from launcher.config.compose import compose
from launcher.rendering.render import render
from launcher.stages.planning import plan_launch

TOOLS = {
    "srun": 'echo "$EPOCHREALTIME" >"$STARTED"; exec sleep "${REST-0}"',
    "scontrol": "printf 'n%s\\n' 1 2 3 4 5 6 7 8",
    "squeue": "echo RUNNING",
}
FLOOR = "#!/bin/bash\nexec srun\n"


def other_python() -> str | None:
    """Return the oldest Python whose bytecode is another than this one's, from 3.6 on."""
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
    overrides = ["training=gpt3/126m", "cluster=bcm", f"base_results_dir={root}/results"]
    plan = plan_launch(compose(overrides).config, number=1, tag="tag")
    plan.paths.directory.mkdir(parents=True)
    for path, content in render(plan).files(plan.paths).items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (root / "floor.sh").write_text(FLOOR)
    scripts = {"exec srun": root / "floor.sh", "the job script": plan.paths.script}
    python = other_python()
    if python is not None:
        text = plan.paths.script.read_text().replace("=/usr/bin/python3\n", f"={python}\n")
        (root / "other.sh").write_text(text)
        scripts[f"with {Path(python).resolve().name}, from source"] = root / "other.sh"
    return scripts


def start(root: Path, script: Path, job: int, **variables: str) -> subprocess.Popen[bytes]:
    """Start a script as Slurm does."""
    environment = {
        **os.environ,
        "PATH": f"{root}/bin:{os.environ['PATH']}",
        "STARTED": str(root / "started"),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "n[1-8]",
        **variables,
    }
    return subprocess.Popen(["bash", script], env=environment, stdout=subprocess.DEVNULL)


def until_tasks(root: Path, script: Path, job: int) -> float:
    """Return the seconds from a script's start to that of its srun."""
    begun = time.time()
    start(root, script, job).wait()
    return float((root / "started").read_text()) - begun


def at_rest(root: Path, script: Path, seconds: float) -> tuple[float, float]:
    """Return the part of a core, and the MB, that the supervisor takes while its task sleeps."""
    (root / "started").unlink(missing_ok=True)
    process = start(root, script, 1, REST=str(seconds + 5))
    try:
        while not (root / "started").exists():
            time.sleep(0.05)
        time.sleep(1)
        before = _ticks(process.pid)
        time.sleep(seconds)
        used = (_ticks(process.pid) - before) / os.sysconf("SC_CLK_TCK")
        status = Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1]
    finally:
        process.wait()
    return used / seconds, int(status.split()[0]) / 1024


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
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
        cores, megabytes = at_rest(root, scripts["the job script"], args.seconds)
        print(f"at rest for {args.seconds:g} s: {100 * cores:.3f} % of a core, {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
