"""Facts of this machine, Slurm, an image and files of credentials, gathered without a judgement."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.checks.findings import Severity
from launcher.checks.gathering.cluster import ask_cluster
from launcher.checks.gathering.host import host_facts
from launcher.checks.rules.files import engine_of_image, machine_problems
from launcher.doctor import probe
from launcher.doctor.facts import Credentials, Image, Machine, Requirements, Slurm, machine_of
from launcher.drafting import Draft
from launcher.errors import UserError, end_of, one_line
from launcher.images.references import DOCKER_HUB
from launcher.images.registry import HUB_MACHINES, login_file
from launcher.plan import Plan
from launcher.slurm.commands import Unreachable, error_text, run
from launcher.slurm.environment import clean_environment

DEVICES = "NVIDIA_VISIBLE_DEVICES"
PYXIS_RUNTIME = "pyxis runtime"
STAGE = "stage"
_PYXIS_RUNTIME_PATH = "/run/pyxis"  # Pyxis' config.c
_SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
_REGISTRY_PATIENCE_SECONDS = 20.0
# Of a job's environment Pyxis keeps these from Enroot: `enroot_deny_env` in its pyxis_slurmstepd.c.
_DENIED = """
    ALLOW_HTTP CACHE_PATH CONNECT_TIMEOUT DATA_PATH LIBRARY_PATH MAX_CONNECTIONS RUNTIME_PATH SYSCONF_PATH
    TEMP_PATH TRANSFER_RETRIES ZSTD_OPTIONS
"""
_KEPT_FROM_ENROOT = frozenset(f"ENROOT_{name}" for name in _DENIED.split())
_ENROOT_MACHINE = re.compile(r"^\s*machine\s+(\S+)", re.MULTILINE)


def needs_of(plan: Plan) -> Requirements:
    """Return the things that a launch cannot do without."""
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
    """Return the variables of the job that Enroot and its hooks read on a node, beside the user's."""
    read = ("ENROOT_", "NVIDIA_")
    own = {name: value for name, value in plan.job.environment.items() if name.startswith(read)}
    together = {**environment_here(plan), **own}
    return {name: value for name, value in together.items() if name not in _KEPT_FROM_ENROOT}


def this_machine(plan: Plan, plugstack: str | None) -> Machine:
    """Probe the machine that the launcher runs on."""
    return machine_of(probe.gather(probe_request(plugstack=plugstack), environment_here(plan)))


def probe_request(
    *,
    plugstack: str | None,
    pyxis: Mapping[str, str] | None = None,
    files: Iterable[str] = (),
    stage: str | None = None,
) -> dict[str, dict[str, str]]:
    """Return the request of a probe; `pyxis` are the options of Pyxis, None leaves its directory out."""
    request = {"files": {file: file for file in files}, "places": {}, "plugstack": {}}
    if plugstack:
        request["plugstack"]["slurm"] = plugstack
    if pyxis is not None:
        request["places"][PYXIS_RUNTIME] = pyxis.get("runtime_path", _PYXIS_RUNTIME_PATH)
    if stage is not None:
        request["places"][STAGE] = stage
    return request


def slurm(plan: Plan) -> Slurm:
    """Ask Slurm for its configuration, its nodes and Pyxis."""
    replies, facts = ask_cluster(plan, ("settings", "partitions", "nodes", "pyxis"))
    if replies["settings"].why is not None:
        return Slurm(why=replies["settings"].why)
    by_partition = facts.nodes or {}
    types = {name for nodes in by_partition.values() for node in nodes for name, _ in node.gpus}
    counts = {
        name: (len(nodes), sum(node.is_usable for node in nodes)) for name, nodes in by_partition.items()
    }
    settings = dict(_SETTING.findall(replies["settings"].text))
    return Slurm(settings=settings, pyxis=facts.pyxis, nodes=counts, gpus=tuple(sorted(types)))


def image_named(name: str, key: str) -> Image:
    """Return the image of a name, from its file or its registry; raise UserError if it is no image's name."""
    from launcher.images.references import Kind, Reference, contents_of_reference
    from launcher.images.resolve import contents_of_file

    reference = Reference.parse(name, key=key)
    image = Image(str(reference), registry=reference.registry, for_pyxis=reference.for_pyxis)
    if reference.kind is Kind.SQUASHFS:
        known = contents_of_file(reference.path)
        return _of_file(replace(image, path=str(reference.path), contents=known))
    image = replace(image, contents=contents_of_reference(reference))
    return _of_registry(image, reference.for_skopeo)


def _of_file(image: Image) -> Image:
    from launcher.images.inspecting import inspect

    assert image.path is not None
    try:
        content = inspect(Path(image.path))
    except UserError as error:
        return replace(image, why=error.message.removeprefix(f"{image.path}: "), is_broken=True)
    except OSError as error:
        return replace(image, why=(error.strerror or str(error)).lower())
    environment = dict(pair.partition("=")[::2] for pair in content.config.env)
    image = replace(_with_cuda(image, environment), size=content.size)
    # Without unsquashfs there is the record beside it, or nothing.
    return image if environment else replace(image, why=next(iter(content.notes), None))


def _of_registry(image: Image, name: str | None) -> Image:
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
        return replace(image, why=f"the registry's error: {end_of(one_line(_complaint(answer.stderr)))}")
    try:
        variables = json.loads(answer.stdout)["config"].get("Env") or []
    except (ValueError, KeyError, TypeError, AttributeError):
        return replace(image, why="the registry's answer cannot be read")
    return _with_cuda(image, dict(str(pair).partition("=")[::2] for pair in variables))


def _complaint(stderr: str) -> str:
    """Return the error of skopeo, without its time and level."""
    match = re.search(r'msg="(.*)"', stderr)
    return match[1].rpartition(": ")[2] if match else error_text(stderr)


def _with_cuda(image: Image, environment: Mapping[str, str]) -> Image:
    return replace(
        image,
        cuda=environment.get("CUDA_VERSION") or None,
        compat_driver=environment.get("CUDA_DRIVER_VERSION") or None,
        requires=environment.get("NVIDIA_REQUIRE_CUDA") or None,
        devices=environment.get(DEVICES) or None,
    )


def credentials() -> list[Credentials]:
    """Return the files of credentials that Enroot, docker, podman and skopeo read, with registries alone."""
    home = Path(os.environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 - there may be none
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
    return one_line(host if has_scheme else f"{host}{slash}{path}")


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


def trainer_of(draft: Draft, needs: Requirements) -> tuple[bool, str] | None:
    """Return True if the tasks' interpreter will do here, and a message; None if the launch uses none."""
    if not needs.trainer:
        return None
    findings = machine_problems(draft.plan, host_facts(draft.plan))
    # The launch itself reports other errors, such as an allocation that is too small.
    of_python = [finding for finding in findings if finding.key == "cluster.python"]
    messages = [str(UserError(finding.message, key=finding.key, hint=finding.fix)) for finding in of_python]
    is_good = all(finding.severity is not Severity.ERROR for finding in of_python)
    return is_good, "; ".join(messages)
