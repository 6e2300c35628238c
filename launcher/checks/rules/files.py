"""Files: what a job reads, writes and mounts, its image and secrets, the space for its checkpoints.

Also what no launch goes past: the machine that launches, and the scheduler's own answer.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from launcher.checks import facts
from launcher.checks.findings import Check, Finding, Severity, check, error, likewise, warning
from launcher.errors import escape
from launcher.estimates.cost import KEEP, Checkpoints, checkpoints_of
from launcher.estimates.parallelism import NODES, PIPELINE
from launcher.estimates.training import model_size
from launcher.estimates.values import Values, count, full
from launcher.plan import Job, Plan
from launcher.releases import Contents, for_pyxis, newest_with_core, newest_with_pretraining, version
from slipway.common.extras import install_command

_DIRECTORY = "exp_manager.checkpoint_callback_params.dirpath"
_ELSEWHERE = "base_results_dir=... where there is more space"


def missing_path_problems(paths: facts.PathFacts, part: str) -> Iterator[Finding]:
    """Find missing paths of one kind: an error where this machine can tell, else a warning."""
    groups: dict[tuple[str, bool], list[facts.MissingPath]] = {}
    for lack in getattr(paths, part):
        groups.setdefault((lack.why, lack.certain), []).append(lack)
    for first, *rest in groups.values():
        text, tell = first.why, error if first.certain else warning
        text += likewise(lack.path if lack.key == first.key else full(lack.key) for lack in rest)
        also = tuple(dict.fromkeys(lack.key for lack in rest if lack.key != first.key))
        yield tell(first.key, first.path, text, first.fix, also)


def _missing(check_id: str, part: str, tells: str) -> Check[...]:
    return Check(check_id, tells, partial(missing_path_problems, part=part), f"paths.{part}")


@check("path.shared", "what the nodes of a job share is on no disk of this machine's own", "paths.local")
def shared_problems(plan: Plan, paths: facts.PathFacts) -> Iterator[Finding]:
    most, local = max(plan.job.resources.node_counts), paths.local or facts.LocalPaths((), ())
    if most < 2:
        return
    nodes = count(most, "node")
    for first in local.results:
        text = f"{_where(first)}; the job's {nodes} write to this directory together"
        yield warning(first.key, first.path, text, f"a directory that all nodes share: {full(first.key)}=...")
    for first in local.inputs[:1]:
        others = tuple(dict.fromkeys(path.key for path in local.inputs if path.key != first.key))
        likewise = f" (likewise {', '.join(map(full, others))})" if others else ""
        text = f"{_where(first)}; each of the job's {nodes} must have it{likewise}"
        fix = "put it where all nodes share it, or a copy on each of them"
        yield warning(first.key, first.path, text, fix, others)


def _where(path: facts.LocalPath) -> str:
    return f"it lies on a file system of this machine's own ({path.kind}, mounted at {path.mount})"


@check("secret.file", "files of secrets are there, and can be read", "missing_secrets")
def file_problems(missing_secrets: tuple[facts.MissingPath, ...]) -> Iterator[Finding]:
    for lost in missing_secrets:
        fix = f"the whole path of a file whose first line is the secret, or {lost.key}=null"
        tell, where = (error, "") if lost.certain else (warning, " on this machine; every node must have it")
        yield tell(lost.key, lost.path, f"{lost.why}{where}", fix)


@check("secret.permissions", "files of secrets are their owner's alone", "open_secrets")
def permission_problems(open_secrets: Mapping[str, str]) -> Iterator[Finding]:
    for variable, path in open_secrets.items():
        text = f"{escape(path)}, which {variable} is read from, may be read by others than its owner"
        yield Finding(Severity.WARNING, None, text, f"chmod 600 {shlex.quote(path)}")


@check(
    "space.checkpoints",
    "there is space for the next checkpoint, and for all that are kept",
    "paths.free_bytes",
)
def checkpoint_problems(plan: Plan, paths: facts.PathFacts) -> Iterator[Finding]:
    """Find too little space for the next checkpoint, or for all that are kept.

    Those that the run has already have their space.
    """
    values, free = Values(plan.job.config or {}), paths.free_bytes or 0
    model = model_size(values)
    saved = checkpoints_of(values, model, plan.job.engine) if model is not None else None
    if saved is None:
        return
    there = paths.checkpoints_there or 0
    more, size = max(1, saved.most - there), bytes_text(saved.size)
    if saved.size > free:
        # A disk of a laptop is not the one that the nodes of the job write to.
        is_own = paths.local is not None and paths.local.results and max(plan.job.resources.node_counts) > 1
        tell, whose = (warning, " of this machine's own disk") if is_own else (error, "")
        text = f"a checkpoint takes about {size}, and {_free(paths)}{whose}"
        yield tell(_DIRECTORY, values.raw(_DIRECTORY), text, _ELSEWHERE)
    elif more * saved.size > free:
        need = f"{count(more, 'more checkpoint' if there else 'checkpoint')} of about {size} take"
        room = free // saved.size
        text = f"{need} {bytes_text(more * saved.size)}, and {_free(paths)}: enough for {room}"
        fix = _fewer(saved, there + room, plan.job.engine)
        yield warning(KEEP, values.raw(KEEP), text, fix, also=(_DIRECTORY,))


def _free(paths: facts.PathFacts) -> str:
    by_quota = " (by the quota)" if paths.free_by == "quota" else ""
    return f"{bytes_text(paths.free_bytes or 0)} are free{by_quota}"


def _fewer(saved: Checkpoints, room: int, engine: str) -> str:
    if engine == "megatron_lm":
        return f"fewer: Megatron-LM keeps them all; or {_ELSEWHERE}"
    kept = room - saved.beside
    return f"{full(KEEP)}={kept}, or {_ELSEWHERE}" if kept > 0 else _ELSEWHERE


@check("space.output", "there is space for a converted model", "paths.free_bytes")
def conversion_problems(plan: Plan, paths: facts.PathFacts) -> Iterator[Finding]:
    node = (plan.job.stage_config or {}).get("conversion")
    if node is None or not isinstance(node["model"], Mapping):
        return
    model = model_size(Values({"model": node["model"], "run": {"model_type": node["model_type"]}}))
    size = model.parameters * (4 if node["dtype"] in (None, "float32") else 2) if model is not None else 0
    if size > (paths.free_bytes or 0):
        text = f"the converted model takes about {bytes_text(size)}, and {_free(paths)}"
        fix = "conversion.output=... where there is more space, or conversion.dtype=bfloat16"
        yield error("conversion.output", node["output"], text, fix)


def bytes_text(size: int) -> str:
    """Format a size as disks are sold, in powers of ten."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}" if size < 1000 * bytes_ else f"{size / bytes_:,.0f} {unit}"
    return f"{size} bytes"


