"""Examine this machine, a cluster and its nodes for a launch: gather facts, then judge them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any

from launcher.checks.findings import Finding
from launcher.checks.gathering.host import ask_cluster, host_facts
from launcher.checks.rules.images import engine_of_image
from launcher.checks.rules.launch import machine_problems
from launcher.checks.site_rules import read_rules
from launcher.config.compose import tree_roots
from launcher.config.site_trees import why_open
from launcher.doctor import container_rules as containers
from launcher.doctor import probe
from launcher.doctor import tool_rules as tools
from launcher.doctor.facts import Credentials, Image, Machine, Requirements, machine_of
from launcher.doctor.nodes import Answers, look, start
from launcher.doctor.report import merged, missing, ok, unknown
from launcher.drafting import Draft
from launcher.errors import UserError, end_of, escape
from launcher.images.references import DOCKER_HUB
from launcher.images.registry import HUB_MACHINES, login_file
from launcher.images.tools import strip_log
from launcher.plan import Plan
from launcher.slurm.cluster import ClusterFacts
from launcher.slurm.commands import Unreachable, error_text, run
from launcher.slurm.environment import clean_environment
from slipway.common.node.settings import OLDEST_PYTHON

_OLDEST_PYTHON = ".".join(map(str, OLDEST_PYTHON))
_INSTALL_PYTHON = f"install python3, {_OLDEST_PYTHON} or newer, on the nodes"
_DEVICES = "NVIDIA_VISIBLE_DEVICES"
_PYXIS_RUNTIME_PATH = "/run/pyxis"  # Pyxis' config.c
# The parts of the facts about the cluster that the rules use.
_ASKED = ("settings", "partitions", "nodes", "pyxis")
_REGISTRY_PATIENCE_SECONDS = 20.0
# Pyxis keeps these variables of a job from Enroot: `enroot_deny_env` in its pyxis_slurmstepd.c.
_DENIED = """
    ALLOW_HTTP CACHE_PATH CONNECT_TIMEOUT DATA_PATH LIBRARY_PATH MAX_CONNECTIONS RUNTIME_PATH SYSCONF_PATH
    TEMP_PATH TRANSFER_RETRIES ZSTD_OPTIONS
