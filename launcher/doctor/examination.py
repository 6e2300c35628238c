"""Examination of the surroundings of a launch: facts are gathered first, and judged afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from shlex import quote

from launcher.doctor import container_rules as containers
from launcher.doctor import gathering
from launcher.doctor import tool_rules as tools
from launcher.doctor.facts import Credentials, Image, Machine, Requirements, Slurm
from launcher.doctor.nodes import Answers, look, start
from launcher.doctor.report import Line, merged, missing, ok, unknown
from launcher.drafting import Draft
from launcher.errors import UserError
from supervisor.settings import OLDEST_PYTHON

HERE = "here"
NODES = "nodes"
SILENT = "silent"
_OLDEST_PYTHON = ".".join(map(str, OLDEST_PYTHON))
_INSTALL_PYTHON = f"install python3, {_OLDEST_PYTHON} or newer, on the nodes"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The facts that the rules are functions of.

    `trainer` is True if the tasks' interpreter will do here, and a message about it; None if the launch uses
    none.
    """

    needs: Requirements
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
    draft: Draft, *, image: str | None, count: int, patience: float, starts: bool = False
) -> tuple[Surroundings, list[Line]]:
    """Examine this machine, the cluster and `count` of its nodes for everything that a launch needs.

    `image` is another one than the launch's own, and `patience` the seconds to wait for the nodes. Raise
    UserError if `image` is no image's name, or Pyxis does not start it, or there are too few nodes.
    """
    surroundings = _gather(draft, image, count, patience, starts)
    return surroundings, apply_rules(surroundings)


def _gather(draft: Draft, image: str | None, count: int, patience: float, starts: bool) -> Surroundings:
    plan = draft.plan
    needs = gathering.needs_of(plan)
    name = image or (plan.job.container.image if plan.job.container is not None and needs.image else None)
    key = "--image" if image else "container"
    chosen = gathering.image_named(name, key) if name is not None else None
    if chosen is not None:
        # The GPUs of the launch come in place of the image's own.
        chosen = replace(chosen, devices=plan.job.environment.get(gathering.DEVICES, chosen.devices))
    startable = _startable(needs, chosen) if starts else None
    slurm = gathering.slurm(plan) if plan.scheduler != "local" else None
    plugstack = slurm.settings.get("PlugStackConfig") if slurm is not None else None
    machine = gathering.this_machine(plan, plugstack)
    python = plan.job.payload.argv[0] if needs.trainer else None
    answers = None
    if count and (slurm is None or slurm.why is None):
        nodes = slurm.nodes if slurm is not None else {}
        have = sum(usable for _, usable in nodes.values())
        if nodes and count > have:
            text = f"--nodes {count}: {have} take jobs in partition {', '.join(nodes)}"
            raise UserError(text, hint="cluster.partition=...")
        files = [path for path in (chosen.path if chosen else None, python) if path is not None]
        pyxis = machine.plugstack.options if needs.enroot else None
        stage = plan.job.container.options.stage_to if plan.job.container is not None else None
        request = gathering.probe_request(plugstack=plugstack, pyxis=pyxis, files=files, stage=stage)
        environment = gathering.environment_of(plan)
        answers = look(plan, count, request, environment, patience)
        if startable is not None and slurm is not None and slurm.pyxis:
            # On the examined nodes: others may differ from them.
            started, why = start(plan, startable, answers.names or count, environment, patience)
            answers = replace(answers, started=started, why_not_started=why)
    return Surroundings(
        needs=needs,
        slurm=slurm,
        here=machine,
        image=chosen,
        credentials=tuple(gathering.credentials()),
        launcher=f"{sys.version.split()[0]}, {sys.executable}",
        versions={name: gathering.version_of(name) for names, _ in tools.EXTRAS.values() for name in names},
        trainer=gathering.trainer_of(draft, needs),
        python=python,
        answers=answers,
    )


def _startable(needs: Requirements, image: Image | None) -> str:
    """Return the image's name for Pyxis; refuse one that Pyxis does not start."""
    if image is None or not needs.enroot:
        text = "nothing that Pyxis would start: the launch has no container, or another runtime"
        raise UserError(f"--start: {text}", hint="container=/images/nemo.sqsh, or another file or reference")
    if image.for_pyxis is None:
        text = f"--start: {image.name}: nodes cannot fetch it by themselves"
        raise UserError(text, hint=f"slipway image import {quote(image.name)}, and then its file")
    return image.for_pyxis


