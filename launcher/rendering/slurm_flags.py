"""The flags of sbatch and the arguments of srun."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from launcher.config.schema import ContainerOptions
from launcher.errors import UserError
from launcher.plan import Container, Job, Mount, Plan, Resources
from launcher.rendering.quoting import RawShell, escape_pattern, quote_header
from launcher.slurm.queue_flags import QueueFlags
from launcher.slurm.srun_options import step_options
from slipway.common.node.settings import CONTAINER, IMAGE

# Digits of an image's digest in the name of a container made of it; the supervisor takes as many.
NAME_DIGITS = 12

# Pyxis' flags, and the option that each is: with a value, or in two forms for yes and no.
_WITH_VALUE = {"workdir": "container-workdir", "save": "container-save"}
_YES_AND_NO = {
    "mount_home": ("container-mount-home", "no-container-mount-home"),
    "writable": ("container-writable", "container-readonly"),
    "remap_root": ("container-remap-root", "no-container-remap-root"),
    "entrypoint": ("container-entrypoint", "no-container-entrypoint"),
}


def srun_arguments(job: Job) -> list[str]:
    """Return srun's arguments beyond those of the allocation, up to the task's script."""
    # One dead rank would leave the others waiting for ever. The script exports variables for the tasks, also
    # under sbatch's --export=NONE, which srun would obey too.
    arguments = ["--kill-on-bad-exit=1", "--export=ALL"]
    if job.resources.cpus_per_task is not None:
        # From 22.05 on srun does not take it over from sbatch.
        arguments.append(f"--cpus-per-task={job.resources.cpus_per_task}")
    if job.mpi is not None:
        arguments.append(f"--mpi={job.mpi}")
    return [*arguments, *_container_arguments(job), *job.task_prefix]


def _container_arguments(job: Job) -> list[str]:
    """Return the site's arguments of srun, and those that start the container."""
    if job.container is None:
        return host_arguments(job)
    for mount in job.container.mounts:
        _check(mount)
    if job.container.options.runtime != "pyxis":
        return host_arguments(job) + apptainer_command(job, job.container)
    return _pyxis(job, job.container) + _drop_decided(job.srun_args, job.container.options)


def host_arguments(job: Job) -> list[str]:
    """Return the site's arguments for steps without a container.

    Those in most trees are Pyxis', and Pyxis need not be there.
    """
    return [word for option in step_options(job.srun_args) if not option.is_pyxis for word in option.words]


def _drop_decided(arguments: Sequence[str], options: ContainerOptions) -> list[str]:
    """Remove the site's arguments that the container's options override."""
    decided = {
        flag for name, flags in _YES_AND_NO.items() if getattr(options, name) is not None for flag in flags
    }
    return [word for option in step_options(arguments) if option.name not in decided for word in option.words]


def _pyxis(job: Job, container: Container) -> list[str]:
    mounts = ",".join(_mount(mount) for mount in container.mounts)
    return [
        f"--container-image={IMAGE if container.is_staged else container.image}",
        f"--container-mounts={mounts}",
        *_option_flags(container.options),
        *([] if container.options.name is None else [_name(container, container.options.name)]),
        f"--container-env={','.join(job.container_variables)}",
    ]


def _name(container: Container, name: str) -> str:
    """Return a container's name with a digest of its image: Pyxis reuses a name of any image.

    The supervisor completes the name by digits of the image's file, as the file is when the job begins.
    """
    if container.is_file:
        return f"--container-name={CONTAINER}"
    pinned = re.search(r"[:@]sha256:([0-9a-f]{64})$", container.image)
    digits = pinned[1] if pinned else hashlib.sha256(container.image.encode()).hexdigest()
    return f"--container-name={name}-{digits[:NAME_DIGITS]}"


def _option_flags(options: ContainerOptions) -> Iterator[str]:
    for name, (yes, no) in _YES_AND_NO.items():
        choice = getattr(options, name)
        if choice is not None:
            yield f"--{yes if choice else no}"
    for name, flag in _WITH_VALUE.items():
        value = getattr(options, name)
        if value is not None:
            yield f"--{flag}={value}"


def _check(mount: Mount) -> None:
    for path in (mount.source, mount.target):
        if "," in path or ":" in path:
            raise UserError(f"{path!r} cannot be mounted: Pyxis separates mounts with ',' and ':'")


def _mount(mount: Mount) -> str:
    return ":".join(part for part in (mount.source, mount.target, mount.flags) if part)


# --- Apptainer

# The argument of srun by which a site leaves the home out, where `mount_home` is null.
_NO_HOME = "--no-container-mount-home"


