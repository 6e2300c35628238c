"""Rules about the tools of images, credentials, GPUs and Python: pure functions of the gathered facts.

The oldest driver of each CUDA is that of "CUDA Compatibility" (docs.nvidia.com/deploy/cuda-compatibility,
"Minor Version Compatibility": all releases of 11.x, 12.x and 13.x run on the first driver of their family,
with limited features; those of 10.x need the driver of their own release). The last places of 11 and 12 are
those of the CUDA Toolkit's release notes.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.checks.findings import Finding, Severity
from launcher.checks.rules.images import engine_fit
from launcher.doctor.facts import Credentials, Gpus, Image, Machine, Requirements
from launcher.doctor.report import PYTHON, missing, ok, release_status, thing, unknown, warning
from launcher.estimates.values import memory_text
from launcher.images.tools import explain_install
from launcher.releases import Contents, version
from slipway.common.extras import install_command

# Slipway's extras: their distributions, and the effect of their absence.
EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "containers": (("enroot-py",), "imports go through skopeo and umoci, even where there is Enroot"),
    "plot": (("matplotlib", "plotext"), "no pictures of the memory, no curves in the terminal"),
}
# By CUDA release, or by its family: the oldest driver of Linux that runs it.
_FAMILIES = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
_RELEASES = {(10, 0): (410, 48), (10, 1): (418, 39), (10, 2): (440, 33)}
_CONDITION = re.compile(r"(cuda|driver)(>=|<=|<|>|!=|=)([\d.]+)")
_COMPARE: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
    "!=": operator.ne,
}
_WANTED_COMPRESSORS = ("lz4", "zstd")
_COMPAT = "docs.nvidia.com/deploy/cuda-compatibility"
# Steps that give credentials to a registry; NVIDIA's has one user for all.
_LOGIN = (
    "skopeo login {0} (for nvcr.io the user is $oauthtoken, the password your NGC key); for Enroot a line "
    "`machine {1} login USER password KEY` in ~/.config/enroot/.credentials"
)


def tree_line(trees: Sequence[Path], why_open: Iterable[str]) -> Finding:
    """Return the line of the configuration trees, and of who else may change them."""
    text, why = ", ".join(map(str, trees)), "; ".join(why_open)
    fix = "let root own it, and no other user write it"
    return warning("trees", f"{text}; {why}", fix) if why else ok("trees", text)


def tool_lines(machine: Machine) -> Iterator[Finding]:
    """Report the programs that build, copy, squash and mount images."""
    yield _builders(machine)
    yield _tools(machine, "images.copy", ("skopeo",), "copies and pushes images")
    yield _tools(machine, "images.unpack", ("umoci",), "imports images without Enroot")
    yield _squashfs(machine)
    yield mount_line(machine)


def _name_tool(machine: Machine, name: str) -> str:
    return f"{name} {machine.tools[name] or ''}".strip()


def _builders(machine: Machine) -> Finding:
    what, usable, unusable = "images.build", [], []
    for name in ("docker", "podman", "buildah"):
        if name not in machine.tools:
            continue
        if name == "docker" and (machine.docker_daemon or "").startswith("!"):
            unusable.append(f"{_name_tool(machine, name)} without a daemon that answers")
        elif name != "docker" and not machine.subordinate_ids:
            unusable.append(f"{_name_tool(machine, name)} without ids for you in /etc/subuid and /etc/subgid")
        else:
            usable.append(_name_tool(machine, name))
    if usable:
        return ok(what, ", ".join(usable + unusable))
    if unusable:
        fix = "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 YOU (root), or a docker daemon"
        return warning(what, ", ".join(unusable), fix)
    text = "neither docker, podman nor buildah: images cannot be built here"
    return missing(what, text, explain_install("buildah"))


def _tools(machine: Machine, what: str, names: Sequence[str], purpose: str) -> Finding:
    lacking = [name for name in names if name not in machine.tools]
    if lacking:
        return missing(what, f"no {', '.join(lacking)}, which {purpose}", explain_install(*lacking))
    return ok(what, ", ".join(_name_tool(machine, name) for name in names))


def _squashfs(machine: Machine) -> Finding:
    line = _tools(machine, "squashfs.make", ("mksquashfs", "unsquashfs"), "write and read images")
    if line.severity is not Severity.OK or not machine.compressors:
        return line
    text = f"{line.message}; compressors: {', '.join(machine.compressors)}"
    lacking = [name for name in _WANTED_COMPRESSORS if name not in machine.compressors]
    if lacking:
        fix = "compression: gzip of the image, or squashfs-tools of a newer system"
        return warning(line.id, f"{text}; without {' and '.join(lacking)}", fix)
    return ok(line.id, text)


def mount_line(machine: Machine, *, is_node: bool = False) -> Finding:
    """Report how a squashfs can be mounted; Pyxis unpacks it unless its `use_squashfuse` is set."""
    what, has_fuse = "squashfs.mount", "squashfuse" in machine.tools
    ways = ["the kernel"] if "squashfs" in machine.file_systems else []
    if has_fuse and machine.fuse:
        ways.append(_name_tool(machine, "squashfuse"))
    if ways:
        return ok(what, f"mounted by {' or '.join(ways)}")
    why = "squashfuse exists, but /dev/fuse does not" if has_fuse else "no squashfuse either"
    text = f"the kernel has no squashfs loaded, {why}: images are unpacked as a whole"
    if is_node and machine.plugstack.options.get("use_squashfuse") in ("1", "true", "yes", "y"):
        fix = "install squashfuse on the nodes: plugstack.conf has use_squashfuse"
        return missing(what, text, fix, needed=True)
    return warning(what, text, "modprobe squashfs (root), or install squashfuse")


def apptainer_line(machine: Machine, needs: Requirements, *, is_node: bool) -> Finding | None:
    """Report Apptainer if it starts the tasks or is installed."""
    what, is_runtime = "apptainer", needs.image and needs.runtime != "pyxis"
    needed, program = is_runtime and is_node, needs.runtime if is_runtime else what
    if program in machine.tools:
        return ok(what, _name_tool(machine, program), needed=needed)
    other = "singularity" if program == what else what
    if other in machine.tools:
        text, fix = _name_tool(machine, other), f"container_options.runtime={other}"
        return missing(what, text, fix, needed=needed) if is_runtime else ok(what, text)
    if not is_runtime:
        return None
    text = f"not on PATH, and container_options.runtime={program}"
    return missing(what, text, explain_install("apptainer"), needed=is_node)


def credential_line(files: Sequence[Credentials], image: Image | None) -> Finding:
    """Report the registries with credentials, never the credentials."""
    what, registry = "credentials", image.registry if image is not None else None
    host = (registry or "").partition(":")[0]  # in Enroot's file, hosts have no ports
    hosts = {name.partition("/")[0] for file in files for name in file.registries}
    open_to_all = [file.path for file in files if not file.is_private]
    text = "; ".join(f"{file.path}: {', '.join(file.registries) or 'none'}" for file in files)
    text = text or "none: only public images"
    if open_to_all:
        fix = f"chmod 600 {' '.join(open_to_all)}; and new keys, if others may have read them"
        return warning(what, f"{text}; others may read {', '.join(open_to_all)}", fix)
    if image is not None and registry is not None and not hosts & {registry, host}:
        text = f"{text}; none for {registry}, where {image.name} is"
        return warning(what, text, f"if it asks for some: {_LOGIN.format(registry, host)}")
    return ok(what, text)


def gpu_lines(machine: Machine, image: Image | None, *, is_node: bool) -> Iterator[Finding]:
    """Report the GPUs and their driver, and if it runs the image's CUDA."""
    gpus = machine.gpus
    if gpus is None:
        if is_node:
            yield warning("gpu", "no nvidia-smi: no NVIDIA GPUs", "see `sinfo -o '%N %G'`")
        return
    if gpus.driver is None:
        fix = "nvidia-smi; a driver that was updated needs a restart"
        yield warning("gpu", f"nvidia-smi: {gpus.trouble or 'no GPU'}", fix)
        return
    listed = ", ".join(f"{count} × {name}" for name, count in Counter(gpus.names).items())
    cuda = f", CUDA {gpus.cuda}" if gpus.cuda else ""
    yield ok("gpu", f"driver {gpus.driver}{cuda}: {listed}")
    if image is not None:
        yield _driver_and_image(gpus.driver, gpus, image, is_node)


