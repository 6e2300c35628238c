"""The supervisor's files in a launch directory: its program and its settings."""

from __future__ import annotations

import functools
import importlib.util
import io
import marshal
import re
import zipfile
from pathlib import Path

import slipway.supervisor
from launcher.config.watch_schema import watch_settings
from launcher.plan import Container, Job, Plan
from launcher.rendering.slurm_flags import host_arguments
from launcher.slurm.notations import limit_seconds
from slipway.common.node.settings import ChainSettings, ContainerSettings, HealthSettings, Settings

_PACKAGE = Path(slipway.supervisor.__file__).parent
# The modules beside it that the supervisor needs, in the syntax of Python 3.6.
_FLOOR = (
    "__init__.py",
    "common/__init__.py",
    "common/backoff.py",
    "common/files.py",
    "common/node/*.py",
    "watch/*.py",
)
# The oldest that a zip file can hold.
_NO_DATE = (1980, 1, 1, 0, 0, 0)
_REGULAR_FILE = 0o100644 << 16
# Bytecode that is not compared with its source again (PEP 552): they lie in one archive.
_BYTECODE_HEADER = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little")


@functools.cache
def supervisor_archive(package: Path = _PACKAGE) -> bytes:
    """Return the program that keeps a job, ``supervisor.pyz``: the same bytes for the same sources.

    The archive also has the bytecode of this Python: a node of the same version starts the tasks sooner, any
    other compiles the sources.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        floor = (path for name in _FLOOR for path in package.parent.glob(name))
        for source in sorted((*floor, *package.glob("*.py"))):
            name = str(source.relative_to(package.parent.parent))
            name = source.name if source.name == "__main__.py" else name
            content = source.read_bytes()
            for path, data in ((name, content), (name + "c", _bytecode(name, content))):
                entry = zipfile.ZipInfo(path, _NO_DATE)
                entry.external_attr = _REGULAR_FILE
                archive.writestr(entry, data)
    return buffer.getvalue()


def _bytecode(name: str, source: bytes) -> bytes:
    # Without docstrings, which the sources have.
    code = compile(source, name, "exec", dont_inherit=True, optimize=2)
    return _BYTECODE_HEADER + importlib.util.source_hash(source) + marshal.dumps(code)


def supervisor_settings(plan: Plan) -> Settings:
    job, paths, chain = plan.job, plan.paths, plan.job.chain
    # A signal to the tasks themselves is out of the supervisor's hands.
    margin = re.fullmatch(r"R?B:.*@(\d+)", job.queue.signal or "")
    singleton = "singleton" in (job.queue.dependency or "").split(",")
    own_results = (job.config or {}).get("exp_manager", {}).get("explicit_log_dir")
    results = own_results or str(paths.results)
    return Settings(
        run=paths.run_name,
        launch=paths.number,
        tag=plan.tag,
        run_dir=str(paths.run_dir),
        script=str(paths.script),
        log=str(paths.directory / paths.log_prefix),
        scheduler=plan.scheduler,
        engine=job.engine,
        nodes=job.resources.nodes,
        max_nodes=job.resources.max_nodes,
        tasks_per_node=job.resources.tasks_per_node,
        singleton=singleton,
        # A job that trains nothing cannot save, nor diverge.
        save_signal=job.payload.save_signal if job.stage == "training" else None,
        save_before_end=int(margin[1]) if margin else None,
        time_limit=limit_seconds(job.resources.time_limit),
        checkpoints=chain.checkpoints,
        # The ranks of our trainer write their failures there.
        failures=f"{results}/failures" if own_results and job.engine == "megatron" else None,
        vboost=job.vboost,
        host_arguments=tuple(host_arguments(job)),
        chain=ChainSettings(
            links=chain.links,
            from_job=chain.from_job,
            max_failures=chain.max_failures,
            exclude_seconds=round(chain.exclude_hours * 3600),
            exclude=job.queue.exclude or "",
            exclude_file=chain.exclude_file or "",
            singleton=singleton,
            begin=job.queue.begin is not None,
            restarts=chain.restarts,
        ),
        # Local processes run without containers.
        container=None if plan.scheduler == "local" else _container(job.container),
        results=results,
        metrics=f"{results}/{paths.metrics.name}",
        watch=watch_settings(plan.watch),
        tell=plan.watch.tell.model_dump(),
        spares=job.resources.spares,
        health=_health(job),
    )


def _health(job: Job) -> HealthSettings | None:
    if job.health is None:
        return None
    on_gpus = (job.config or {}).get("trainer", {}).get("accelerator") in ("gpu", "cuda")
    gpus = job.resources.tasks_per_node if on_gpus else 0
    return HealthSettings(gpus, job.health.paths, job.health.command)


def _container(container: Container | None) -> ContainerSettings | None:
    if container is None:
        return None
    options = container.options
    return ContainerSettings(
        image=container.image,
        is_file=container.is_file,
        stage_to=options.stage_to if container.is_staged else None,
        name=options.name if container.is_file else None,
    )
