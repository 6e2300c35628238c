"""The container of a job: its image, its options and its mounts, in Pyxis' form."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.config.schema import ContainerOptions, RunConfig
from launcher.config.values import expand_home
from launcher.errors import UserError, did_you_mean, literal, setting_error
from launcher.plan import SOURCES_WITHOUT_PATH, Container, Mount, Resources
from launcher.secrecy import is_secret_key
from launcher.stages.names_and_paths import SAFE_NAME, VARIABLE, check_path

# So that `pyxis_`, a job's id and the digits of an image fit into a file's name with it.
_LONGEST_CONTAINER_NAME = 100
_IMAGE_FILE = (".sqsh", ".squashfs", ".sqfs", ".sif")

KEY = "container_mounts"

# Options that Enroot knows (mount_opts of its enroot-mount.c); it ignores any other without a word.
_FLAGS = re.compile(
    r"async|atime|bind|dev|diratime|dirsync|exec|iversion|loud|mand|noatime|nodev|nodiratime|noexec"
    r"|noiversion|nomand|norelatime|nostrictatime|nosuid|private|rbind|relatime|remount|ro|rprivate|rshared"
    r"|rslave|runbindable|rw|shared|silent|slave|strictatime|suid|sync|unbindable|lazytime|nolazytime|auto"
    r"|defaults|group|noauto|nofail|nogroup|noowner|nouser|nousers|owner|user|users|x-create=dir"
    r"|x-create=file|x-create=auto|x-move|x-detach"
)
# Those of tmpfs(5) have values, which the kernel checks.
_TMPFS_FLAG = re.compile(r"(?:size|nr_blocks|nr_inodes|mode|uid|gid|huge|mpol)=[\w.%:=,-]+")
_VALID = "valid: source, source:target or source:target:flags, tmpfs:target, umount:target"
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# Enroot reads mounts as words of a double-quoted string of bash, on each node.
_EVALUATED = re.compile(r'[$`"\\\n]')


def container(
    config: RunConfig, writable: Mapping[Path, str], readable: Mapping[Path, str]
) -> Container | None:
    """Return the container with a job's directories and the user's own mounts.

    `writable` and `readable` have each directory with the key that it comes from. Raise UserError if the
    image or a mount is not one that Pyxis can take.
    """
    if config.container is None:
        return None
    _check_image(config.container)
    _check_options(config.container_options)
    mounts = mounts_of(writable, readable, config.container_mounts)
    job_container = Container(config.container, mounts, config.container_options)
    _check_file(job_container)
    return job_container


def _check_options(options: ContainerOptions) -> None:
    for key in ("stage_to", "workdir", "save"):
        path = getattr(options, key)
        if path is not None:
            check_path(path, f"container_options.{key}", is_on_host=False)
    _check_container_name(options.name)
    _check_variable_names(options.env)


def _check_container_name(name: str | None) -> None:
    """Refuse a name that Enroot takes for a path, or with a part that Pyxis interprets."""
    if name is None or (SAFE_NAME.fullmatch(name) and len(name) <= _LONGEST_CONTAINER_NAME):
        return
    key, stem = "container_options.name", name.partition(":")[0]
    problem, hint = "not a name of a container", "valid: letters, digits and . _ + = -"
    if name != stem and SAFE_NAME.fullmatch(stem):
        problem = f"give the name alone, without Pyxis' {literal(name[len(stem) :])}"
        hint = f"{key}={stem}: reuse the container, or create it if no container of this image exists"
    elif len(name) > _LONGEST_CONTAINER_NAME:
        problem = f"{len(name)} characters are too many"
        hint = f"valid: up to {_LONGEST_CONTAINER_NAME}"
    raise setting_error(f"{key}={literal(name)}: {problem}", hint=hint)


def _check_variable_names(names: Iterable[str]) -> None:
    key = "container_options.env"
    for text in names:
        if VARIABLE.fullmatch(text):
            continue
        name, sign, value = text.partition("=")
        hint = "valid: names of variables of the job, such as LD_LIBRARY_PATH"
        if sign and VARIABLE.fullmatch(name):
            hint = f"env_vars.{name}={'...' if is_secret_key(name) else value} sets it, in the container too"
        raise setting_error(
            f"{key}: {literal(f'{name}=...' if sign else text)} is not the name of a variable", hint=hint
        )


def check_saving(container: Container | None, resources: Resources) -> None:
    """Refuse to have several nodes write one image file, each over the others."""
    most = max(resources.node_counts)
    if container is not None and container.options.save is not None and most > 1:
        key = "container_options.save"
        raise setting_error(
            f"{key}={literal(container.options.save)}: each of the job's {most} nodes would write this file",
            hint=f"{key}=null, or save from a job of one node (slipway workspace)",
        )


def _check_image(image: str) -> None:
    if not image.strip():
        raise setting_error("container='': an image is needed", hint="null is bare metal")
    if image.endswith(_IMAGE_FILE) and not Path(image).is_absolute():
        # Pyxis would look for an image of that name in a registry.
        raise setting_error(
            f"container={literal(image)}: an image file is given by its whole path",
            hint=f"container={Path(os.path.expandvars(image)).expanduser().absolute()}",
        )


def _check_file(container: Container) -> None:
    """Refuse options that need an image file, and those that Apptainer does not have."""
    options, key = container.options, "container_options.runtime"
    if options.stage_to is not None and not container.is_file:
        setting = f"container_options.stage_to={literal(options.stage_to)}"
        raise _explain_needed_file(f"{setting}: files are copied to the nodes", container)
    if options.runtime == "pyxis":
        if options.gpu_flag != "nv":
            flag = f"container_options.gpu_flag={literal(options.gpu_flag)}"
            raise setting_error(
                f"{flag}: Pyxis has no such option", f"{key}=apptainer, or singularity", (key,)
            )
        return
    if not container.is_file:
        raise _explain_needed_file(f"{key}={options.runtime}: the container must be an image file", container)
    for mount in container.mounts:
        if mount.source in SOURCES_WITHOUT_PATH:
            raise setting_error(
                f"container_mounts: {mount.source}:{mount.target} is Pyxis', and Apptainer has no such mount",
                hint="leave it out: Apptainer's /tmp is the node's own",
                also=(key,),
            )
    for name in ("name", "save"):
        value = getattr(options, name)
        if value is not None:
            raise setting_error(
                f"container_options.{name}={literal(value)}: Apptainer keeps no unpacked containers",
                hint=f"container_options.{name}=null, or {key}=pyxis",
                also=(key,),
            )


def _explain_needed_file(message: str, container: Container) -> UserError:
    image = container.image
    return setting_error(
        f"{message}, and container={image} is an image of a registry",
        hint=f"launch --build, or slipway image import {shlex.quote(image)} and container= its file",
        also=("container",),
    )


def mounts_of(
    writable: Mapping[Path, str], readable: Mapping[Path, str], texts: Iterable[str]
) -> tuple[Mount, ...]:
    """Return the mounts of a job's directories, and those of `container_mounts` after them.

    A read-only directory below or equal to a writable one is not mounted again: it would cover that.
    """
    ours = [_mount_path(path, writable[path]) for path in select_outermost(writable)]
    ours += [
        _mount_path(path, readable[path], "ro")
        for path in select_outermost(readable)
        if not _is_within(path, writable)
    ]
    theirs = [_parse(text) for text in texts]
    for mount in theirs:
        _check_cover(mount, writable)
    return (*ours, *theirs)


def _check_cover(mount: Mount, writable: Mapping[Path, str]) -> None:
    """Refuse a read-only mount over a directory that the job writes to."""
    covered = next((path for path in writable if path.is_relative_to(mount.target)), None)
    if covered is None or "ro" not in (mount.flags or "").split("+"):
        return
    raise setting_error(
        f"{KEY}: {mount.target} is mounted read-only over {covered}, where the job writes",
        hint="without :ro, or to another target",
        also=(writable[covered],),
    )


def _is_within(path: Path, others: Iterable[Path]) -> bool:
    return any(path.is_relative_to(other) for other in others)


def select_outermost(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if not _is_within(path, [other for other in paths if other != path])]


def _mount_path(path: Path, key: str, flags: str | None = None) -> Mount:
    if re.search("[,:]", str(path)):
        raise setting_error(
            f"{key}: {literal(str(path))} cannot be mounted in a container: Pyxis separates with , and :",
            hint="rename the directory, or choose one without them",
        )
    _check_words(str(path), str(path), key)
    return Mount(str(path), str(path), flags)


def _parse(text: str) -> Mount:
    parts = text.split(":", 2)
    if "," in text or not all(parts):
        raise _explain_mount(text, _VALID)
    if _ADDRESS.match(text):
        raise _explain_mount(text, "a directory that the nodes have: data_preparation.inputs takes addresses")
    flags = parts[2] if len(parts) > 2 else None
    if parts[0] in SOURCES_WITHOUT_PATH:
        if len(parts) == 1:
            raise _explain_mount(text, f"{text}:/its/target, or ./{text} for a directory of that name")
        source = parts[0]
    else:
        source = _expand(parts[0], text)
        if source.startswith("~"):
            raise _explain_mount(text, "another user's home by its whole path")
        source = source if source.startswith("/") else str(Path(source).absolute())
    target = _expand(parts[1], text) if len(parts) > 1 else source
    if not target.startswith("/"):
        raise _explain_mount(text, "the target in the container is a whole path")
    for flag in flags.split("+") if flags is not None else ():
        _check_flag(flag, text, source)
    return Mount(source, target, flags)


def _expand(path: str, text: str) -> str:
    """Return a path of a mount with the user's home directory."""
    path = expand_home(path)
    _check_words(path, text, KEY)
    return path


def _check_words(path: str, text: str, key: str) -> None:
    match = _EVALUATED.search(path)
    if match is None:
        return
    hint = 'rename it, or choose a path without $, `, ", \\ and line breaks'
    if match[0] == "$" and key == KEY:
        hint = "of the launching shell: ${oc.env:NAME}, and $HOME; of the job: mount the directory above it"
    raise setting_error(
        f"{key}: {literal(text)} cannot be mounted: Enroot would evaluate {literal(match[0])} on the nodes",
        hint=hint,
    )


def _check_flag(flag: str, text: str, source: str) -> None:
    if _FLAGS.fullmatch(flag) or (source == "tmpfs" and _TMPFS_FLAG.fullmatch(flag)):
        return
    raise setting_error(
        f"{KEY}: {literal(text)}: Enroot knows no flag {literal(flag)}, and would ignore it",
        hint=f"{did_you_mean(flag, _FLAGS.pattern.split('|'))}; several are joined by +: ro+rprivate",
    )


def _explain_mount(text: str, hint: str) -> UserError:
    return setting_error(f"{KEY}: {literal(text)} is not a mount", hint=hint)