def _driver_and_image(driver: str, gpus: Gpus, image: Image, needed: bool) -> Finding:
    what, cuda, origin = "gpu.image", image.cuda, ""
    if cuda is None and image.contents is not None and image.contents.cuda is not None:
        cuda, origin = image.contents.cuda, f", as {image.contents.origin} has it"
        needed = needed and image.contents.is_certain
    if cuda is None:
        why = image.why or "its environment has no CUDA_VERSION"
        return unknown(what, f"the CUDA of {image.name} is unknown: {why}")
    wants = f"the image's CUDA {cuda}{origin}"
    runs, least = cuda_support(driver, cuda)
    carries = image.compat_driver is not None and version(image.compat_driver) > version(driver)
    compat = f"a driver of {least}; or cuda-compat in the image, on data center GPUs ({_COMPAT})"
    if carries:
        compat = f"the image carries the libraries of {image.compat_driver}, which data center GPUs can run"
    if image.requires is not None and not fulfils(driver, gpus.cuda, image.requires):
        text = f"nvidia-container-cli refuses driver {driver}: {image.requires.split()[0]} is asked for"
        fix = f"a newer driver; or NVIDIA_DISABLE_REQUIRE=1 in env_vars, and {compat}"
        return missing(what, f"{wants}: {text}", fix, needed=needed)
    if runs is None:
        return unknown(what, f"{wants}: NVIDIA's table does not have it", f"see {_COMPAT}")
    if not runs:
        text = f"{wants} needs driver {least} or newer; here is {driver}"
        return warning(what, text, compat) if carries else missing(what, text, compat, needed=needed)
    if gpus.cuda is not None and version(gpus.cuda) < version(cuda)[:2]:
        text = (
            f"{wants} on a driver of CUDA {gpus.cuda}: runs by minor version compatibility, with its features"
        )
        return ok(what, f"{text}; {compat}" if carries else text)
    return ok(what, f"{wants}: driver {driver} runs it (from {least} on)")


