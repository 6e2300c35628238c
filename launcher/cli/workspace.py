"""`slipway launch stages=[workspace]`: a shell on a node instead of a job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from launcher.drafting import Draft
from launcher.errors import UserError
from launcher.stages.workspace import STAGE

# What is for jobs that one does not sit at.
_FOR_JOBS = ("smoke", "follow", "json")


def is_workspace(made: Sequence[Draft]) -> bool:
    """Whether it is a shell that was asked for."""
    return made[0].plan.job.stage == STAGE


def refuse_options(args: argparse.Namespace) -> None:
    """Refuse the options that say nothing of a shell.

    Raises
    ------
    UserError
        Naming the option.
    """
    for name in _FOR_JOBS:
        if getattr(args, name, False):
            raise UserError(
                f"--{name}: stages=[{STAGE}] is a shell to sit at, and no job that is submitted", key="stages"
            )


def open_workspace(made: Draft) -> NoReturn:
    """Say what there will be, and become it.

    Raises
    ------
    UserError
        If there is no node to be had from here, with what to do about it.
    """
    # Imported late: a dry run starts nothing.
    from launcher.launching.workspace import become, prepare

    for warning in prepare(made):
        print(f"slipway: {warning}", file=sys.stderr)
    print(f"slipway: {_told(made)}", file=sys.stderr, flush=True)
    become(made)


def _told(made: Draft) -> str:
    plan = made.plan
    places = {"local": "on this machine", "allocation": "in this allocation"}
    where = places.get(plan.scheduler, "on a node of Slurm's")
    container = plan.job.container if plan.scheduler != "local" else None
    inside = f", in {container.image}" if container is not None else ""
    return f"{plan.job.payload.argv[0]} {where}{inside}; leaving it ends the workspace"
