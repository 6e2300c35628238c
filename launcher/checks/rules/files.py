"""Files: what a job reads, writes and mounts, its image and secrets, the space for its checkpoints.

Also what no launch goes past: the machine that launches, and the scheduler's own answer.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from launcher.checks.facts import Facts, Interpreter, LocalPath, MissingPath, PathFacts
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.errors import one_line
from launcher.estimates.cost import KEEP, Checkpoints, checkpoints_of
from launcher.estimates.model import model_size
from launcher.estimates.parallelism import NODES, PIPELINE
from launcher.estimates.values import Values, count, full
from launcher.plan import Job, Plan
from launcher.releases import (
    Contents,
    for_pyxis,
    newest_with_core,
    newest_with_pretraining,
    version,
)

# So many of those with the same mistake are named.
_NAMED = 3

Find = Callable[[Plan, Facts], Iterable[Finding]]

_DIRECTORY = "exp_manager.checkpoint_callback_params.dirpath"


def missing_path_problems(check: str, of: Callable[[PathFacts], Sequence[MissingPath] | None]) -> Find:
    """Return the rule of one kind of path: an error where this machine can tell, else a warning."""

    def find(plan: Plan, facts: Facts) -> Iterator[Finding]:
        for alike in _alike((of(facts.paths) if facts.paths is not None else None) or ()):
            first, *rest = alike
            text = first.why
            others = list(dict.fromkeys(_other(lack, first) for lack in rest))
            if others:
                more = f" and {len(others) - _NAMED + 1} more" if len(others) >= _NAMED else ""
                text += f"; likewise {', '.join(others[: _NAMED - 1])}{more}"
            also = tuple(dict.fromkeys(lack.key for lack in rest if lack.key != first.key))
            tell = error if first.certain else warning
            yield tell(check, first.key, first.path, text, first.fix, also)

    return find


def _alike(lacks: Iterable[MissingPath]) -> list[list[MissingPath]]:
    """Group missing paths by their reason."""
    groups: dict[tuple[str, bool], list[MissingPath]] = {}
    for lack in lacks:
        groups.setdefault((lack.why, lack.certain), []).append(lack)
    return list(groups.values())


def _other(lack: MissingPath, first: MissingPath) -> str:
    """Return how a further path is named: by itself, or by its key."""
    return lack.path if lack.key == first.key else full(lack.key)


def shared_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find paths on disks of this machine that the nodes do not see."""
    most, local = max(plan.job.resources.node_counts), facts.paths.local if facts.paths is not None else None
    if most < 2 or local is None:
        return
    nodes = count(most, "node")
    for first in local.results:
        text = f"{_where(first)}; the job's {nodes} write to this directory together"
        fix = f"a directory that all nodes share: {full(first.key)}=..."
        yield warning("path.shared", first.key, first.path, text, fix)
    for first in local.inputs[:1]:
        others = tuple(dict.fromkeys(one.key for one in local.inputs if one.key != first.key))
        likewise = f" (likewise {', '.join(map(full, others))})" if others else ""
        text = f"{_where(first)}; each of the job's {nodes} must have it{likewise}"
        fix = "put it where all nodes share it, or a copy on each of them"
        yield warning("path.shared", first.key, first.path, text, fix, others)


def _where(found: LocalPath) -> str:
    return f"it lies on a file system of this machine's own ({found.kind}, mounted at {found.mount})"


def file_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find files of secrets that the job could not read as it starts."""
    for lost in facts.missing_secrets or ():
        fix = f"the whole path of a file whose first line is the secret, or {lost.key}=null"
        if lost.certain:
            yield error("secret.file", lost.key, lost.path, lost.why, fix)
        else:
            text = f"{lost.why} on this machine; every node must have it"
            yield warning("secret.file", lost.key, lost.path, text, fix)


def permission_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find files of secrets that others may read."""
    for variable, path in (facts.open_secrets or {}).items():
        text = f"{one_line(path)}, which {variable} is read from, may be read by others than its owner"
        yield Finding("secret.permissions", Severity.WARNING, None, text, f"chmod 600 {shlex.quote(path)}")


