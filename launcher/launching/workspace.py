"""A workspace: this process becomes a shell on a node."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping
from typing import NoReturn

from launcher.checks.findings import Severity
from launcher.checks.gate import CheckReport, require_passed, show_to_scheduler
from launcher.checks.rules.launch import SCHEDULER
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.runs.write import make_directories
from launcher.slurm.commands import WITHOUT_SLURM

_logger = logging.getLogger(__name__)

_IN_PARENTHESES = re.compile(r"#!.*\n\( #.*\n((?s:.*\n))\)\n*")
_PROGRAMS = {"slurm": "salloc", "allocation": "srun"}


def open_workspace(report: CheckReport) -> NoReturn:
    """Become the shell: its exit code is that of this process; raise UserError if it cannot begin."""
    script, announcement = report.draft.script, _announcement(report.draft.plan)
    for warning in _prepare(report):
        _logger.warning(warning)
    _logger.info(announcement)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp("bash", ["bash", "-c", unwrap_script(script)])


def _prepare(report: CheckReport) -> list[str]:
    """Check the shell's needs on this machine, and make its directories; return warnings."""
    draft, plan = report.draft, report.draft.plan
    program = _PROGRAMS.get(plan.scheduler)
    if program is not None and shutil.which(program) is None:
        raise UserError(f"{program} is not on this machine: there is no Slurm here", hint=WITHOUT_SLURM)
    warnings = ignored(plan, os.environ)
    if plan.scheduler == "slurm":
        # sbatch says beforehand why salloc would refuse or wait.
        report = show_to_scheduler(report)
        require_passed([report])
        warnings += [
            finding.message for finding in report.select(Severity.WARNING) if finding.id == SCHEDULER
        ]
    with draft.composition.annotated():
        make_directories(plan.job.directories, draft.results_key)
    return warnings


def ignored(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """Warn about variables for salloc that do not reach it: the configuration decides."""
    if plan.scheduler != "slurm":
        return []
    return [
        f"{name}={environment[name]} of your shell is not passed on to salloc"
        for name in sorted(environment)
        if name.startswith("SALLOC_")
    ]


def unwrap_script(script: str) -> str:
    """Remove the parentheses around the commands, which are for a shell that they are pasted into.

    In them bash would wait for salloc, and not pass on a signal that ends it: the node would stay taken.
    """
    match = _IN_PARENTHESES.fullmatch(script)
    return match[1] if match is not None else script


def _announcement(plan: Plan) -> str:
    places = {"local": "on this machine", "allocation": "in this allocation"}
    place = places.get(plan.scheduler, "on a node of Slurm's")
    container = plan.job.container if plan.scheduler != "local" else None
    inside = f", in {container.image}" if container is not None else ""
    return f"{plan.job.payload.argv[0]} {place}{inside}; leaving it ends the workspace"