"""
_KEPT_FROM_ENROOT = frozenset(f"ENROOT_{name}" for name in _DENIED.split())
_ENROOT_MACHINE = re.compile(r"^\s*machine\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Examination:
    """The input of the rules.

    `trainer` has the findings about the tasks' interpreter; it is None if the launch runs another program.
    """

    needs: Requirements
    slurm: ClusterFacts | None
    here: Machine
    image: Image | None
    credentials: tuple[Credentials, ...]
    launcher: str
    versions: dict[str, str | None]
    trainer: Sequence[Finding] | None
    python: str | None
    answers: Answers | None = None
    trees: tuple[Finding, ...] = ()


def examine(
    draft: Draft, *, image: str | None, count: int, patience: float, starts: bool = False
) -> tuple[str, list[Finding]]:
    """Examine this machine, the cluster and `count` of its nodes for the needs of a launch.

    Return the name of this machine, and the findings.

    `image` replaces the launch's own; `patience` are the seconds to wait for the nodes. Raise UserError if
    `image` is not an image's name, or Pyxis does not start it, or the cluster has too few nodes.
    """
    plan, config_dirs = draft.plan, draft.composition.config_dirs
    read_rules(config_dirs)  # a mistake in one stops each launch
    needs = needs_of(plan)
    name = image or (plan.job.container.image if plan.job.container is not None and needs.image else None)
    key = "--image" if image else "container"
    chosen = resolve_image(name, key) if name is not None else None
    if chosen is not None:
        # The GPUs of the launch come in place of the image's own.
        chosen = replace(chosen, devices=plan.job.environment.get(_DEVICES, chosen.devices))
    startable = _require_startable(needs, chosen) if starts else None
    slurm = ask_cluster(plan, _ASKED) if plan.scheduler != "local" else None
    settings = slurm.settings.values if slurm is not None and slurm.settings is not None else {}
    plugstack = settings.get("PlugStackConfig")
    machine = machine_of(probe.gather(probe_request(plugstack=plugstack), environment_here(plan)))
    python = plan.job.payload.argv[0] if needs.trainer else None
    answers = None
    if count and (slurm is None or slurm.why_silent is None):
        nodes = (slurm.nodes if slurm is not None else None) or {}
        have = sum(node.is_usable for of_partition in nodes.values() for node in of_partition)
        if nodes and count > have:
            text = f"--nodes {count}: {have} take jobs in partition {', '.join(nodes)}"
            raise UserError(text, hint="cluster.partition=...")
        files = [path for path in (chosen.path if chosen else None, python) if path is not None]
        pyxis = machine.plugstack.options if needs.enroot else None
        stage = plan.job.container.options.stage_to if plan.job.container is not None else None
        request = probe_request(plugstack=plugstack, pyxis=pyxis, files=files, stage=stage)
        environment = environment_of(plan)
        answers = look(plan, count, request, environment, patience)
        if startable is not None and slurm is not None and slurm.pyxis:
            # On the examined nodes: others may differ from them.
            started, why = start(plan, startable, answers.names or count, environment, patience)
            answers = replace(answers, started=started, why_not_started=why)
    examination = Examination(
        needs=needs,
        slurm=slurm,
        here=machine,
        image=chosen,
        credentials=tuple(credentials()),
        launcher=f"{sys.version.split()[0]}, {sys.executable}",
        versions={name: version_of(name) for names, _ in tools.EXTRAS.values() for name in names},
        trainer=trainer_findings(draft, needs),
        python=python,
        trees=(tools.tree_line(tree_roots(config_dirs), filter(None, map(why_open, config_dirs))),),
        answers=answers,
    )
    return machine.host, apply_rules(examination)


def _require_startable(needs: Requirements, image: Image | None) -> str:
    """Return the image's name for Pyxis; refuse one that Pyxis does not start."""
    if image is None or not needs.enroot:
        text = "no image for Pyxis to start: the launch has no container, or another runtime"
        raise UserError(f"--start: {text}", hint="container=/images/nemo.sqsh, or another file or reference")
    if image.for_pyxis is None:
        text = f"--start: {image.name}: nodes cannot fetch it by themselves"
        raise UserError(text, hint=f"slipway image import {quote(image.name)}, and then its file")
    return image.for_pyxis


def apply_rules(examination: Examination) -> list[Finding]:
    reports: list[tuple[str, Iterable[Finding]]] = [("here", _examine_this_machine(examination))]
    answers = examination.answers
    if answers is not None:
        reports += [(name, [_job_python(None)]) for name in answers.unprobed]
        reports += [(machine.host, _examine_node(machine, examination)) for machine in answers.machines]
        started = answers.started or ()
        reports += [(name, [ok("container", "the image starts there", needed=True)]) for name in started]
        if answers.started is not None and len(started) < answers.requested:
            why = answers.why_not_started or "no reason given"
            text = f"the image starts on {len(started)} of {answers.requested} nodes: {why}"
            fix = "see the lines of image, pyxis and enroot"
            if "nvidia-container-cli" in why:
                fix = containers.WITHOUT_GPU_TOOLS
            not_started = [name for name in answers.names if name not in started] or ["nodes"]
            reports += [(name, [missing("container", text, fix, needed=True)]) for name in not_started]
        if answers.silent:
            why = answers.why or "srun gives no reason"
            text = f"{answers.silent} of {answers.requested} did not answer: {why}"
            fix = "sinfo shows free nodes; cluster.partition=..."
            reports.append(("silent", [unknown("nodes", text, fix, needed=True)]))
    elif examination.needs.scheduler != "local":
        fix = "slipway doctor --nodes 1, or as many as a launch has"
        reports.append(("nodes", [unknown("nodes", "not examined", fix)]))
    return merged(reports)


def _examine_this_machine(examination: Examination) -> Iterator[Finding]:
    machine, needs, image = examination.here, examination.needs, examination.image
    yield from examination.trees
    if examination.slurm is not None:
        yield from containers.slurm_lines(examination.slurm, needs)
        if examination.slurm.why_silent is None:
            yield containers.pyxis_line(examination.slurm, needs, machine)
    yield from containers.enroot_lines(machine, needs, image, is_node=False)
    yield from tools.tool_lines(machine)
    line = tools.apptainer_line(machine, needs, is_node=False)
    if line is not None:
        yield line
    if image is not None:
        yield tools.image_line(image)
        if needs.engine is not None and image.contents is not None:
            yield tools.engine_line(image.contents, needs.engine)
    yield tools.credential_line(examination.credentials, image)
    yield from tools.gpu_lines(machine, image, is_node=False)
    yield from tools.python_lines(examination.launcher, examination.versions, examination.trainer)


