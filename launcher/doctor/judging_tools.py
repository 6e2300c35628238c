"""What images are made, copied and mounted with, credentials, GPUs and Python, judged: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.checks.rules.images import engine_fit
from launcher.doctor.cuda import fulfils, verdict, version
from launcher.doctor.facts import Credentials, Gpus, Image, Machine, Needs
from launcher.doctor.lines import Line, Status, gib
from launcher.doctor.proven import PYTHON, judge
from launcher.images.tools import how_to_get
from launcher.releases import Contents

_WANTED_COMPRESSORS = ("lz4", "zstd")
_COMPAT = "docs.nvidia.com/deploy/cuda-compatibility"
# How to give credentials to a registry; NVIDIA's has one user for all.
_LOGIN = (
    "skopeo login {0} (for nvcr.io the user is $oauthtoken, the password your NGC key); for Enroot a line "
    "`machine {1} login USER password KEY` in ~/.config/enroot/.credentials"
)


def tool_lines(machine: Machine) -> Iterator[Line]:
    """What builds, copies, squashes and mounts images."""
    yield _builders(machine)
    yield _one(machine, "images.copy", ("skopeo",), "images are copied and pushed")
    yield _one(machine, "images.unpack", ("umoci",), "images are imported without Enroot")
    yield _squashfs(machine)
    yield mounting(machine)


def _builders(machine: Machine) -> Line:
    works, does_not = [], []
    for name in ("docker", "podman", "buildah"):
        if name not in machine.tools:
            continue
        told = f"{name} {machine.tools[name].version or ''}".strip()
        daemon = machine.docker_daemon or ""
        if name == "docker" and daemon.startswith("!"):
            does_not.append(f"{told} without a daemon that answers")
        elif name != "docker" and not machine.subordinate_ids:
            does_not.append(f"{told} without ids for you in /etc/subuid and /etc/subgid")
        else:
            works.append(told)
    told = ", ".join(works + does_not)
    if works:
        return Line("images.build", Status.OK, told)
    if does_not:
        fix = "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 YOU (root), or a docker daemon"
        return Line("images.build", Status.WARNING, told, fix)
    none = "neither docker, podman nor buildah: images cannot be built here"
    return Line("images.build", Status.MISSING, none, how_to_get("buildah"))


def _one(machine: Machine, what: str, names: Sequence[str], purpose: str) -> Line:
    lacking = [name for name in names if name not in machine.tools]
    if lacking:
        return Line(
            what, Status.MISSING, f"no {', '.join(lacking)}, by which {purpose}", how_to_get(*lacking)
        )
    told = ", ".join(f"{name} {machine.tools[name].version or ''}".strip() for name in names)
    return Line(what, Status.OK, told)


def _squashfs(machine: Machine) -> Line:
    what, names = "squashfs.make", ("mksquashfs", "unsquashfs")
    line = _one(machine, what, names, "images are written and looked into")
    if line.status is not Status.OK or not machine.compressors:
        return line
    told = f"{line.found}; compressors: {', '.join(machine.compressors)}"
    lacking = [name for name in _WANTED_COMPRESSORS if name not in machine.compressors]
    if lacking:
        fix = "compression: gzip of the image, or squashfs-tools of a newer system"
        return Line(what, Status.WARNING, f"{told}; without {' and '.join(lacking)}", fix)
    return Line(what, Status.OK, told)


def mounting(machine: Machine, *, is_node: bool = False) -> Line:
    """How a squashfs could be mounted; Pyxis unpacks it unless its `use_squashfuse` is set."""
    ways = []
    if "squashfs" in machine.file_systems:
        ways.append("the kernel")
    if "squashfuse" in machine.tools and machine.fuse:
        ways.append(f"squashfuse {machine.tools['squashfuse'].version or ''}".strip())
    if ways:
        return Line("squashfs.mount", Status.OK, f"mounted by {' or by '.join(ways)}")
    why = (
        "squashfuse is there, and /dev/fuse is not"
        if "squashfuse" in machine.tools
        else "no squashfuse either"
    )
    told = f"the kernel has no squashfs loaded, {why}: images are unpacked as a whole"
    if is_node and machine.plugstack.options.get("use_squashfuse") in ("1", "true", "yes", "y"):
        fix = "install squashfuse on the nodes: plugstack.conf has use_squashfuse"
        return Line("squashfs.mount", Status.MISSING, told, fix, True)
    return Line("squashfs.mount", Status.WARNING, told, "modprobe squashfs (root), or install squashfuse")


def apptainer_line(machine: Machine, needs: Needs, *, is_node: bool) -> Line | None:
    """Apptainer, where it starts the tasks or is there anyhow."""
    needed = needs.image and needs.runtime == "apptainer"
    for name in ("apptainer", "singularity"):
        if name in machine.tools:
            told = f"{name} {machine.tools[name].version or ''}".strip()
            if name == "singularity" and needed:
                fix = "a link `apptainer` to it on PATH, or Apptainer itself"
                return Line("apptainer", Status.MISSING, told, fix, needed and is_node)
            return Line("apptainer", Status.OK, told, needed=needed and is_node)
    if not needed:
        return None
    told = "not on PATH, and container_options.runtime=apptainer"
    return Line("apptainer", Status.MISSING, told, how_to_get("apptainer"), is_node)


def credential_lines(files: Sequence[Credentials], image: Image | None) -> Iterator[Line]:
    """For which registries there are credentials; never what they are."""
    wanted = image.registry if image is not None else None
    host = (wanted or "").partition(":")[0]  # in Enroot's file, hosts have no ports
    has = {registry.partition("/")[0] for one in files for registry in one.registries}
    told = [f"{one.path}: {', '.join(one.registries) or 'none'}" for one in files]
    open_to_all = [one.path for one in files if not one.is_private]
    found = "; ".join(told) or "none: public images alone"
    if open_to_all:
        fix = f"chmod 600 {' '.join(open_to_all)}; and new keys, if others may have read them"
        yield Line("credentials", Status.WARNING, f"{found}; others may read {', '.join(open_to_all)}", fix)
    elif image is not None and wanted is not None and not has & {wanted, host}:
        told_so = f"{found}; none for {wanted}, where {image.name} is"
        fix = f"if it asks for some: {_LOGIN.format(wanted, host)}"
        yield Line("credentials", Status.WARNING, told_so, fix)
    else:
        yield Line("credentials", Status.OK, found)


def gpu_lines(machine: Machine, image: Image | None, *, is_node: bool) -> Iterator[Line]:
    """The GPUs' driver, and whether it runs the image's CUDA."""
    gpus = machine.gpus
    if gpus is None:
        if is_node:
            yield Line("gpu", Status.WARNING, "no nvidia-smi: no GPUs of NVIDIA's", "see `sinfo -o '%N %G'`")
        return
    if gpus.driver is None:
        fix = "nvidia-smi; a driver that was updated needs a restart"
        yield Line("gpu", Status.WARNING, f"nvidia-smi: {gpus.trouble or 'no GPU'}", fix)
        return
    counts = {name: gpus.names.count(name) for name in gpus.names}
    listed = ", ".join(f"{count} × {name}" for name, count in counts.items())
    cuda = f", CUDA {gpus.cuda}" if gpus.cuda else ""
    yield Line("gpu", Status.OK, f"driver {gpus.driver}{cuda}: {listed}")
    if image is not None:
        yield _driver_and_image(gpus.driver, gpus, image, is_node)


def _driver_and_image(driver: str, gpus: Gpus, image: Image, needed: bool) -> Line:
    what, cuda, by = "gpu.image", image.cuda, ""
    if cuda is None and image.contents is not None and image.contents.cuda is not None:
        cuda, by = image.contents.cuda, f", as {image.contents.origin} has it"
        needed = needed and image.contents.is_certain
    if cuda is None:
        why = image.why or "its environment has no CUDA_VERSION"
        return Line(what, Status.UNKNOWN, f"the CUDA of {image.name} is not known: {why}")
    asked = f"the image's CUDA {cuda}{by}"
    runs, least = verdict(driver, cuda)
    carries = image.compat_driver is not None and version(image.compat_driver) > version(driver)
    compat = (
        f"the image carries the libraries of {image.compat_driver}, which data center GPUs can run"
        if carries
        else f"a driver of {least}; or cuda-compat in the image, on data center GPUs ({_COMPAT})"
    )
    if image.requires is not None and not fulfils(driver, gpus.cuda, image.requires):
        told = (
            f"{asked}: nvidia-container-cli refuses driver {driver}: {image.requires.split()[0]} is asked for"
        )
        fix = f"a newer driver; or NVIDIA_DISABLE_REQUIRE=1 in env_vars, and {compat}"
        return Line(what, Status.MISSING, told, fix, needed)
    if runs is None:
        return Line(what, Status.UNKNOWN, f"{asked}: NVIDIA's table does not have it", f"see {_COMPAT}")
    if not runs:
        told = f"{asked} needs driver {least} or newer; here is {driver}"
        return Line(what, Status.WARNING if carries else Status.MISSING, told, compat, needed and not carries)
    if gpus.cuda is not None and version(gpus.cuda) < version(cuda)[:2]:
        told = (
            f"{asked} on a driver of CUDA {gpus.cuda}: runs by minor version compatibility, with its features"
        )
        return Line(what, Status.OK, f"{told}; {compat}" if carries else told)
    return Line(what, Status.OK, f"{asked}: driver {driver} runs it (from {least} on)")


def image_line(image: Image) -> Line:
    """The image, as far as it could be looked into from here."""
    if image.is_broken:
        again = f"slipway image verify {image.path}; and make it anew: slipway image import ..."
        return Line("image", Status.MISSING, f"{image.name}: {image.why}", again, True)
    if image.why is not None:
        is_elsewhere = image.path is not None and image.size is None
        fix = None if not is_elsewhere else "nodes may have it: slipway doctor --nodes 1"
        return Line("image", Status.UNKNOWN, f"{image.name}: {image.why}", fix)
    cuda = f"CUDA {image.cuda}" if image.cuda else "no CUDA_VERSION in its environment"
    size = f"{gib(image.size)}, " if image.size is not None else ""
    return Line("image", Status.OK, f"{image.name}: {size}{cuda}")


def engine_line(contents: Contents, engine: str) -> Line:
    """Judge whether the image has the programs of the launch's engine."""
    fit, what = engine_fit(contents, engine), "image.engine"
    if fit.fits is True:
        return Line(what, Status.OK, f"engine={engine}: {fit.why}", needed=True)
    if fit.fits is False and contents.is_certain:
        return Line(what, Status.MISSING, f"engine={engine}: {fit.why}", fit.fix, True)
    return Line(what, Status.WARNING, f"engine={engine}: {fit.why}", fit.fix, True)


