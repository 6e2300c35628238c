"""The files of a launch: its directory before it is submitted, its job's id afterwards."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher import __version__
from launcher.checks.gathering.data import data_identity
from launcher.checks.gathering.earlier import differences_on_record
from launcher.config.stored import config_text, stored_text
from launcher.drafting import Draft, Request
from launcher.plan import Plan
from launcher.rendering.render import user_templates
from launcher.rendering.supervision import supervisor_archive
from launcher.runs import paths as names
from launcher.runs import provenance
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import LaunchPaths
from launcher.runs.write import link_newest, write_launch
from launcher.schedulers.job_status import declared_tasks
from launcher.secrecy import recorded
from slipway.common.files import read_text, write_atomic
from slipway.common.node.excluded import ExcludedNode


def write_draft(draft: Draft, request: Request, avoided: Sequence[ExcludedNode] = ()) -> Manifest:
    """Write the launch of a draft with a reserved number; `avoided` are the nodes that it excludes."""
    # Without Slurm a job runs without its container.
    container = draft.plan.job.container if draft.plan.scheduler != "local" else None
    image = container.image if container else None
    origin = add_digest(provenance.gather(names.PACKAGE, request.config_dirs, image), image)
    manifest = manifest_of(draft, request, origin, avoided)
    files = files_of(draft, manifest, request)
    files |= {draft.plan.paths.directory / name: text for name, text in origin.files.items()}
    write_launch(draft.plan.paths, files, _code(draft.plan), draft.results_key)
    return manifest


def add_digest(origin: provenance.Origin, image: str | None) -> provenance.Origin:
    """Add the digest of an image file to an origin, if the file's record has it."""
    if image is None or not image.startswith("/"):
        return origin
    # Imported late: many launches have no image.
    from launcher.images.resolve import read_recorded_digest

    digest = read_recorded_digest(image)
    return origin if digest is None else origin._replace(fields={**origin.fields, "image_digest": digest})


def record_job(paths: LaunchPaths, manifest: Manifest) -> None:
    """Record the job of a launch, and link the run's familiar names to its newest launch.

    Raise OSError if it cannot be written; the job is then found by its tag.
    """
    job_id = manifest.job_id
    assert job_id is not None
    write_manifest(paths.directory, manifest)
    log = paths.directory / names.JOB_ID_LOG  # with the site's notices on the submission
    said, submitted = read_text(log) if log.exists() else "", f"Submitted batch job {job_id}\n"
    write_atomic(log, said.replace(submitted, "") + submitted)
    extensions = ["out", "err"] if _keeps_stderr_apart(paths) else ["out"]
    jobs = [f"{job_id}_{task}" for task in declared_tasks(paths.directory)] or [job_id]
    logs = [paths.log(job, extension) for job in jobs for extension in extensions]
    link_newest(paths, _familiar_names(paths), logs)


def _keeps_stderr_apart(paths: LaunchPaths) -> bool:
    with paths.script.open(encoding="utf-8", errors="surrogateescape") as lines:
        return any(line.startswith("#SBATCH --error=") for line in lines)


def _familiar_names(paths: LaunchPaths) -> list[str]:
    linked = [paths.script_name, names.TASK_SCRIPT, names.MANIFEST, names.COMMAND_LOG, names.JOB_ID_LOG]
    return [*linked, paths.config_name, names.RESULTS] if paths.config.exists() else linked


def files_of(draft: Draft, manifest: Manifest, request: Request) -> dict[Path, str | bytes]:
    """Return the content of each file of a launch's directory."""
    paths, config = draft.plan.paths, draft.plan.job.payload_config
    files: dict[Path, str | bytes] = {
        **draft.texts,
        paths.supervisor: supervisor_archive(),
        paths.directory / names.COMMAND_LOG: _make_pasteable(draft, manifest, request.stage),
        paths.manifest: manifest.to_json(),
    }
    if config is not None:
        files[paths.config] = config_text(config)
    if draft.work is None:
        files[paths.root_config] = stored_text(draft.stored_config, os.environ)
        templates = user_templates(draft.template_dir) if draft.template_dir is not None else {}
        files |= {paths.templates / name: text for name, text in templates.items()}
    return files


def _make_pasteable(draft: Draft, manifest: Manifest, stage: str | None) -> str:
    command, plan = manifest.command, draft.plan
    fixed = [] if stage is None else [f"--stage={stage}"]
    fixed += ["--dry-run", *([f"--launch-dir={plan.paths.directory}"] if draft.work is None else [])]
    fixed += [f"--launch-number={plan.paths.number}", f"--tag={plan.tag}"]
    options_end = command.index("--") if "--" in command else len(command)
    again = [*command[:options_end], *fixed, *command[options_end:]]
    lines = (quote_line(["cd", str(Path.cwd())]) + " && " + quote_line(words) for words in (command, again))
    return "{}\n# the script of this launch again, byte for byte:\n# {}\n".format(*lines)


def quote_line(words: Sequence[str]) -> str:
    """Quote for bash, always in one line: the second command follows a `#`."""
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", word):
        escaped = word.replace("\\", r"\\").replace("'", r"\'")
        return "$'" + re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\x{ord(match[0]):02x}", escaped) + "'"
    return shlex.quote(word)


def _code(plan: Plan) -> Path | None:
    imported = str(plan.paths.code) in plan.job.payload.python_path
    return names.PACKAGE if imported or plan.job.engine == "megatron" else None


def manifest_of(
    draft: Draft, request: Request, origin: provenance.Origin, avoided: Sequence[ExcludedNode] = ()
) -> Manifest:
    """Return the record of a launch before it is submitted."""
    plan, job = draft.plan, draft.plan.job
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
        command=recorded(request.command),
        overrides=recorded(request.overrides),
        choices=draft.composition.choices,
        created=provenance.format_now(),
        version=__version__,
        user=provenance.user(),
        host=provenance.host(),
        # As it is now: another shell may point at another Slurm.
        slurm_conf=plan.slurm_conf or os.environ.get("SLURM_CONF"),
        launcher_pid=os.getpid(),
        links=job.chain.links,
        from_job=job.chain.from_job,
        every=job.every,
        excluded=[node._asdict() for node in avoided],
        max_nodes=job.resources.max_nodes,
        data=data_identity(draft),
        differs=differences_on_record(draft),
        **origin.fields,
    )