def checkpoint_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find too little space for the next checkpoint, or for all that are kept.

    Those that the run has already have their space.
    """
    paths, values = facts.paths, Values(plan.job.config or {})
    free = paths.free_bytes if paths is not None else None
    model = model_size(values)
    saved = checkpoints_of(values, model, plan.job.engine) if model is not None else None
    if free is None or saved is None:
        return
    there = (paths.checkpoints_there if paths is not None else None) or 0
    more = max(1, saved.most - there)
    left = f"{told_bytes(free)} are free" + (" (by the quota)" if paths and paths.free_by == "quota" else "")
    if saved.size > free:
        tell, whose = (warning, " of this machine's own disk") if _is_own_disk(plan, facts) else (error, "")
        yield tell(
            "space.checkpoints",
            _DIRECTORY,
            values.raw(_DIRECTORY),
            f"a checkpoint takes about {told_bytes(saved.size)}, and {left}{whose}",
            "base_results_dir=... where there is more space",
        )
    elif more * saved.size > free:
        yield warning(
            "space.checkpoints",
            KEEP,
            values.raw(KEEP),
            f"{count(more, 'more checkpoint' if there else 'checkpoint')} of about {told_bytes(saved.size)}"
            f" take {told_bytes(more * saved.size)}, and {left}: enough for"
            f" {free // saved.size}",
            _fix(saved, there + free // saved.size, plan.job.engine),
            also=(_DIRECTORY,),
        )


def conversion_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find too little space for a converted model."""
    node = (plan.job.stage_config or {}).get("conversion")
    free = facts.paths.free_bytes if facts.paths is not None else None
    if node is None or free is None or not isinstance(node["model"], Mapping):
        return
    model = model_size(Values({"model": node["model"], "run": {"model_type": node["model_type"]}}))
    size = model.parameters * (4 if node["dtype"] in (None, "float32") else 2) if model is not None else 0
    if size > free:
        by_quota = " (by the quota)" if facts.paths is not None and facts.paths.free_by == "quota" else ""
        yield error(
            "space.output",
            "conversion.output",
            node["output"],
            f"the converted model takes about {told_bytes(size)}, and {told_bytes(free)} are free{by_quota}",
            "conversion.output=... where there is more space, or conversion.dtype=bfloat16",
        )


def _is_own_disk(plan: Plan, facts: Facts) -> bool:
    """Return True if the nodes of the job cannot write to the disk that was looked at, as on a laptop."""
    local = facts.paths.local if facts.paths is not None else None
    return local is not None and bool(local.results) and max(plan.job.resources.node_counts) > 1


def _fix(saved: Checkpoints, room: int, engine: str) -> str:
    elsewhere = "base_results_dir=... where there is more space"
    if engine == "megatron_lm":
        return f"fewer: Megatron-LM keeps them all; or {elsewhere}"
    beside = saved.beside
    return f"{full(KEEP)}={room - beside}, or {elsewhere}" if room > beside else elsewhere