def _examine_node(node: Machine, examination: Examination) -> Iterator[Finding]:
    needs, image = examination.needs, examination.image
    if needs.image:
        yield from containers.pyxis_node_lines(node, needs, image)
        if needs.enroot:
            yield from containers.enroot_lines(node, needs, image, is_node=True)
        yield tools.mount_line(node, is_node=True)
        yield from containers.stage_lines(node, image)
    line = tools.apptainer_line(node, needs, is_node=True)
    if line is not None:
        yield line
    yield from tools.gpu_lines(node, image, is_node=True)
    if node.job_python == "":
        yield ok("python", f"{node.python} (which examined this node)")
    else:
        yield _job_python(node.job_python)
    yield from tools.file_lines(node, image if needs.image else None, examination.python)


def _job_python(answer: str | None) -> Finding:
    """Report the Python of a node, version and path, which runs the supervisor of a job."""
    what, (version, _, path) = "python", (answer or "").partition(" ")
    if tuple(int(part) for part in version.split(".") if part.isdecimal()) >= OLDEST_PYTHON:
        return ok(what, f"{version} ({path}), which supervises jobs", needed=True)
    text = "no Python 3: the job supervisor cannot run on this node"
    if version:
        text = f"{path} is {version}: a job's supervisor needs {_OLDEST_PYTHON}"
    return missing(what, text, _INSTALL_PYTHON, needed=True)


# --- the facts


def needs_of(plan: Plan) -> Requirements:
    has_image = plan.job.container is not None and plan.scheduler != "local"
    return Requirements(
        scheduler=plan.scheduler,
        image=has_image,
        runtime=plan.job.container.options.runtime if plan.job.container is not None else "pyxis",
        trainer=plan.job.engine == "megatron" and not has_image,
        engine=engine_of_image(plan),
    )


def environment_here(plan: Plan) -> dict[str, str]:
    """Return the user's environment, without the variables that change Slurm's answers."""
    return dict(os.environ) if plan.scheduler == "allocation" else clean_environment(plan.slurm_conf)


def environment_of(plan: Plan) -> dict[str, str]:
    """Return the user's variables, and those of the job that Enroot and its hooks read on a node."""
    read = ("ENROOT_", "NVIDIA_")
    own = {name: value for name, value in plan.job.environment.items() if name.startswith(read)}
    together = {**environment_here(plan), **own}
    return {name: value for name, value in together.items() if name not in _KEPT_FROM_ENROOT}


def probe_request(
    *,
    plugstack: str | None,
    pyxis: Mapping[str, str] | None = None,
    files: Iterable[str] = (),
    stage: str | None = None,
) -> dict[str, dict[str, str]]:
    """Return the request of a probe; `pyxis` are the options of Pyxis, None omits its directory."""
    request = {"files": {file: file for file in files}, "places": {}, "plugstack": {}}
    if plugstack:
        request["plugstack"]["slurm"] = plugstack
    if pyxis is not None:
        request["places"]["pyxis runtime"] = pyxis.get("runtime_path", _PYXIS_RUNTIME_PATH)
    if stage is not None:
        request["places"]["stage"] = stage
    return request


def resolve_image(name: str, key: str) -> Image:
    """Return the image of a name, from its file or its registry; raise UserError if it is no image's name."""
    from launcher.images.references import Kind, Reference, contents_of_reference
    from launcher.images.resolve import contents_of_file

    reference = Reference.parse(name, key=key)
    image = Image(str(reference), registry=reference.registry, for_pyxis=reference.for_pyxis)
    if reference.kind is Kind.SQUASHFS:
        known = contents_of_file(reference.path)
        return _add_file(replace(image, path=str(reference.path), contents=known))
    image = replace(image, contents=contents_of_reference(reference))
    return _add_registry(image, reference.for_skopeo)