# --- the image

# The megatron-core that our trainer is written for: the extra `train` pins a release of it.
TRAINER_CORE = (0, 16)

# Megatron-LM's option of an encoder's stages (megatron/training/arguments.py), and the first without it.
ENCODER_STAGES = "--encoder-pipeline-model-parallel-size"
_NO_ENCODER_STAGES = (0, 14)

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
    fix = f"container=megatron builds one; the newest of NVIDIA's with it: container={for_pyxis(best)}"
    core, required = contents.megatron_core, f"the trainer is written for {'.'.join(map(str, TRAINER_CORE))}"
    if core is None:
        if contents.was_asked:
            return Fit(False, f"{contents.origin} has no megatron-core; {required}", fix)
        return Fit(None, f"which megatron-core {contents.origin} has is not known; {required}", fix)
    fits = version(core)[:2] == TRAINER_CORE
    message = f"{contents.origin} has megatron-core {core}"
    return Fit(fits, message if fits else f"{message}; {required}", None if fits else fix)


@check("image.engine", "the image has what the engine runs", "image.contents")
def engine_problems(plan: Plan, image: facts.ImageFacts) -> Iterator[Finding]:
    """Find an image without the program that the engine runs, or without the optimizer."""
    job, contents = plan.job, image.contents
    if contents is None or job.config is None or job.container is None:
        return
    if job.engine == "megatron_lm":
        yield from _lost_stages(job, contents)
    elif job.engine in JUDGED and not _brings_its_own(job):
        fit = engine_fit(contents, job.engine)
        if fit.fits is False or (fit.fits is None and not contents.is_certain):
            yield _wrong(contents, "container", job.container.image, fit.why, fit.fix)
        elif fit.fits is None:
            yield warning("container", job.container.image, fit.why, fit.fix)
        elif job.engine == "nemo":
            yield from _unknown_optimizer(Values(job.config), contents)