def apptainer_command(job: Job, container: Container) -> list[str]:
    """Return the command between srun and the task's script."""
    image = IMAGE if container.is_staged else container.image
    return [container.options.runtime, "exec", *_options(job, container), image, *_entrypoint(container)]


def _options(job: Job, container: Container) -> Iterator[str]:
    options = container.options
    if options.gpu_flag is not None:
        yield f"--{options.gpu_flag}"  # without GPUs on the node it warns, and goes on
    # The job does not need the launch's working directory.
    home = options.mount_home if options.mount_home is not None else _NO_HOME not in job.srun_args
    yield f"--no-mount={'cwd' if home else 'home,cwd'}"
    yield f"--pwd={options.workdir or '/'}"
    if options.writable:
        yield "--writable-tmpfs"  # a squashfs is read-only: the overlay ends with the task
    if options.remap_root:
        yield "--fakeroot"
    for mount in container.mounts:
        yield f"--bind={_bind(mount)}"


def _bind(mount: Mount) -> str:
    """Apptainer knows of Pyxis' flags the two that say whether it can be written."""
    flags = (mount.flags or "").split("+")
    return f"{mount.source}:{mount.target}{':ro' if 'ro' in flags else ''}"


def _entrypoint(container: Container) -> list[str]:
    """Return the script in which an imported image keeps its entry point, as Enroot runs it."""
    return ["/bin/sh", "/etc/rc"] if container.options.entrypoint else []


# --- sbatch


def _requested(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield the flags of a job's requests; None or False leaves a flag out, True makes it bare."""
    for field in fields(QueueFlags):
        value = getattr(job.queue, field.name)
        if field.name == "begin":  # after where a job waits, and before when
            yield from _resources(job.resources)
        if field.name == "requeue":
            yield "dependency", job.queue.dependency
        flag = field.name.replace("_", "-")
        yield (f"no-{flag}", True) if value is False else (flag, value)


def _resources(resources: Resources) -> Iterator[tuple[str, Any]]:
    yield "nodes", _nodes(resources)
    yield "ntasks-per-node", _tasks_per_node(resources)
    yield "gpus-per-node", resources.gpus_per_node
    yield "gpus-per-task", resources.gpus_per_task
    yield "gres", resources.gres
    yield "cpus-per-task", _cpus_per_task(resources)
    yield "mem", resources.memory
    yield "exclusive", resources.exclusive
    yield "time", resources.time_limit


def header_lines(plan: Plan) -> list[RawShell]:
    """Return the script's ``#SBATCH`` lines, quoted as sbatch reads them."""
    # Slurm opens the log before the script runs, so it cannot be a variable of the script.
    job = "%A_%a" if "array" in plan.job.queue.further else "%j"
    log = escape_pattern(str(plan.paths.directory / plan.paths.log_prefix)) + job
    flags = [*_flags(plan), ("output", f"{log}.out")]
    if not plan.job.merge_stderr:
        flags.append(("error", f"{log}.err"))
    flags.append(("open-mode", "append"))  # a requeued job keeps what its first attempt said
    return [
        RawShell(f"--{flag}" if value is True else f"--{flag}={quote_header(value)}") for flag, value in flags
    ]


def empty_script(plan: Plan) -> str:
    """Return a script that requests the same as a plan's job, and does nothing: for `sbatch --test-only`."""
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in header_lines(plan)), ""])


def salloc_arguments(plan: Plan) -> list[str]:
    """Return the flags of salloc for an interactive session: those of sbatch without logs."""
    return [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in _flags(plan)]


def _flags(plan: Plan) -> list[tuple[str, Any]]:
    """Return a job's requests of the queue by flag; ``True`` for a flag without a value."""
    values: list[tuple[str, Any]] = [("job-name", plan.paths.job_name)]
    values += [*_requested(plan.job), *plan.job.queue.further.items()]
    return [(flag, value) for flag, value in values if value is not None and value is not False]


def _nodes(resources: Resources) -> str:
    least, most = resources.nodes, resources.max_nodes
    return str(least + resources.spares) if most is None else f"{least}-{most}"


def _tasks_per_node(resources: Resources) -> int | None:
    # With --ntasks-per-node, sbatch caps a range of nodes at its minimum; only srun gets the tasks.
    return resources.tasks_per_node if resources.max_nodes is None else None


def _cpus_per_task(resources: Resources) -> int | None:
    """To sbatch, a range has one task on each node, with the cores of all."""
    if resources.max_nodes is None:
        return resources.cpus_per_task
    return resources.tasks_per_node * (resources.cpus_per_task or 1)