def file_lines(node: Machine, image: Image | None, python: str | None) -> Iterator[Line]:
    """Files of the launch that each node must have."""
    if image is not None and image.path is not None:
        size = node.files.get(image.path)
        if size is None:
            fix = "put it where all nodes share it, or on each node"
            yield Line("image", Status.MISSING, f"{image.path} is not there", fix, True)
        elif image.size not in (None, size):
            told = f"{image.path} has {size:,} bytes, and {image.size:,} where you are"
            yield Line("image", Status.WARNING, told, "is it another file, or still being copied?", True)
        else:
            yield Line("image", Status.OK, f"{image.path} is there", needed=True)
    if python is not None:
        if node.files.get(python) is None:
            fix = "cluster.python=... that every node has, or an image: container=..."
            yield Line("trainer", Status.MISSING, f"{python} is not there", fix, True)
        else:
            yield Line("trainer", Status.OK, f"{python} is there", needed=True)


def stage_lines(node: Machine, image: Image | None) -> Iterator[Line]:
    """Where the image is copied to on each node; where it cannot be, the tasks use the shared file."""
    place, fix = node.places.get("stage"), "container_options.stage_to=... on a local disk, or null"
    if place is None or image is None or image.path is None:
        return
    told = f"{place.path} ({place.kind})"
    if not place.writable:
        told = f"{told}: you may not write to {place.there}"
    elif not place.is_local:
        told = f"{told}: shared, which gains nothing"
    elif None not in (place.free, image.size) and (place.free or 0) < (image.size or 0):
        told = f"{told}: no room for the image's {gib(image.size or 0)}"
    else:
        yield Line("image.stage", Status.OK, told, free=place.free)
        return
    yield Line("image.stage", Status.WARNING, told, fix, free=place.free)