def _add_file(image: Image) -> Image:
    from launcher.images.inspecting import inspect

    assert image.path is not None
    try:
        content = inspect(Path(image.path))
    except UserError as error:
        return replace(image, why=error.message.removeprefix(f"{image.path}: "), is_broken=True)
    except OSError as error:
        return replace(image, why=(error.strerror or str(error)).lower())
    environment = dict(pair.partition("=")[::2] for pair in content.config.env)
    image = replace(_add_cuda(image, environment), size=content.size)
    # Without unsquashfs only the record of the file is left, if any.
    return image if environment else replace(image, why=next(iter(content.notes), None))


def _add_registry(image: Image, name: str | None) -> Image:
    if name is None:
        return replace(image, why="its contents are read when it is imported")
    try:
        command = ["skopeo", "inspect", "--config", name]
        answer = run(command, clean_environment(None), _REGISTRY_PATIENCE_SECONDS, notify=False)
    except Unreachable:
        return replace(image, why="no skopeo on this machine to ask the registry")
    except TimeoutError:
        return replace(image, why="the registry did not answer")
    if answer.code != 0:
        messages = [strip_log(line) for line in answer.stderr.splitlines() if "level=" in line]
        text = re.sub(r'Error parsing image name "\S*": ', "", (messages or [error_text(answer.stderr)])[-1])
        return replace(image, why=f"the registry's error: {end_of(escape(text))}")
    try:
        variables = json.loads(answer.stdout)["config"].get("Env") or []
    except (ValueError, KeyError, TypeError, AttributeError):
        return replace(image, why="the registry's answer cannot be read")
    return _add_cuda(image, dict(str(pair).partition("=")[::2] for pair in variables))


def _add_cuda(image: Image, environment: Mapping[str, str]) -> Image:
    return replace(
        image,
        cuda=environment.get("CUDA_VERSION") or None,
        compat_driver=environment.get("CUDA_DRIVER_VERSION") or None,
        requires=environment.get("NVIDIA_REQUIRE_CUDA") or None,
        devices=environment.get(_DEVICES) or None,
    )


def credentials() -> list[Credentials]:
    """Return the files of credentials that Enroot, docker, podman and skopeo read, with registries alone."""
    home = Path(os.environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 - home may be unknown
    docker = Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    named, runtime = os.environ.get("REGISTRY_AUTH_FILE"), os.environ.get("XDG_RUNTIME_DIR")
    podman = [Path(named)] if named else []
    podman += [Path(runtime) / "containers" / "auth.json"] if runtime else []
    podman.append(Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers" / "auth.json")
    readers = {login_file(os.environ): _ENROOT_MACHINE.findall} | dict.fromkeys([docker, *podman], _auths)
    return [file for path, read in readers.items() if (file := _credentials(path, read)) is not None]


def _credentials(path: Path, read: Callable[[str], list[str]]) -> Credentials | None:
    try:
        text, mode = path.read_text(encoding="utf-8", errors="replace"), path.stat().st_mode
    except OSError:
        return None
    registries = read(text)
    if not registries:
        return None
    unique = tuple(dict.fromkeys(map(_registry, registries)))
    return Credentials(str(path), unique, is_private=not mode & 0o077)


def _registry(key: str) -> str:
    """Return the registry of a key of such a file, named as in images, without a login."""
    scheme, has_scheme, address = key.partition("://")
    host, slash, path = (address if has_scheme else scheme).partition("/")
    host = host.rpartition("@")[2]
    if host in HUB_MACHINES or host == "index.docker.io":
        return DOCKER_HUB
    # Behind a scheme the path is that of the interface, such as /v1/; else it is a part of the registry.
    return escape(host if has_scheme else f"{host}{slash}{path}")


def _auths(text: str) -> list[str]:
    try:
        content: Any = json.loads(text)
    except ValueError:
        return []
    if not isinstance(content, dict):
        return []
    parts = (content.get(name) for name in ("auths", "credHelpers"))
    return [name for part in parts if isinstance(part, dict) for name in part]


def version_of(name: str) -> str | None:
    """Return the version of a distribution, without importing it; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def trainer_findings(draft: Draft, needs: Requirements) -> list[Finding] | None:
    """Return the findings about the tasks' interpreter; None if the launch runs another program."""
    if not needs.trainer:
        return None
    # The launch itself reports other errors, such as an allocation that is too small.
    findings = machine_problems(draft.plan, host_facts(draft))
    return [finding for finding in findings if finding.key == "cluster.python"]
