"""What a launch needs of this machine, looked at before anything is written.

What cannot work is refused; what may be there on the nodes alone is a warning.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.drafting import Draft
from launcher.errors import UserError, file_mode, nearest_files, shown
from launcher.plan import Plan
from supervisor.settings import OLDEST_PYTHON

# The libraries of the `train` extra that each stage cannot do without.
_LIBRARIES = {
    "training": ("torch", "megatron", "numpy", "psutil", "yaml"),
    "data_preparation": ("torch", "megatron", "numpy", "tokenizers"),
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


def check_host(made: Draft) -> list[str]:
    """Look at what a launch needs of this machine: its interpreter, the allocation that it runs in.

    Returns
    -------
    Warnings: what is not here, and may be on the nodes.

    Raises
    ------
    UserError
        If the launch cannot work; with the key, and where it was set.
    """
    plan = made.plan
    told = []
    try:
        if plan.job.container is None or plan.scheduler == "local":
            told = [_container_ignored(plan), _interpreter(plan)]
        if plan.scheduler == "allocation":
            _check_allocation(plan)
    except UserError as error:
        made.composition.annotate(error)
        raise
    return [warning for warning in told if warning is not None]


def _check_allocation(plan: Plan) -> None:
    """The allocation that the shell is in must have the nodes that the run wants."""
    found, wanted = os.environ.get("SLURM_JOB_NUM_NODES", ""), plan.job.resources.nodes
    if not os.environ.get("SLURM_JOB_ID"):
        raise UserError(
            "cluster.scheduler='allocation': this shell is in no allocation",
            key="cluster.scheduler",
            hint=f"salloc --nodes={wanted} --ntasks-per-node={plan.job.resources.tasks_per_node}",
        )
    if found.isdecimal() and int(found) < wanted:
        raise UserError(
            f"training.trainer.num_nodes={wanted}: the allocation that this shell is in has {found}",
            key="training.trainer.num_nodes",
            hint=f"salloc --nodes={wanted} --ntasks-per-node={plan.job.resources.tasks_per_node}",
        )


def _container_ignored(plan: Plan) -> str | None:
    if plan.job.container is None:
        return None
    return (
        f"container={plan.job.container.image} is not used: cluster.scheduler=local runs without containers"
    )


def _interpreter(plan: Plan) -> str | None:
    """The tasks' interpreter must be there and find the trainer's libraries."""
    if plan.job.engine != "megatron" or plan.job.stage not in _LIBRARIES:
        return None
    name = plan.job.payload.argv[0]
    found = shutil.which(name)
    if found is not None:
        return _libraries(plan, name, found)
    path = Path(name)
    if not path.is_absolute() or not stat.S_ISDIR(file_mode(path.parent)):
        return f"cluster.python={name}: not on this machine; every node must have it"
    what = "it may not be executed" if file_mode(path) else "there is no such file"
    raise UserError(f"cluster.python={shown(name)}: {what}", key="cluster.python", hint=nearest_files(path))


def _libraries(plan: Plan, name: str, interpreter: str) -> str | None:
    missing = _missing_libraries(interpreter, _LIBRARIES[plan.job.stage], plan.job.environment)
    if missing is None:
        return f"cluster.python={name}: whether it has torch and megatron-core cannot be told"
    if not missing:
        return None
    own = "null: the launcher's own interpreter" if name == sys.executable else f"{shown(name)}: it"
    raise UserError(
        f"cluster.python={own} does not find {', '.join(missing)}",
        key="cluster.python",
        hint=f"install what a training needs there: {interpreter} -m pip install 'PATH[train]', where PATH is"
        " Slipway's checkout or wheel\n"
        "or name another interpreter, cluster.python=..., or an image, container=...",
    )


def _missing_libraries(
    interpreter: str, names: tuple[str, ...], variables: Mapping[str, str]
) -> list[str] | None:
    """Ask an interpreter, which imports none of them; ``None`` if it does not answer."""
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
    return answers[-1].removeprefix(_ANSWER).split() if done.returncode == 0 and answers else None


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
