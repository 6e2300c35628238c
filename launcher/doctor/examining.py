"""A launch's surroundings are examined: gathered first, judged afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from shlex import quote

from launcher.doctor import gathering
from launcher.doctor.facts import Credentials, Image, Machine, Needs, Slurm
from launcher.doctor.judging_enroot import WITHOUT_GPU_TOOLS, enroot_lines
from launcher.doctor.judging_slurm import pyxis_lines, pyxis_node_lines, slurm_lines
from launcher.doctor.judging_tools import (
    EXTRAS,
    apptainer_line,
    credential_lines,
    engine_line,
    file_lines,
    gpu_lines,
    image_line,
    mounting,
    python_lines,
    stage_lines,
    tool_lines,
)
from launcher.doctor.lines import Line, Row, Status, rows
from launcher.doctor.nodes import Answers, look, start
from launcher.drafting import Draft
from launcher.errors import UserError

HERE = "here"
NODES = "nodes"
SILENT = "silent"
_STARTS = "the image starts there"


@dataclass(frozen=True, slots=True)
class Gathered:
    """All that judging is a function of.

    Attributes
    ----------
    trainer
        Whether the tasks' interpreter will do here, and what there is to say; ``None`` if none is used.
    python
        The path of that interpreter, which nodes must have.
    answers
        Of compute nodes; ``None`` if none were asked.
    """

    needs: Needs
    slurm: Slurm | None
    here: Machine
    image: Image | None
    credentials: tuple[Credentials, ...]
    launcher: str
    versions: dict[str, str | None]
    trainer: tuple[bool, str] | None
    python: str | None
    answers: Answers | None = None


def examine(
    made: Draft, *, image: str | None, count: int, patience: float, starts: bool = False
) -> tuple[Gathered, list[Row]]:
    """Look at this machine, the cluster and some of its nodes for what a launch needs.

    Parameters
    ----------
    image
        One other than the launch's own.
    count
        How many compute nodes to look at.
    patience
        In seconds, for these.
    starts
        Start the image there, too.

    Raises
    ------
    UserError
        If `image` is no image's name, or is not started through Pyxis, or there are no nodes that could be
        asked.
    """
    gathered = _gather(made, image, count, patience, starts)
    return gathered, judge(gathered)


def _gather(made: Draft, image: str | None, count: int, patience: float, starts: bool) -> Gathered:
    plan = made.plan
    needs = gathering.needs_of(plan)
    name = image or (plan.job.container.image if plan.job.container is not None and needs.image else None)
    key = "--image" if image else "container"
    found = gathering.with_devices_of(gathering.image_named(name, key), plan) if name is not None else None
    startable = _startable(needs, found) if starts else None
    slurm = gathering.slurm(plan) if plan.scheduler != "local" else None
    plugstack = slurm.settings.get("PlugStackConfig") if slurm is not None else None
    here = gathering.this_machine(plan, plugstack)
    python = plan.job.payload.argv[0] if needs.trainer else None
    answers = None
    if count and (slurm is None or slurm.why is None):
        _require_nodes(slurm, count)
        files = [path for path in (found.path if found else None, python) if path is not None]
        pyxis = here.plugstack.options if needs.enroot else None
        stage = plan.job.container.options.stage_to if plan.job.container is not None else None
        asked = gathering.asked_of(plugstack=plugstack, pyxis=pyxis, files=files, stage=stage)
        environment = gathering.environment_of(plan)
        answers = look(plan, count, asked, environment, patience)
        if startable is not None and slurm is not None and slurm.pyxis:
            # Those that were looked at: others may differ from them.
            started, why = start(plan, startable, answers.names or count, environment, patience)
            answers = replace(answers, started=started, why_not_started=why)
    return Gathered(
        needs=needs,
        slurm=slurm,
        here=here,
        image=found,
        credentials=tuple(gathering.credentials()),
        launcher=gathering.own_python(),
        versions=gathering.versions(name for names, _ in EXTRAS.values() for name in names),
        trainer=gathering.trainer_of(made, needs),
        python=python,
        answers=answers,
    )


def _startable(needs: Needs, image: Image | None) -> str:
    """The image in Pyxis' words; refuse what is not started through it."""
    if image is None or not needs.enroot:
        told = "nothing that Pyxis would start: the launch has no container, or another runtime"
        raise UserError(f"--start: {told}", hint="container=/images/nemo.sqsh, or another file or reference")
    if image.for_pyxis is None:
        told = f"--start: {image.name}: nodes cannot fetch it by themselves"
        raise UserError(told, hint=f"slipway image import {quote(image.name)}, and then its file")
    return image.for_pyxis


