"""The files of a launch, written as the launcher writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.plan import Plan
from launcher.rendering.render import render
from launcher.rendering.supervision import supervisor_archive


def write_files(plan: Plan, template_dir: Path | None = None) -> None:
    """Render a plan, and write its files into its directory, which is made if needed."""
    plan.paths.directory.mkdir(parents=True, exist_ok=True)
    texts = render(plan, template_dir)
    for path, content in {**texts, plan.paths.supervisor: supervisor_archive()}.items():
        raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def script_of(plan: Plan, template_dir: Path | None = None) -> str:
    return render(plan, template_dir)[plan.paths.script]


def task_of(plan: Plan) -> str:
    return render(plan)[plan.paths.task_script]


def with_argument(plan: Plan, argument: str) -> Plan:
    """Return the plan with a further argument of its payload."""
    payload = plan.job.payload._replace(argv=(*plan.job.payload.argv, argument))
    return replace(plan, job=replace(plan.job, payload=payload))
