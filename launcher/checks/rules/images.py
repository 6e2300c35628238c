"""Check a job's image: the file, the engine's programs in it, and the plugin of the network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from launcher.checks.facts import ImageFacts
from launcher.checks.findings import Finding, check, error, warning
from launcher.checks.rules.files import path_check
from launcher.estimates.parallelism import PIPELINE
from launcher.estimates.values import Values, full
from launcher.plan import Job, Plan
from launcher.releases import Contents, for_pyxis, newest_with_core, newest_with_pretraining, version

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
    """The fit of an image to an engine; `fits` is None if unknown."""

    fits: bool | None
    why: str
    fix: str | None = None


def engine_fit(contents: Contents, engine: str) -> Fit:
    """Judge an image for one of the engines in `JUDGED` by its known contents."""
    return _judge_for_nemo(contents) if engine == "nemo" else _judge_for_trainer(contents)


def _judge_for_nemo(contents: Contents) -> Fit:
    best = newest_with_pretraining()
    fix = f"the newest that has them: container={for_pyxis(best)}; or engine=megatron, which needs no NeMo"
    what = "NeMo's megatron_*_pretraining.py and their models"
    has = "" if contents.nemo is None else f" (NeMo {contents.nemo})"
    if contents.pretraining:
        return Fit(True, f"{contents.origin}{has} has {what}")
    if contents.pretraining is False:
        return Fit(False, f"{contents.origin}{has} does not have {what}", fix)
    if contents.family == "pytorch":
        return Fit(None, f"{contents.origin} is not known to have NeMo", fix)
    return Fit(None, f"whether {contents.origin} has {what} is not known", fix)


def _judge_for_trainer(contents: Contents) -> Fit:
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


@check("image.engine", "the image has the engine's programs", "image.contents")
def engine_problems(plan: Plan, image: ImageFacts) -> Iterator[Finding]:
    """Find an image without the program that the engine runs, or without the optimizer."""
    job, contents = plan.job, image.contents
    if contents is None or job.config is None or job.container is None:
        return
    if job.engine == "megatron_lm":
        yield from _find_unsupported_stages(job, contents)
    elif job.engine in JUDGED and not _is_custom_script(job):
        fit = engine_fit(contents, job.engine)
        if fit.fits is False or (fit.fits is None and not contents.is_certain):
            yield _report(contents, "container", job.container.image, fit.why, fit.fix)
        elif fit.fits is None:
            yield warning("container", job.container.image, fit.why, fit.fix)
        elif job.engine == "nemo":
            yield from _find_unknown_optimizer(Values(job.config), contents)


def _report(contents: Contents, key: str, value: Any, text: str, fix: str | None, *also: str) -> Finding:
    """Return an error, or a warning if only the image's name is known."""
    if contents.is_certain:
        return error(key, value, text, fix, also)
    return warning(key, value, f"{text} (judging by the image's name only)", fix, also)


def engine_of_image(plan: Plan) -> str | None:
    """Return the engine of a job that runs its image's programs, if `engine_fit` can judge them."""
    job = plan.job
    if job.config is None or job.container is None or plan.scheduler == "local" or _is_custom_script(job):
        return None
    return job.engine if job.engine in JUDGED else None


def _is_custom_script(job: Job) -> bool:
    """Return True if the engine's program is mounted into the container, and is not the image's."""
    if job.engine == "nemo":
        return _is_mounted(job, job.payload.working_dir)
    return "/" in job.payload.argv[0]  # an interpreter that the user chose


def _is_mounted(job: Job, path: str) -> bool:
    mounts = job.container.mounts if job.container is not None else ()
    return any(f"{path}/".startswith(f"{mount.target.rstrip('/')}/") for mount in mounts)


def _find_unknown_optimizer(values: Values, contents: Contents) -> Iterator[Finding]:
    """Find the name of an optimizer that NeMo before 2.0 does not know."""
    if values.raw(_OPTIMIZER) == _NEW_OPTIMIZER and contents.mcore_optimizer is False:
        text = f"the NeMo of {contents.origin} does not know this optimizer, which is new with 24.05"
        newest = f"container={for_pyxis(newest_with_pretraining())}"
        fix = f"{full(_OPTIMIZER)}={_OLD_OPTIMIZER}; or the newest image that has the scripts: {newest}"
        yield _report(contents, _OPTIMIZER, _NEW_OPTIMIZER, text, fix, "container")


def _find_unsupported_stages(job: Job, contents: Contents) -> Iterator[Finding]:
    """Find pipeline stages of a T5 that Megatron-LM from core_v0.14 on does not have."""
    core, stages = version(contents.megatron_core)[:2], Values(job.config or {}).raw(PIPELINE)
    if core < _NO_ENCODER_STAGES or ENCODER_STAGES not in job.payload.argv:
        return
    if not _is_mounted(job, job.payload.working_dir):
        text = f"{contents.origin} has megatron-core {contents.megatron_core}, which has no pipeline for a T5"
        best = newest_with_core((0, 1), _NO_ENCODER_STAGES)
        fix = f"1; or the newest image that has one: container={for_pyxis(best)}"
        yield _report(contents, PIPELINE, stages, text, fix, "container")


@check("image.network", "NCCL finds the plugin for EFA, where FI_PROVIDER=efa")
def network_problems(plan: Plan, image: ImageFacts | None) -> Iterator[Finding]:
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


CHECKS = (
    path_check("path.image", "image", "an image file exists, and is a whole squashfs"),
    path_check("image.fetch", "fetched", "many nodes do not fetch an image of a registry at once"),
    *(engine_problems, network_problems),
)