def told_bytes(size: int) -> str:
    """Format a size as disks are sold, in powers of ten."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}" if size < 1000 * bytes_ else f"{size / bytes_:,.0f} {unit}"
    return f"{size} bytes"


# --- the image

# The megatron-core that our trainer is written for: the extra `train` pins a release of it.
TRAINER_CORE = (0, 16)
_TRAINER_CORE = ".".join(map(str, TRAINER_CORE))
_OWN_RECIPE = "container=megatron builds one"

# Megatron-LM's option of an encoder's stages (megatron/training/arguments.py), and the first without it.
ENCODER_STAGES = "--encoder-pipeline-model-parallel-size"
_NO_ENCODER_STAGES = (0, 14)

_ENGINE, _NETWORK = "image.engine", "image.network"
_OPTIMIZER = "model.optim.name"
_NEW_OPTIMIZER, _OLD_OPTIMIZER = "mcore_distributed_optim", "distributed_fused_adam"
_PLUGIN = "NCCL_NET_PLUGIN"
# NVIDIA-NeMo/Megatron-Bridge, docs/releases/known-issues.md, 26.02 (2026-08-22).
_LEAKING, _MENDED = "1.17.0", "1.17.3"

# The engines that `engine_fit` can judge an image for.
JUDGED = ("nemo", "megatron")


class Fit(NamedTuple):
    """The fit of an image to an engine: `fits` is ``None`` where it is not known."""

    fits: bool | None
    why: str
    fix: str | None = None


def engine_fit(contents: Contents, engine: str) -> Fit:
    """Judge an image for one of the engines in `JUDGED`, by what is known to be in it."""
    return _for_nemo(contents) if engine == "nemo" else _for_our_trainer(contents)


def _for_nemo(contents: Contents) -> Fit:
    best = newest_with_pretraining()
    fix = f"the newest that has them: container={for_pyxis(best)}; or engine=megatron, which needs no NeMo"
    what = "NeMo's megatron_*_pretraining.py and their models"
    has = "" if contents.nemo is None else f" (NeMo {contents.nemo})"
    if contents.pretraining:
        return Fit(True, f"{contents.origin}{has} has {what}")
    if contents.pretraining is False:
        return Fit(False, f"{contents.origin}{has} lacks {what}", fix)
    if contents.family == "pytorch":
        return Fit(None, f"{contents.origin} is not known to have NeMo", fix)
    return Fit(None, f"whether {contents.origin} has {what} is not known", fix)


def _for_our_trainer(contents: Contents) -> Fit:
    best = newest_with_core(TRAINER_CORE, (0, TRAINER_CORE[1] + 1))
    fix = f"{_OWN_RECIPE}; the newest of NVIDIA's with it: container={for_pyxis(best)}"
    core, wanted = contents.megatron_core, f"the trainer is written for {_TRAINER_CORE}"
    if core is None:
        if contents.was_asked:
            return Fit(False, f"{contents.origin} has no megatron-core; {wanted}", fix)
        return Fit(None, f"which megatron-core {contents.origin} has is not known; {wanted}", fix)
    fits = version(core)[:2] == TRAINER_CORE
    message = f"{contents.origin} has megatron-core {core}"
    return Fit(fits, message if fits else f"{message}; {wanted}", None if fits else fix)


def engine_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find an image without the program that the engine runs, or without the optimizer."""
    contents = facts.image.contents if facts.image is not None else None
    if contents is None or plan.job.config is None or plan.job.container is None:
        return
    if plan.job.engine == "megatron_lm":
        yield from _lost_stages(plan.job, contents)
    elif plan.job.engine in JUDGED and not _brings_its_own(plan.job):
        fit = engine_fit(contents, plan.job.engine)
        if fit.fits is not True:
            tell = error if fit.fits is False and contents.is_certain else warning
            yield tell(_ENGINE, "container", plan.job.container.image, _told(contents, fit.why), fit.fix)
        elif plan.job.engine == "nemo":
            yield from _unknown_optimizer(Values(plan.job.config), contents)


def _told(contents: Contents, text: str) -> str:
    return text if contents.is_certain else f"{text}, if it is what its name says"


def engine_of_image(plan: Plan) -> str | None:
    """Return the engine of a job that trains with what its image has, where `engine_fit` can judge that."""
    job = plan.job
    if job.config is None or job.container is None or plan.scheduler == "local" or _brings_its_own(job):
        return None
    return job.engine if job.engine in JUDGED else None


def _brings_its_own(job: Job) -> bool:
    """Return True if what the engine imports is mounted into the container, and not the image's own."""
    if job.engine == "nemo":
        return _is_mounted(job, job.payload.working_dir)
    return "/" in job.payload.argv[0]  # an interpreter that somebody chose: not the one that the image starts


def _is_mounted(job: Job, path: str) -> bool:
    mounts = job.container.mounts if job.container is not None else ()
    return any(f"{path}/".startswith(f"{mount.target.rstrip('/')}/") for mount in mounts)


def _unknown_optimizer(values: Values, contents: Contents) -> Iterator[Finding]:
    """Find the name of an optimizer that NeMo before 2.0 does not know."""
    if values.raw(_OPTIMIZER) != _NEW_OPTIMIZER or contents.mcore_optimizer is not False:
        return
    message = f"the NeMo of {contents.origin} does not know this optimizer, which is new with 24.05"
    fix = (
        f"{full(_OPTIMIZER)}={_OLD_OPTIMIZER}; or the newest image that has the scripts:"
        f" container={for_pyxis(newest_with_pretraining())}"
    )
    tell = error if contents.is_certain else warning
    yield tell(_ENGINE, _OPTIMIZER, _NEW_OPTIMIZER, _told(contents, message), fix, also=("container",))


def _lost_stages(job: Job, contents: Contents) -> Iterator[Finding]:
    """Find pipeline stages of a T5 that Megatron-LM from core_v0.14 on does not have."""
    core, stages = version(contents.megatron_core)[:2], Values(job.config or {}).raw(PIPELINE)
    if core < _NO_ENCODER_STAGES or ENCODER_STAGES not in job.payload.argv:
        return
    if _is_mounted(job, job.payload.working_dir):
        return
    best = newest_with_core((0, 1), _NO_ENCODER_STAGES)
    message = f"{contents.origin} has megatron-core {contents.megatron_core}, which has no pipeline for a T5"
    fix = f"1; or the newest image that has one: container={for_pyxis(best)}"
    tell = error if contents.is_certain else warning
    yield tell(_ENGINE, PIPELINE, stages, _told(contents, message), fix, also=("container",))


