"""A plan to the text of its files. Pure: nothing is read but the templates, nothing written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from launcher.config.schema import NumaMapping
from launcher.errors import UserError, check_directory, did_you_mean
from launcher.plan import Plan
from launcher.rendering.quoting import RawShell, blaming_templates, expand, template_environment
from launcher.rendering.slurm_flags import header_lines, salloc_arguments, srun_arguments
from launcher.rendering.supervision import supervisor_settings
from launcher.slurm.environment import INHERITED_PREFIXES
from slipway.common.node.settings import CONTAINER, HOSTS, to_json

# In the wheel a directory, in a checkout a link.
TEMPLATE_DIR = (Path(__file__).parents[1] / "templates").resolve()

_TEMPLATES = {"slurm": "sbatch.sh.j2", "local": "local.sh.j2", "allocation": "allocation.sh.j2"}
# The template of a stage without a job script.
_OF_STAGE = {"workspace": "session.sh.j2"}
# The stages whose ranks may hang: they can be asked where they stand.
_ANSWERING = ("training", "command")


def user_templates(template_dir: Path) -> dict[str, str]:
    """Return the user's own templates by name, with those that they include."""
    templates: dict[str, str] = {}
    environment, names = (
        template_environment(TEMPLATE_DIR, None),
        [*_TEMPLATES.values(), *_OF_STAGE.values(), "task.sh.j2"],
    )
    while names:
        name = names.pop()
        path = template_dir / name
        if (
            name in templates
            or not path.is_file()
            or not path.resolve().is_relative_to(template_dir.resolve())
        ):
            continue
        templates[name] = path.read_text(encoding="utf-8")
        references = meta.find_referenced_templates(environment.parse(templates[name]))
        names += [reference for reference in references if reference is not None]
    return templates


def render(plan: Plan, template_dir: Path | None = None) -> dict[Path, str]:
    """Return the texts of a launch's files, those of functions as they are.

    Raise UserError for a wrong template, or a value that cannot be quoted.
    """
    if template_dir is not None:
        _check_templates(template_dir)
    environment = template_environment(TEMPLATE_DIR, template_dir)
    template = _OF_STAGE.get(plan.job.stage, _TEMPLATES[plan.scheduler])
    values = {
        "plan": plan,
        "job": plan.job,
        "paths": plan.paths,
        "directory": plan.paths.directory,
        "header_lines": header_lines(plan) if plan.scheduler == "slurm" else [],
        "salloc_arguments": salloc_arguments(plan),
        "leaks": RawShell(" ".join(f'"${{!{beginning}@}}"' for beginning in INHERITED_PREFIXES)),
        "has_templates": template_dir is not None,
        "answers": plan.job.stage in _ANSWERING,
        "expansions": "; ".join(
            f"export {name}={expand(value, name)}" for name, value in plan.job.expansions.items()
        ),
        "argv": _arguments(plan),
        "srun_arguments": _srun_arguments(plan),
        "binding_arguments": _binding_arguments(plan.job.binding),
        **_world(plan.scheduler),
    }
    with blaming_templates(template_dir):
        script = environment.get_template(template).render(values)
        if template_dir is not None and plan.job.stage not in _OF_STAGE:
            _check_script(script, template_dir)
        return {
            plan.paths.script: script,
            plan.paths.task_script: environment.get_template("task.sh.j2").render(values),
            plan.paths.supervisor_settings: to_json(supervisor_settings(plan)),
            **{
                plan.paths.directory / name: (TEMPLATE_DIR / name).read_text(encoding="utf-8")
                for name in _list_copied(plan)
            },
        }


def _list_copied(plan: Plan) -> Iterator[str]:
    """Yield the files of functions that a launch needs."""
    job, container = plan.job, plan.job.container
    yield "attach.sh"
    if job.stage in _ANSWERING:
        yield "python/sitecustomize.py"
    if job.binding is not None:
        yield "binding.sh"
    if container is not None and container.is_staged and plan.scheduler != "local":
        yield "stage_image.sh"
    if job.stage == "training" and job.engine == "megatron_lm":
        yield "megatron_lm.py"


def _arguments(plan: Plan) -> tuple[Any, ...]:
    """Return the payload's arguments, with those that only the job knows.

    They are the number of a task in an array, and the number of nodes granted of a range.
    """
    resources, payload = plan.job.resources, plan.job.payload
    if payload.array_key is not None:
        return (*payload.argv, RawShell(f'"{payload.array_key}=$SLURM_ARRAY_TASK_ID"'))
    if resources.max_nodes is None or payload.nodes_key is None:
        return payload.argv
    return (*payload.argv, RawShell(f'"{payload.nodes_key}=$SLURM_JOB_NUM_NODES"'))