def apply_rules(surroundings: Surroundings) -> list[Line]:
    """Return the report of what was gathered."""
    reports: list[tuple[str, Iterable[Line]]] = [(HERE, _of_this_machine(surroundings))]
    answers = surroundings.answers
    if answers is not None:
        blind = missing("python", "no Python: nothing keeps a job here", _INSTALL_PYTHON, needed=True)
        reports += [(name, [blind]) for name in answers.blind]
        reports += [(machine.host, _of_node(machine, surroundings)) for machine in answers.machines]
        started = answers.started or ()
        reports += [(name, [ok("container", "the image starts there", needed=True)]) for name in started]
        if answers.started is not None and len(started) < answers.requested:
            why = answers.why_not_started or "no reason given"
            text = f"the image starts on {len(started)} of {answers.requested} nodes: {why}"
            fix = "see the lines of image, pyxis and enroot"
            if "nvidia-container-cli" in why:
                fix = containers.WITHOUT_GPU_TOOLS
            not_started = [name for name in answers.names if name not in started] or [NODES]
            reports += [(name, [missing("container", text, fix, needed=True)]) for name in not_started]
        if answers.silent:
            why = answers.why or "srun gives no reason"
            text = f"{answers.silent} of {answers.requested} did not answer: {why}"
            fix = "sinfo tells what is free; cluster.partition=..."
            reports.append((SILENT, [unknown(NODES, text, fix, needed=True)]))
    elif surroundings.needs.scheduler != "local":
        fix = "slipway doctor --nodes 1, or as many as a launch has"
        reports.append((NODES, [unknown(NODES, "not examined", fix)]))
    return merged(reports)


def _of_this_machine(surroundings: Surroundings) -> Iterator[Line]:
    machine, needs, image = surroundings.here, surroundings.needs, surroundings.image
    if surroundings.slurm is not None:
        yield from containers.slurm_lines(surroundings.slurm, needs)
        if surroundings.slurm.why is None:
            yield containers.pyxis_line(surroundings.slurm, needs, machine)
    yield from containers.enroot_lines(machine, needs, image, is_node=False)
    yield from tools.tool_lines(machine)
    line = tools.apptainer_line(machine, needs, is_node=False)
    if line is not None:
        yield line
    if image is not None:
        yield tools.image_line(image)
        if needs.engine is not None and image.contents is not None:
            yield tools.engine_line(image.contents, needs.engine)
    yield tools.credential_line(surroundings.credentials, image)
    yield from tools.gpu_lines(machine, image, is_node=False)
    yield from tools.python_lines(surroundings.launcher, surroundings.versions, surroundings.trainer)


def _of_node(node: Machine, surroundings: Surroundings) -> Iterator[Line]:
    needs, image = surroundings.needs, surroundings.image
    if needs.image:
        yield from containers.pyxis_node_lines(node, needs, image)
        if needs.enroot:
            yield from containers.enroot_lines(node, needs, image, is_node=True)
        yield tools.mounting(node, is_node=True)
        yield from tools.stage_lines(node, image)
    line = tools.apptainer_line(node, needs, is_node=True)
    if line is not None:
        yield line
    yield from tools.gpu_lines(node, image, is_node=True)
    if node.job_python == "":
        yield ok("python", f"{node.python} (which examined this node)")
    else:
        yield _job_python(node.job_python)
    yield from tools.file_lines(node, image if needs.image else None, surroundings.python)


def _job_python(answer: str | None) -> Line:
    """Report the Python of a node, version and path, which runs the supervisor of a job."""
    what, (version, _, path) = "python", (answer or "").partition(" ")
    if tuple(int(part) for part in version.split(".") if part.isdecimal()) >= OLDEST_PYTHON:
        return ok(what, f"{version} ({path}), which keeps jobs", needed=True)
    text = "no python3: nothing keeps a job here"
    if version:
        text = f"{path} is {version}: a job's supervisor needs {_OLDEST_PYTHON}"
    return missing(what, text, _INSTALL_PYTHON, needed=True)
