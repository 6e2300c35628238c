"""What is asked of this machine, of Slurm, of an image, of files of credentials; nothing is judged here."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.checks.rules.images import engine_of_image
from launcher.doctor import probe
from launcher.doctor.facts import Credentials, Image, Machine, Needs, Slurm, machine_of
from launcher.drafting import Draft
from launcher.errors import UserError, end_of, one_line
from launcher.images.credentials import HUB_MACHINES, login_file
from launcher.images.references import DOCKER_HUB
from launcher.plan import Plan
from launcher.runs.provenance import user
from launcher.slurm.cluster_questions import ask_at_once, facts_of, questions
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


def needs_of(plan: Plan) -> Needs:
    """What a launch cannot do without."""
    has_image = plan.job.container is not None and plan.scheduler != "local"
    return Needs(
        scheduler=plan.scheduler,
        image=has_image,
        runtime=plan.job.container.options.runtime if plan.job.container is not None else "pyxis",
        trainer=plan.job.engine == "megatron" and not has_image,
        engine=engine_of_image(plan),
    )


def environment_here(plan: Plan) -> dict[str, str]:
    """The user's environment, without what would change Slurm's answers."""
    return dict(os.environ) if plan.scheduler == "allocation" else clean_environment(plan.slurm_conf)


def environment_of(plan: Plan) -> dict[str, str]:
    """The environment of the job as far as Enroot and its hooks read it on a node."""
    read = ("ENROOT_", "NVIDIA_")
    own = {name: value for name, value in plan.job.environment.items() if name.startswith(read)}
    together = {**environment_here(plan), **own}
    return {name: value for name, value in together.items() if name not in _KEPT_FROM_ENROOT}


def with_devices_of(image: Image, plan: Plan) -> Image:
    """The image with the GPUs that the launch asks for in its place."""
    return replace(image, devices=plan.job.environment.get(DEVICES, image.devices))


def this_machine(plan: Plan, plugstack: str | None) -> Machine:
    """Look at the machine that the launcher runs on."""
    return machine_of(probe.gather(asked_of(plugstack=plugstack), environment_here(plan)))


def asked_of(
    *,
    plugstack: str | None,
    pyxis: Mapping[str, str] | None = None,
    files: Iterable[str] = (),
    stage: str | None = None,
) -> dict[str, dict[str, str]]:
    """What the probe is asked.

    Parameters
    ----------
    plugstack
        The file that Slurm names.
    pyxis
        The options that Pyxis has there; ``None`` leaves its directory out.
    stage
        Where the image is copied to on each node.
    """
    asked = {"files": {file: file for file in files}, "places": {}, "plugstack": {}}
    if plugstack:
        asked["plugstack"]["slurm"] = plugstack
    if pyxis is not None:
        asked["places"][PYXIS_RUNTIME] = pyxis.get("runtime_path", _PYXIS_RUNTIME_PATH)
    if stage is not None:
        asked["places"][STAGE] = stage
    return asked


def slurm(plan: Plan) -> Slurm:
    """Ask Slurm of itself."""
    asked = questions(plan.job.queue.partition, user())
    wanted = {name: asked[name] for name in ("settings", "partitions", "nodes", "pyxis")}
    replies = ask_at_once(wanted, plan.slurm_conf)
    if replies["settings"].why is not None:
        return Slurm(why=replies["settings"].why)
    found = facts_of(replies, of_default=plan.job.queue.partition is None)
    nodes = {
        name: (len(each), sum(node.is_usable for node in each)) for name, each in (found.nodes or {}).items()
    }
    types = {type_ for each in (found.nodes or {}).values() for node in each for type_, _ in node.gpus}
    return Slurm(
        settings=dict(_SETTING.findall(replies["settings"].text)),
        pyxis=found.pyxis,
        nodes=nodes,
        gpus=tuple(sorted(types)),
    )


def image_named(name: str, key: str) -> Image:
    """What an image says of itself: a file is looked into, and a registry is asked.

    Parameters
    ----------
    key
        The key or the option that names it.

    Raises
    ------
    UserError
        If it is no image's name.
    """
    from launcher.images import contents
    from launcher.images.references import Kind, Reference

    reference = Reference.parse(name, key=key)
    told = Image(str(reference), registry=reference.registry, for_pyxis=reference.for_pyxis)
    if reference.kind is Kind.SQUASHFS:
        known = contents.of_file(reference.path)
        return _of_file(replace(told, path=str(reference.path), contents=known))
    return _of_registry(replace(told, contents=contents.of_reference(reference)), reference.for_skopeo)


def _of_file(image: Image) -> Image:
    from launcher.images.inspecting import inspect

    assert image.path is not None
    try:
        found = inspect(Path(image.path))
    except UserError as error:
        return replace(image, why=error.message.removeprefix(f"{image.path}: "), is_broken=True)
    except OSError as error:
        return replace(image, why=(error.strerror or str(error)).lower())
    environment = dict(pair.partition("=")[::2] for pair in found.config.env)
    told = replace(_with_cuda(image, environment), size=found.size)
    # Without unsquashfs there is what a file beside it says, or nothing.
    return told if environment else replace(told, why=next(iter(found.notes), None))


def _of_registry(image: Image, name: str | None) -> Image:
    if name is None:
        return replace(image, why="it is looked into when it is imported")
    try:
        answer = run(
            ["skopeo", "inspect", "--config", name],
            clean_environment(None),
            _REGISTRY_PATIENCE_SECONDS,
            notify=False,
        )
    except Unreachable:
        return replace(image, why="skopeo is not here to ask the registry")
    except TimeoutError:
        return replace(image, why="the registry did not answer")
    if answer.code != 0:
        return replace(image, why=f"the registry did not tell: {end_of(one_line(_complaint(answer.stderr)))}")
    try:
        told = json.loads(answer.stdout)["config"].get("Env") or []
    except (ValueError, KeyError, TypeError, AttributeError):
        return replace(image, why="the registry's answer cannot be read")
    return _with_cuda(image, dict(str(pair).partition("=")[::2] for pair in told))


def _complaint(stderr: str) -> str:
    """What skopeo says is wrong, without its time and level."""
    found = re.search(r'msg="(.*)"', stderr)
    return found[1].rpartition(": ")[2] if found else error_text(stderr)


def _with_cuda(image: Image, environment: Mapping[str, str]) -> Image:
    return replace(
        image,
        cuda=environment.get("CUDA_VERSION") or None,
        compat_driver=environment.get("CUDA_DRIVER_VERSION") or None,
        requires=environment.get("NVIDIA_REQUIRE_CUDA") or None,
        devices=environment.get(DEVICES) or None,
    )


def credentials() -> list[Credentials]:
    """The files of credentials that Enroot, docker, podman and skopeo read; of each the registries alone."""
    home = Path(os.environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 - there may be none
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    enroot = login_file(os.environ)
    docker = Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    podman = [config / "containers" / "auth.json"]
    if runtime:
        podman.insert(0, Path(runtime) / "containers" / "auth.json")
    if os.environ.get("REGISTRY_AUTH_FILE"):
        podman.insert(0, Path(os.environ["REGISTRY_AUTH_FILE"]))
    asked = [("enroot", enroot), ("docker", docker), *(("podman", path) for path in dict.fromkeys(podman))]
    return [found for owner, path in asked if (found := _credentials(owner, path)) is not None]


def _credentials(owner: str, path: Path) -> Credentials | None:
    try:
        text, mode = path.read_text(encoding="utf-8", errors="replace"), path.stat().st_mode
    except OSError:
        return None
    registries = _ENROOT_MACHINE.findall(text) if owner == "enroot" else _auths(text)
    if not registries:
        return None
    unique = tuple(dict.fromkeys(map(_registry, registries)))
    return Credentials(owner, str(path), unique, is_private=not mode & 0o077)


def _registry(key: str) -> str:
    """The registry that a key of such a file is about, named as in images; without a login."""
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


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """The versions of distributions, without importing any."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def own_python() -> str:
    """The interpreter that runs the launcher."""
    return f"{sys.version.split()[0]}, {sys.executable}"


def trainer_of(made: Draft, needs: Needs) -> tuple[bool, str] | None:
    """Whether the tasks' interpreter will do here, and what there is to say; ``None`` if none is used."""
    from launcher.checks.gathering.host import check_host

    if not needs.trainer:
        return None
    try:
        told = check_host(made)
    except UserError as error:
        # Of others, such as an allocation that is too small, the launch is told.
        return (False, str(error)) if error.key == "cluster.python" else (True, "")
    return True, "; ".join(told)
