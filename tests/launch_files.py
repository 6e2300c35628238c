"""The files of a launch, written as the launcher writes them."""

from __future__ import annotations

from pathlib import Path

from launcher.plan import Plan
from launcher.rendering.render import render


def write_files(plan: Plan, template_dir: Path | None = None) -> None:
    """Render a plan, and write its files into its directory, which is made if needed."""
    plan.paths.directory.mkdir(parents=True, exist_ok=True)
    for path, content in render(plan, template_dir).files(plan.paths).items():
        raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
        path.write_bytes(raw)