def image_line(image: Image) -> Finding:
    """Report the image, as far as this machine can read it."""
    if image.is_broken:
        again = f"slipway image verify {image.path}; then import it again: slipway image import ..."
        return missing("image", f"{image.name}: {image.why}", again, needed=True)
    if image.why is not None:
        is_elsewhere = image.path is not None and image.size is None
        fix = "nodes may have it: slipway doctor --nodes 1" if is_elsewhere else None
        return unknown("image", f"{image.name}: {image.why}", fix)
    cuda = f"CUDA {image.cuda}" if image.cuda else "no CUDA_VERSION in its environment"
    size = f"{memory_text(image.size)}, " if image.size is not None else ""
    return ok("image", f"{image.name}: {size}{cuda}")


def engine_line(contents: Contents, engine: str) -> Finding:
    """Report whether the image has the programs of the launch's engine."""
    fit = engine_fit(contents, engine)
    what, text = "image.engine", f"engine={engine}: {fit.why}"
    if fit.fits is True:
        return ok(what, text, needed=True)
    report = missing if fit.fits is False and contents.is_certain else warning
    return report(what, text, fit.fix, needed=True)


def file_lines(node: Machine, image: Image | None, python: str | None) -> Iterator[Finding]:
    """Report the files of the launch that each node must have."""
    if image is not None and image.path is not None:
        size = node.files.get(image.path)
        if size is None:
            fix = "put it where all nodes share it, or on each node"
            yield missing("image", f"{image.path} is not there", fix, needed=True)
        elif image.size not in (None, size):
            text = f"{image.path} has {size:,} bytes, and {image.size:,} where you are"
            yield warning("image", text, "is it another file, or still being copied?", needed=True)
        else:
            yield ok("image", f"{image.path} is there", needed=True)
    if python is not None and node.files.get(python) is None:
        fix = "cluster.python=... that every node has, or an image: container=..."
        yield missing("trainer", f"{python} is not there", fix, needed=True)
    elif python is not None:
        yield ok("trainer", f"{python} is there", needed=True)


def python_lines(
    python: str, versions: Mapping[str, str | None], trainer: Sequence[Finding] | None
) -> Iterator[Finding]:
    """Report Slipway's own Python, its extras, and the tasks' interpreter."""
    severity, note = release_status(python, PYTHON)
    yield thing("python", f"{python}; {note}" if note else python, severity=severity, needed=True)
    for finding in trainer or ():
        is_error, fix = finding.severity is Severity.ERROR, (finding.fix or "").replace("\n", "; ")
        report, fix = (missing, fix) if is_error else (warning, fix or "slipway doctor --nodes 1 looks there")
        yield report("trainer", finding.message, fix or None, needed=True)
    if trainer is not None and not trainer:
        yield ok("trainer", "the tasks' interpreter finds torch and megatron-core", needed=True)
    for extra, (names, purpose) in EXTRAS.items():
        absent = ", ".join(name for name in names if versions.get(name) is None)
        if absent:
            yield missing(f"extra {extra}", f"{absent}: not installed; {purpose}", install_command(extra))
        else:
            yield ok(f"extra {extra}", ", ".join(f"{name} {versions[name]}" for name in names))


class CudaSupport(NamedTuple):
    """The support of a driver for a CUDA release; `runs` is None if the table omits it."""

    runs: bool | None
    minimum: str | None = None


def minimum_driver(cuda: str) -> tuple[int, ...] | None:
    """Return the oldest driver that runs a CUDA release; None if the table omits it."""
    numbers = version(cuda)
    if len(numbers) < 2:
        return None
    return _RELEASES.get((numbers[0], numbers[1]), _FAMILIES.get(numbers[0]))


def cuda_support(driver: str, cuda: str) -> CudaSupport:
    """Return the support of a driver for a CUDA release, without a compatibility package."""
    least = minimum_driver(cuda)
    if least is None:
        return CudaSupport(None)
    return CudaSupport(version(driver) >= least, ".".join(f"{number:02}" for number in least))


def fulfils(driver: str, driver_cuda: str | None, requires: str) -> bool:
    """Return True if nvidia-container-cli takes a driver for an image's ``NVIDIA_REQUIRE_CUDA``.

    Blanks separate alternatives, commas the conditions of one. Conditions on brands count as fulfilled: data
    centers have these brands.
    """
    known = {"driver": version(driver), "cuda": version(driver_cuda)}
    return any(
        all(_holds(condition, known) for condition in alternative.split(","))
        for alternative in requires.split()
    )


def _holds(condition: str, known: dict[str, tuple[int, ...]]) -> bool:
    match = _CONDITION.fullmatch(condition)
    if match is None or not known[match[1]]:
        return True
    bound = version(match[3])
    # `driver<536` is about its first number alone.
    return _COMPARE[match[2]](known[match[1]][: len(bound)], bound)