def _srun_arguments(plan: Plan) -> list[str]:
    """Return the arguments of srun; a session has no supervisor, and names its container itself."""
    arguments, resources = srun_arguments(plan.job), plan.job.resources
    if resources.spares:  # the job chooses the nodes of its tasks
        counts = {"nodes": resources.nodes, "ntasks": resources.tasks, "nodelist": HOSTS}
        counts["ntasks-per-node"] = resources.tasks_per_node
        arguments = [*(f"--{name}={value}" for name, value in counts.items()), *arguments]
    if plan.job.stage not in _OF_STAGE:
        return arguments
    named, by_itself = f"--container-name={CONTAINER}", RawShell('--container-name="$SLIPWAY_CONTAINER"')
    return [by_itself if argument == named else argument for argument in arguments]


def _world(scheduler: str) -> dict[str, RawShell]:
    """Return the shell words for the number of tasks, in all and on each node."""
    if scheduler == "local":  # the supervisor exports them
        return {"world_size": RawShell('"$WORLD_SIZE"'), "local_world_size": RawShell('"$LOCAL_WORLD_SIZE"')}
    return {
        "world_size": RawShell('"$SLURM_NTASKS"'),
        "local_world_size": RawShell("$((SLURM_STEP_NUM_TASKS / SLURM_STEP_NUM_NODES))"),
    }


def render_template(name: str, values: Mapping[str, Any], template_dir: Path | None = None) -> str:
    """Render one template, that of the user's own where there is one; see `render`."""
    if template_dir is not None:
        _check_templates(template_dir)
    with blaming_templates(template_dir):
        return template_environment(TEMPLATE_DIR, template_dir).get_template(name).render(values)


_SUPERVISED = (*_TEMPLATES.values(), "sweep.sh.j2")


def _check_blocks(template_dir: Path) -> None:
    """Refuse blocks that the scripts do not have: Jinja would silently leave them out."""
    environment = template_environment(TEMPLATE_DIR, None)
    for path in filter(Path.is_file, (template_dir / name for name in _SUPERVISED)):
        try:
            tree = environment.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, TemplateSyntaxError):
            continue  # rendering it says so
        if tree.find(nodes.Extends) is None:
            continue
        valid = _blocks(environment, path.name)
        for block in tree.iter_child_nodes():
            if isinstance(block, nodes.Block) and block.name not in valid:
                hint = did_you_mean(block.name, valid)
                raise UserError(f"{path}:{block.lineno}: the script has no block {block.name}", hint=hint)


def _blocks(environment: Environment, name: str) -> set[str]:
    """Return the names of the blocks of a template of ours, and of those that it extends."""
    tree = environment.parse((TEMPLATE_DIR / name).read_text(encoding="utf-8"))
    extended = [str(extends.template.as_const()) for extends in tree.find_all(nodes.Extends)]
    own = {block.name for block in tree.find_all(nodes.Block)}
    return own.union(*(_blocks(environment, name) for name in extended))


def _check_script(script: str, template_dir: Path) -> None:
    """Refuse a script of a user's template that starts no supervisor."""
    if "supervisor.pyz" not in script:
        hint = "docs/scripts.md has the blocks that a template may replace"
        raise UserError(f"{template_dir}: this script does not start supervisor.pyz", hint=hint)


def _check_templates(template_dir: Path) -> None:
    """Refuse a directory with unknown templates: ours would silently be used instead."""
    check_directory("--template-dir", template_dir)
    names = sorted(path.name for path in TEMPLATE_DIR.glob("*.j2"))
    theirs = [template_dir / name for name in names if os.path.lexists(template_dir / name)]
    if not theirs and not any(template_dir.glob("*.Dockerfile.j2")):  # those are of images
        entries = ", ".join(sorted(path.name for path in template_dir.iterdir())) or "nothing"
        raise UserError(
            f"--template-dir {template_dir}: contains no Slipway template (found: {entries})",
            hint=f"valid: {', '.join(names)}",
        )
    for path in theirs:
        if not path.is_file() or not os.access(path, os.R_OK):
            raise UserError(f"{path}: this template is not a file that can be read")
    _check_blocks(template_dir)


def _binding_arguments(binding: NumaMapping | None) -> tuple[str, ...]:
    if binding is None:
        return ()
    cores = str(binding.max_cores) if binding.max_cores is not None else "all"
    threads = "all" if binding.cores == "all_logical" else "one"
    return str(binding.min_cores), cores, "equally" if binding.balanced else "unequally", threads