# The oldest that supervisor.pyz runs with.
_SUPERVISOR_PYTHON = (3, 6)
_INSTALL_PYTHON = "install python3, 3.6 or newer, on the nodes"


def _require_nodes(slurm: Slurm | None, count: int) -> None:
    """Refuse to wait for nodes that there are not."""
    have = sum(usable for _, usable in slurm.nodes.values()) if slurm is not None else 0
    if slurm is not None and slurm.nodes and count > have:
        names = ", ".join(slurm.nodes)
        raise UserError(
            f"--nodes {count}: {have} take jobs in partition {names}", hint="cluster.partition=..."
        )


def judge(gathered: Gathered) -> list[Row]:
    """What there is to say of all that was gathered: a pure function."""
    told: list[tuple[str, list[Line]]] = [(HERE, list(_of_here(gathered)))]
    answers = gathered.answers
    if answers is not None:
        told += [(name, list(_without_python())) for name in answers.blind]
        told += [(machine.host, list(_of_node(machine, gathered))) for machine in answers.machines]
        told += [
            (name, [Line("container", Status.OK, _STARTS, needed=True)]) for name in answers.started or ()
        ]
        if answers.started is not None and len(answers.started) < answers.asked:
            lacking = [name for name in answers.names if name not in answers.started] or [NODES]
            told += [(name, [_not_started(answers, len(answers.started))]) for name in lacking]
        if answers.silent:
            told.append((SILENT, [_silent(answers)]))
    elif gathered.needs.scheduler != "local":
        told.append((NODES, [_not_looked_at()]))
    return rows(told)


def _of_here(gathered: Gathered) -> Iterator[Line]:
    here, needs, image = gathered.here, gathered.needs, gathered.image
    if gathered.slurm is not None:
        yield from slurm_lines(gathered.slurm, needs)
        if gathered.slurm.why is None:
            yield from pyxis_lines(gathered.slurm, needs, here)
    yield from enroot_lines(here, needs, image, is_node=False)
    yield from tool_lines(here)
    line = apptainer_line(here, needs, is_node=False)
    if line is not None:
        yield line
    if image is not None:
        yield image_line(image)
        if needs.engine is not None and image.contents is not None:
            yield engine_line(image.contents, needs.engine)
    yield from credential_lines(gathered.credentials, image)
    yield from gpu_lines(here, image, is_node=False)
    yield from python_lines(gathered.launcher, gathered.versions, gathered.trainer)


def _of_node(node: Machine, gathered: Gathered) -> Iterator[Line]:
    needs, image = gathered.needs, gathered.image
    if needs.image:
        yield from pyxis_node_lines(node, needs, image)
        if needs.enroot:
            yield from enroot_lines(node, needs, image, is_node=True)
        yield mounting(node, is_node=True)
        yield from stage_lines(node, image)
    line = apptainer_line(node, needs, is_node=True)
    if line is not None:
        yield line
    yield from gpu_lines(node, image, is_node=True)
    yield _job_python(node)
    yield from file_lines(node, image if needs.image else None, gathered.python)


def _job_python(node: Machine) -> Line:
    """Tell whether the supervisor of a job, which is Python, runs on a node."""
    if node.job_python == "":
        return Line("python", Status.OK, f"{node.python} (which looked at this node)")
    version, _, path = (node.job_python or "").partition(" ")
    if tuple(int(part) for part in version.split(".") if part.isdecimal())[:2] >= _SUPERVISOR_PYTHON:
        return Line("python", Status.OK, f"{version} ({path}), which keeps jobs", needed=True)
    told = (
        f"{path} is {version}: a job's supervisor needs 3.6"
        if version
        else "no python3: nothing keeps a job here"
    )
    return Line("python", Status.MISSING, told, _INSTALL_PYTHON, True)


def _without_python() -> Iterator[Line]:
    yield Line("python", Status.MISSING, "no Python: nothing keeps a job here", _INSTALL_PYTHON, True)


def _silent(answers: Answers) -> Line:
    told = f"{answers.silent} of {answers.asked} did not answer: {answers.why or 'srun gives no reason'}"
    return Line(NODES, Status.UNKNOWN, told, "sinfo tells what is free; cluster.partition=...", True)


def _not_started(answers: Answers, count: int) -> Line:
    why = answers.why_not_started or "no reason given"
    told = f"the image starts on {count} of {answers.asked} nodes: {why}"
    fix = WITHOUT_GPU_TOOLS if "nvidia-container-cli" in why else None
    return Line("container", Status.MISSING, told, fix or "see the lines of image, pyxis and enroot", True)


def _not_looked_at() -> Line:
    return Line(
        NODES, Status.UNKNOWN, "not looked at", "slipway doctor --nodes 1, or as many as a launch has"
    )
