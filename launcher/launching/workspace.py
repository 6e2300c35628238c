"""A workspace: this process becomes a shell on a node."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from typing import NoReturn

from launcher.checks.gathering.host import check_host
from launcher.drafting import Draft, results_key
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.rendering.sbatch_flags import empty_script
from launcher.runs.write import make_directories
from launcher.schedulers import scheduler_for
from launcher.slurm.commands import WITHOUT_SLURM

_IN_PARENTHESES = re.compile(r"#!.*\n\( #.*\n((?s:.*\n))\)\n*")
_PROGRAMS = {"slurm": "salloc", "allocation": "srun"}


def prepare(made: Draft) -> list[str]:
    """Look at what the shell needs of this machine, and make the directories that it mounts.

    Returns
    -------
    Warnings.

    Raises
    ------
    UserError
        If there is no Slurm here, or it refuses, or a directory cannot be made.
    """
    plan = made.plan
    program = _PROGRAMS.get(plan.scheduler)
    if program is not None and shutil.which(program) is None:
        raise UserError(f"{program} is not on this machine: there is no Slurm here", hint=WITHOUT_SLURM)
    told = [*check_host(made), *ignored(plan, os.environ)]
    if plan.scheduler == "slurm":
        # In sbatch's words what salloc would say later, and what keeps the shell waiting.
        waits = scheduler_for(plan.scheduler, plan.slurm_conf).validate(empty_script(plan))
        told += [waits] if waits is not None else []
    with made.composition.naming_sources():
        make_directories(plan.job.directories, results_key(made))
    return told


def ignored(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """What the user's shell says to salloc, and does not reach it: the configuration decides."""
    if plan.scheduler != "slurm":
        return []
    return [
        f"{name}={environment[name]} of your shell is not passed on to salloc"
        for name in sorted(environment)
        if name.startswith("SALLOC_")
    ]


def become(made: Draft) -> NoReturn:
    """Become the shell: its exit code is that of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp("bash", ["bash", "-c", in_place(made.rendered.script)])


def in_place(script: str) -> str:
    """The commands without the parentheses, which are for the shell that one pastes them into.

    In them bash would wait for salloc, and not pass on a signal that ends it: the node would stay taken.
    """
    found = _IN_PARENTHESES.fullmatch(script)
    return found[1] if found is not None else script
