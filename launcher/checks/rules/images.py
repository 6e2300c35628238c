"""The image of a job: whether it holds what the engine runs, and a plugin of NCCL that fits the network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, error, warning
from launcher.estimates.parallelism import PIPELINE
from launcher.estimates.values import Values, full
from launcher.plan import Job, Plan
from launcher.releases import (
    Contents,
    for_pyxis,
    newest_with_core,
    newest_with_pretraining,
    version,
)

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
    return any(_is_within(path, mount.target) for mount in mounts)


def _is_within(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


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