def _wrong(contents: Contents, key: str, value: Any, text: str, fix: str | None, *also: str) -> Finding:
    """Return an error; a warning where the image is known by its name alone."""
    if contents.is_certain:
        return error(key, value, text, fix, also)
    return warning(key, value, f"{text}, if it is what its name says", fix, also)


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
    if values.raw(_OPTIMIZER) == _NEW_OPTIMIZER and contents.mcore_optimizer is False:
        text = f"the NeMo of {contents.origin} does not know this optimizer, which is new with 24.05"
        newest = f"container={for_pyxis(newest_with_pretraining())}"
        fix = f"{full(_OPTIMIZER)}={_OLD_OPTIMIZER}; or the newest image that has the scripts: {newest}"
        yield _wrong(contents, _OPTIMIZER, _NEW_OPTIMIZER, text, fix, "container")


def _lost_stages(job: Job, contents: Contents) -> Iterator[Finding]:
    """Find pipeline stages of a T5 that Megatron-LM from core_v0.14 on does not have."""
    core, stages = version(contents.megatron_core)[:2], Values(job.config or {}).raw(PIPELINE)
    if core < _NO_ENCODER_STAGES or ENCODER_STAGES not in job.payload.argv:
        return
    if not _is_mounted(job, job.payload.working_dir):
        text = f"{contents.origin} has megatron-core {contents.megatron_core}, which has no pipeline for a T5"
        best = newest_with_core((0, 1), _NO_ENCODER_STAGES)
        fix = f"1; or the newest image that has one: container={for_pyxis(best)}"
        yield _wrong(contents, PIPELINE, stages, text, fix, "container")


@check("image.network", "NCCL finds the plugin for EFA, where FI_PROVIDER=efa")
def network_problems(plan: Plan, image: facts.ImageFacts | None) -> Iterator[Finding]:
    """Find an image with which NCCL would not use EFA through aws-ofi-nccl."""
    job, contents = plan.job, image.contents if image is not None else None
    is_efa = job.environment.get("FI_PROVIDER") == "efa" and max(job.resources.node_counts) > 1
    if contents is None or job.container is None or not is_efa:
        return
    chosen, key = job.environment.get(_PLUGIN), f"env_vars.{_PLUGIN}"
    if contents.nccl_net_plugin == "spcx" and chosen is None and _PLUGIN not in job.environment_files:
        text = f"{contents.origin} sets it to spcx, which does not drive EFA: NCCL would use TCP unnoticed"
        fix = f"{key}={contents.efa_plugin}"
        if contents.efa_plugin is None:
            fix = f"the image has no aws-ofi-nccl: add it, and {key}=PATH of its libnccl-net.so"
        yield warning(key, None, text, fix, also=("container",))
    if contents.aws_ofi_nccl == _LEAKING and not (chosen or "").startswith("/"):
        text = f"aws-ofi-nccl {_LEAKING} of {contents.origin} leaks memory: long jobs get slower"
        recipe = f"image.versions.aws_ofi_nccl={_MENDED} of a recipe"
        yield warning(
            "container", job.container.image, text, f"an image with aws-ofi-nccl {_MENDED}, such as {recipe}"
        )


# --- the machine that launches, and the scheduler

MACHINE = "machine"
SCHEDULER = "scheduler"

_PYTHON = "cluster.python"

# By stage: the modules that its tasks import, the main ones in words, the work, and the extra that has them.
LIBRARIES = {
    "training": ("torch megatron numpy psutil yaml", "torch and megatron-core", "a training", "train"),
    "data_preparation": ("numpy tokenizers yaml", "numpy and tokenizers", "a data preparation", "data"),
    "conversion": (
        *("torch numpy safetensors yaml", "torch and safetensors"),
        *("a conversion", "train,conversion"),
    ),
    "evaluation": (
        *("torch megatron numpy psutil yaml", "torch and megatron-core"),
        *("an evaluation", "train,evaluation"),
    ),
}