def network_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find an image with which NCCL would not use EFA through aws-ofi-nccl."""
    job, contents = plan.job, facts.image.contents if facts.image is not None else None
    several = max(job.resources.node_counts) > 1
    if (
        contents is None
        or job.container is None
        or not several
        or job.environment.get("FI_PROVIDER") != "efa"
    ):
        return
    chosen = job.environment.get(_PLUGIN)
    if contents.nccl_net_plugin == "spcx" and chosen is None and _PLUGIN not in job.environment_files:
        message = f"{contents.origin} sets it to spcx, which does not drive EFA: NCCL would use TCP unnoticed"
        fix = f"env_vars.{_PLUGIN}={contents.efa_plugin}"
        if contents.efa_plugin is None:
            fix = f"the image has no aws-ofi-nccl: add it, and env_vars.{_PLUGIN}=PATH of its libnccl-net.so"
        yield warning(_NETWORK, f"env_vars.{_PLUGIN}", None, message, fix, also=("container",))
    if contents.aws_ofi_nccl == _LEAKING and not (chosen or "").startswith("/"):
        message = f"aws-ofi-nccl {_LEAKING} of {contents.origin} leaks memory: long jobs get slower"
        fix = (
            f"an image with aws-ofi-nccl {_MENDED}, such as image.versions.aws_ofi_nccl={_MENDED} of a recipe"
        )
        yield warning(_NETWORK, "container", job.container.image, message, fix)


# --- the machine that launches, and the scheduler

MACHINE = "machine"
SCHEDULER = "scheduler"

_PYTHON = "cluster.python"


def machine_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find what a launch lacks on this machine: an interpreter with its libraries, an allocation."""
    host, container = facts.host, plan.job.container
    if host is None:
        return
    if container is not None and plan.scheduler == "local":
        message = "not used: cluster.scheduler=local runs without containers"
        yield warning(MACHINE, "container", container.image, message)
    if host.interpreter is not None:
        yield from _interpreter_problems(plan, host.interpreter)
    if plan.scheduler != "allocation":
        return
    nodes = plan.job.resources.nodes
    fix = f"salloc --nodes={nodes} --ntasks-per-node={plan.job.resources.tasks_per_node}"
    if not host.in_allocation:
        yield error(MACHINE, "cluster.scheduler", "allocation", "this shell is in no allocation", fix)
    elif host.allocation_nodes is not None and host.allocation_nodes < nodes:
        message = f"the allocation that this shell is in has {host.allocation_nodes}"
        yield error(MACHINE, NODES, nodes, message, fix)


# By stage: the libraries in words, the work that needs them, and the extra that has them.
_NEEDS = {
    "data_preparation": ("numpy and tokenizers", "a data preparation", "data"),
    "conversion": ("torch and safetensors", "a conversion", "train,conversion"),
    "evaluation": ("torch and megatron-core", "an evaluation", "train,evaluation"),
}
_OF_TRAININGS = ("torch and megatron-core", "a training", "train")


def _interpreter_problems(plan: Plan, python: Interpreter) -> Iterator[Finding]:
    libraries, work, extra = _NEEDS.get(plan.job.stage, _OF_TRAININGS)
    name = None if python.is_own else python.name
    if python.problem is not None:
        yield error(MACHINE, _PYTHON, name, python.problem, python.nearest)
    elif python.path is None:
        yield warning(MACHINE, _PYTHON, name, "not on this machine; every node must have it")
    elif python.missing is None:
        yield warning(MACHINE, _PYTHON, name, f"it does not say whether it has {libraries}")
    elif python.missing:
        who = "the launcher's own interpreter" if python.is_own else "it"
        yield error(
            MACHINE,
            _PYTHON,
            name,
            f"{who} does not find {', '.join(python.missing)}",
            f"install what {work} needs there: {python.path} -m pip install 'PATH[{extra}]', where PATH is"
            " Slipway's checkout or wheel\n"
            "or name another interpreter, cluster.python=..., or an image, container=...",
        )


def submission_problems(facts: Facts) -> Iterator[Finding]:
    """Repeat what the scheduler says of the script, in its own words."""
    answer = facts.submission
    if answer is None or answer.message is None:
        return
    severity = Severity.ERROR if answer.is_refused else Severity.WARNING
    yield Finding(SCHEDULER, severity, None, answer.message, answer.fix)
