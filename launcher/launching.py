"""The rest of the way: a draft is judged by the scheduler, written to its own directory, and submitted."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import __version__, readiness
from launcher.drafting import Draft, Request, render_launch, results_key
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.rendering.config_text import config_text
from launcher.runs import paths as names
from launcher.runs import provenance
from launcher.runs.files import write_atomic
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import LaunchPaths, next_launch_number, short
from launcher.runs.write import LaunchExists, link_newest, make_directories, write_launch
from launcher.schedulers.base import Intent, NoAnswer, Scheduler
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
        make_directories(made.plan.job.directories, results_key(made))
    manifest = manifest.submitted_as(_submit(scheduler, made.plan, manifest))
    warnings += [told] if told else []
    try:
        _record_job(made.plan, manifest)
    except OSError as error:
        # The job is there, and is found by its tag: that its id is not on record must not hide it.
        directory = short(made.plan.paths.directory)
        warnings.append(f"the job's id could not be written into {directory}: {error.strerror}")
    return Launched(made.plan.paths, manifest, warnings)


def _submit(scheduler: Scheduler, plan: Plan, manifest: Manifest) -> str:
    """Submit; where the answer is lost, look for the job before anybody submits it again."""
    paths = plan.paths
    try:
        return scheduler.submit(paths.script, plan.tag)
    except NoAnswer as error:
        intent = Intent(plan.tag, paths.script, manifest.user, manifest.created)
        with contextlib.suppress(UserError):
            job_id = scheduler.find(intent)
            if job_id is not None:
                return job_id
        where = shlex.quote(short(paths.run_dir))
        raise NoAnswer(
            error.message,
            hint=f"whether there is a job is not known. Before launching again: slipway status {where}",
        ) from error
    except UserError as error:
        # Of anything else, such as Ctrl-C, it is not known whether there is a job.
        write_manifest(paths.directory, manifest.refused(str(error)))
        raise


def _write(made: Draft, request: Request) -> tuple[Draft, Manifest]:
    """Write the launch, taking the next number for as long as other launchers take ours."""
    commit, dirty = provenance.git_state(TRAINER)
    while True:
        manifest = _manifest(made, request, commit, dirty)
        try:
            write_launch(
                made.plan.paths, _files(made, manifest, request), _code(made.plan), results_key(made)
            )
        except LaunchExists:
            number = next_launch_number(made.plan.paths.run_dir)
            made = render_launch(made.composition, number, made.plan.tag, request.template_dir)
            continue
        break
    return made, manifest


def _files(made: Draft, manifest: Manifest, request: Request) -> dict[Path, str]:
    paths, config = made.plan.paths, made.plan.job.config
    files = {
        **made.rendered.files(paths),
        paths.directory / names.COMMAND_LOG: _pasteable(request.command, made.plan),
        paths.manifest: manifest.to_json(),
    }
    if config is not None:
        files[paths.config] = config_text(config)
    return files


def _pasteable(command: Sequence[str], plan: Plan) -> str:
    held = ["--dry-run", f"--launch-number={plan.paths.number}", f"--tag={plan.tag}"]
    options_end = command.index("--") if "--" in command else len(command)
    again = [*command[:options_end], *held, *command[options_end:]]
    lines = (_one_line(["cd", str(Path.cwd())]) + " && " + _one_line(words) for words in (command, again))
    return "{}\n# the script of this launch again, byte for byte:\n# {}\n".format(*lines)


def _one_line(words: Sequence[str]) -> str:
    """Quote for bash, in one line whatever a word holds: the second command stands behind a `#`."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", word):
        escaped = word.replace("\\", r"\\").replace("'", r"\'")
        return "$'" + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + "'"
    return shlex.quote(word)


def _code(plan: Plan) -> Path | None:
    return TRAINER if plan.job.engine == "megatron" else None


def _familiar_names(plan: Plan) -> list[str]:
    paths = plan.paths
    shown = [paths.script_name, names.TASK_SCRIPT, names.MANIFEST, names.COMMAND_LOG, names.JOB_ID_LOG]
    return shown if plan.job.config is None else [*shown, paths.config_name, names.RESULTS]


def _record_job(plan: Plan, manifest: Manifest) -> None:
    paths, job_id = plan.paths, manifest.job_id
    assert job_id is not None
    write_manifest(paths.directory, manifest)
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