@check(
    MACHINE,
    "this machine has what a launch needs: an interpreter with the trainer's libraries, an allocation",
    "host.in_allocation",
)
def machine_problems(plan: Plan, host: facts.HostFacts) -> Iterator[Finding]:
    container, resources = plan.job.container, plan.job.resources
    if container is not None and plan.scheduler == "local":
        text = "not used: cluster.scheduler=local runs without containers"
        yield warning("container", container.image, text)
    if host.interpreter is not None:
        yield from _interpreter_problems(plan, host.interpreter)
    if plan.scheduler != "allocation":
        return
    fix = f"salloc --nodes={resources.nodes} --ntasks-per-node={resources.tasks_per_node}"
    if not host.in_allocation:
        yield error("cluster.scheduler", "allocation", "this shell is in no allocation", fix)
    elif host.is_heterogeneous:
        text = "a run is one step, and the allocation is heterogeneous (of a salloc with ' : ')"
        yield error("cluster.scheduler", "allocation", text, fix)
    elif host.allocation_nodes is not None and host.allocation_nodes < resources.nodes:
        text = f"the allocation that this shell is in has {host.allocation_nodes}"
        yield error(NODES, resources.nodes, text, fix)


def _interpreter_problems(plan: Plan, python: facts.Interpreter) -> Iterator[Finding]:
    _, libraries, work, extra = LIBRARIES[plan.job.stage]
    name = None if python.is_own else python.name
    if python.problem is not None:
        yield error(_PYTHON, name, python.problem, python.nearest)
    elif python.path is None:
        yield warning(_PYTHON, name, "not on this machine; every node must have it")
    elif python.missing is None:
        yield warning(_PYTHON, name, f"could not determine whether this interpreter has {libraries}")
    elif python.missing:
        who = "the launcher's own interpreter" if python.is_own else "this interpreter"
        fix = (
            f"install what {work} needs there: {install_command(extra, python.path)}\n"
            "or name another interpreter, cluster.python=..., or an image, container=..."
        )
        text, tell = f"{who} cannot import {', '.join(python.missing)}", error
        if python.changed_by is not None:
            text, tell = f"{text} on this machine; {python.changed_by} may bring it on the nodes", warning
        yield tell(_PYTHON, name, text, fix)


@check(SCHEDULER, "Slurm takes the script, by `sbatch --test-only`", "submission.is_refused")
def submission_problems(submission: facts.SubmissionFacts) -> Iterator[Finding]:
    """Repeat what the scheduler says of the script, in its own words."""
    if submission.refusal is not None:
        yield Finding(Severity.ERROR, None, submission.refusal, submission.fix)
    notice = f"sbatch says of this job: {submission.notice}" if submission.notice else None
    for text in filter(None, (submission.waits, notice)):
        yield Finding(Severity.WARNING, None, text)


CHECKS = (
    _missing(
        "data.tokenizer",
        "tokens",
        "the data were made by the training's tokenizer, and their documents end with its token",
    ),
    *(file_problems, permission_problems),
    _missing("path.tokenizer", "tokenizer", "the tokenizer's files are there, and what they should be"),
    _missing("path.data", "data", "the data sets are there, each .idx and .bin of as many tokens"),
    _missing("path.sources", "sources", "what a data preparation, conversion or evaluation reads is there"),
    _missing(
        "path.checkpoint",
        "checkpoint",
        "the checkpoint that the training is to go on from is there, and whole",
    ),
    _missing("path.image", "image", "an image that is a file is there, and a whole squashfs"),
    _missing("image.fetch", "fetched", "many nodes do not fetch an image of a registry at once"),
    *(engine_problems, network_problems),
    _missing(
        "path.script",
        "script",
        "the job's program is there: the engine's in its checkout, a command's own on the nodes",
    ),
    _missing("path.mounts", "mounts", "what the container mounts is there"),
    _missing("path.writable", "results", "the directory of the run can be written"),
    *(shared_problems, checkpoint_problems, conversion_problems),
)
LAUNCH = (machine_problems, submission_problems)