def python_lines(
    python: str, versions: Mapping[str, str | None], trainer: tuple[bool, str] | None
) -> Iterator[Line]:
    """Slipway's own Python and its extras.

    Parameters
    ----------
    versions
        What the extras have, by distribution; ``None`` of what is not installed.
    trainer
        Whether the tasks' interpreter will do, and what there is to say; ``None`` if none is used.
    """
    status, note = judge(python, PYTHON)
    yield Line("python", status, f"{python}; {note}" if note else python, needed=True)
    if trainer is not None:
        does, told = trainer
        first, _, rest = told.partition("\n")
        if not does:
            fix = "; ".join(line.strip() for line in rest.splitlines()) or None
            yield Line("trainer", Status.MISSING, first, fix, True)
        elif told:
            yield Line("trainer", Status.WARNING, told, "slipway doctor --nodes 1 looks there", True)
        else:
            yield Line(
                "trainer", Status.OK, "the tasks' interpreter finds torch and megatron-core", needed=True
            )
    for extra, (names, purpose) in EXTRAS.items():
        there = [f"{name} {versions[name]}" for name in names if versions.get(name) is not None]
        if len(there) == len(names):
            yield Line(f"extra {extra}", Status.OK, ", ".join(there))
        else:
            lacking = ", ".join(name for name in names if versions.get(name) is None)
            told = f"{lacking}: not installed; {purpose}"
            yield Line(f"extra {extra}", Status.MISSING, told, f"pip install 'slipway[{extra}]'")


# Slipway's extras, what is in them, and what is lost without.
EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "containers": (("enroot-py",), "imports go through skopeo and umoci, even where there is Enroot"),
    "plot": (("matplotlib", "plotext"), "no pictures of the memory, no curves in the terminal"),
}
