"""The machine that launches: the interpreter of the tasks, the allocation of the shell."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.checks.facts import HostFacts, Interpreter
from launcher.errors import file_mode, nearest_files
from launcher.plan import Plan
from supervisor.settings import OLDEST_PYTHON

HostOf = Callable[[Plan], HostFacts]

# The libraries that each stage cannot do without: of the extra `train`, and of `data`.
_LIBRARIES = {
    "training": ("torch", "megatron", "numpy", "psutil", "yaml"),
    "data_preparation": ("numpy", "tokenizers", "yaml"),
}
_ANSWER = "missing:"
_ASK = """\
import importlib.util, sys
print("missing:", *(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
_PATIENCE_SECONDS = 60

# The job script takes the first of these that there is (templates/supervisor.sh.j2).
SUPERVISOR_PYTHONS = ("/usr/bin/python3", "/usr/libexec/platform-python", "python3")
_ASK_VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


def host_facts(plan: Plan) -> HostFacts:
    """Return what a launch needs of this machine."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return HostFacts(
        in_allocation=bool(os.environ.get("SLURM_JOB_ID")),
        allocation_nodes=int(nodes) if nodes.isdecimal() else None,
        interpreter=_interpreter(plan),
    )


def remembered_host() -> HostOf:
    """Return `host_facts` that ask one interpreter once: the points of a sweep share theirs."""
    known: dict[tuple[object, ...], HostFacts] = {}

    def host_of(plan: Plan) -> HostFacts:
        job = plan.job
        environment = tuple(sorted(job.environment.items()))
        key = (plan.scheduler, job.stage, job.engine, job.container is None, job.payload.argv[0], environment)
        if key not in known:
            known[key] = host_facts(plan)
        return known[key]

    return host_of


def _interpreter(plan: Plan) -> Interpreter | None:
    """Return what this machine has of the tasks' interpreter; None if they run another program."""
    job = plan.job
    in_container = job.container is not None and plan.scheduler != "local"
    if in_container or job.engine != "megatron" or job.stage not in _LIBRARIES:
        return None
    name = job.payload.argv[0]
    is_own = name == sys.executable
    found = shutil.which(name)
    if found is not None:
        missing = _missing_libraries(found, _LIBRARIES[job.stage], job.environment)
        return Interpreter(name, is_own, found, missing=missing)
    path = Path(name)
    if not path.is_absolute() or not stat.S_ISDIR(file_mode(path.parent)):
        return Interpreter(name, is_own)  # the nodes may have it
    why = "it may not be executed" if file_mode(path) else "there is no such file"
    return Interpreter(name, is_own, problem=why, nearest=nearest_files(path))


def _missing_libraries(
    interpreter: str, names: tuple[str, ...], variables: Mapping[str, str]
) -> tuple[str, ...] | None:
    """Ask an interpreter, which imports none of them; return None if it does not answer."""
    command = [interpreter, "-c", _ASK, *names]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            cwd="/",  # a folder `torch` where the user stands is not meant
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode != 0 or not answers:
        return None
    return tuple(answers[-1].removeprefix(_ANSWER).split())


def supervisor_python_problem(names: Sequence[str] = SUPERVISOR_PYTHONS) -> str:
    """Return why this machine's Python cannot run a job's supervisor; an empty string if it can."""
    path = next((found for found in map(shutil.which, names) if found), None)
    if path is None:
        return f"this machine has no {', '.join(names[:-1])}, and no {names[-1]} on PATH"
    if re.fullmatch(r"python3\.([7-9]|[1-9]\d)", Path(path).resolve().name):
        return ""  # nothing has to be started
    try:
        process = subprocess.run(
            [path, "-ISc", _ASK_VERSION], capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not start: {error}"
    version = process.stdout.strip()
    if process.returncode or not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return f"{path} does not say its version"
    if tuple(map(int, version.split("."))) >= OLDEST_PYTHON:
        return ""
    return f"{path} is {version}, older than {'.'.join(map(str, OLDEST_PYTHON))}"
