"""The rest of the way: a draft is judged by the scheduler, written to its own directory, and submitted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher import __version__, readiness
from launcher.drafting import Draft, Request, render_launch
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.runs import paths as names
from launcher.runs import provenance
from launcher.runs.files import write_atomic
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import LaunchPaths, next_launch_number
from launcher.runs.write import LaunchExists, link_newest, make_directories, write_launch
from launcher.schedulers.registry import scheduler_for

TRAINER = Path(__file__).resolve().parents[1] / "trainer"


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that became a job; `warnings` tell what was left out, and what may keep it waiting."""

    paths: LaunchPaths
    manifest: Manifest
    warnings: list[str]


def launch(made: Draft, request: Request) -> Launched:
    """Let the scheduler judge a draft, write it and submit it.

    Raises
    ------
    UserError
        If the request has a mistake, or the scheduler refuses; what it refuses beforehand is not written.
    """
    scheduler = scheduler_for(made.plan.scheduler, made.plan.slurm_conf)
    warnings = [*readiness.check(made), *scheduler.ignored_environment()]
    told = scheduler.validate(made.rendered.script)
    # From here on a launcher may die at any moment. The manifest is the intent; what became of it is found by
    # its tag (`Scheduler.find`) or by the job's own marks.
    with made.composition.naming_sources():
        made, manifest = _write(made, request)
        make_directories(made.plan.job.directories)
    paths = made.plan.paths
    try:
        job_id = scheduler.submit(paths.script, made.plan.tag)
    except UserError as error:
        # Of anything else (Ctrl-C, a lost connection) it is not known whether there is a job.
        write_manifest(paths.directory, manifest.refused(str(error)))
        raise
    manifest = manifest.submitted_as(job_id)
    write_manifest(paths.directory, manifest)
    _tell_job_id(paths, made.plan, job_id)
    return Launched(paths, manifest, [*warnings, told] if told else warnings)


def _write(made: Draft, request: Request) -> tuple[Draft, Manifest]:
    """Write the launch, taking the next number for as long as other launchers take ours."""
    commit, dirty = provenance.git_state(TRAINER)
    while True:
        manifest = _manifest(made, request, commit, dirty)
        try:
            write_launch(made.plan.paths, _files(made, manifest, request), _code(made.plan))
        except LaunchExists:
            number = next_launch_number(made.plan.paths.run_dir)
            made = render_launch(made.composition, number, made.plan.tag, request.template_dir)
            continue
        break
    return made, manifest


def _files(made: Draft, manifest: Manifest, request: Request) -> dict[Path, str]:
    paths, config = made.plan.paths, made.plan.job.config
    files = {
        paths.script: made.rendered.script,
        paths.task_script: made.rendered.task,
        paths.directory / names.COMMAND_LOG: _pasteable(request.command, made.plan),
        paths.manifest: manifest.to_json(),
    }
    if config is not None:
        files[paths.config] = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=110)
    return files


def _pasteable(command: Sequence[str], plan: Plan) -> str:
    here = f"cd {shlex.quote(str(Path.cwd()))} && "
    held = ["--dry-run", f"--launch-number={plan.paths.number}", f"--tag={plan.tag}"]
    again = f"# the script of this launch again, byte for byte:\n# {here}{shlex.join([*command, *held])}\n"
    return f"{here}{shlex.join(command)}\n{again}"


def _code(plan: Plan) -> Path | None:
    return TRAINER if plan.job.engine == "megatron" else None


def _familiar_names(plan: Plan) -> list[str]:
    paths = plan.paths
    shown = [paths.script_name, names.TASK_SCRIPT, names.MANIFEST, names.COMMAND_LOG, names.JOB_ID_LOG]
    return shown if plan.job.config is None else [*shown, paths.config_name, names.RESULTS]


def _tell_job_id(paths: LaunchPaths, plan: Plan, job_id: str) -> None:
    write_atomic(paths.directory / names.JOB_ID_LOG, f"Submitted batch job {job_id}\n")
    extensions = ["out"] if plan.job.merge_stderr else ["out", "err"]
    logs = [paths.directory / paths.log_name(job_id, extension) for extension in extensions]
    link_newest(paths, _familiar_names(plan), logs)


def _manifest(made: Draft, request: Request, commit: str | None, dirty: bool | None) -> Manifest:
    plan, job = made.plan, made.plan.job
    return Manifest(
        run=plan.paths.run_name,
        launch=plan.paths.number,
        tag=plan.tag,
        stage=job.stage,
        engine=job.engine,
        scheduler=plan.scheduler,
        job_name=plan.paths.job_name,
        nodes=job.resources.nodes,
        tasks_per_node=job.resources.tasks_per_node,
        time_limit=job.resources.time_limit,
        command=list(request.command),
        overrides=list(request.overrides),
        choices=made.composition.choices,
        created=provenance.now(),
        version=__version__,
        user=provenance.user(),
        host=provenance.host(),
        git_commit=commit,
        git_dirty=dirty,
        # As it is now: another shell may point at another Slurm.
        slurm_conf=plan.slurm_conf or os.environ.get("SLURM_CONF"),
    )
