"""The warm-up of the process that forks launches: all work that is the same for every command."""

from __future__ import annotations

import importlib
import pkgutil


def warm_up() -> None:
    """Import all of the launcher, and compute what its commands keep in memory.

    That is the grammar of overrides, the compiled templates, and the supervisor's archive.
    """
    import launcher
    from launcher import attained, releases
    from launcher.config import schema
    from launcher.config.compose import compose
    from launcher.rendering import quoting, render, supervision

    for module in pkgutil.walk_packages(launcher.__path__, "launcher."):
        importlib.import_module(module.name)
    compose([])
    environment = quoting.template_environment(render.TEMPLATE_DIR, None)
    for template in environment.list_templates(extensions=["j2"]):
        environment.get_template(template)
    supervision.supervisor_archive()
    schema._make_stage_changes()
    attained.attained()
    releases.images()
