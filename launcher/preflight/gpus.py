"""GPUs that the job asks for, and tasks that use them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.plan import Resources
from launcher.preflight.findings import Finding, error, full, warning
from launcher.preflight.shape import DEVICES
from launcher.preflight.values import Values, count

_GRES = re.compile(r"gpu(?::[\w.-]+)?:(\d+)")


def gpu_problems(values: Values, resources: Resources) -> Iterator[Finding]:
    """One task per GPU: `trainer.devices` on each node, and as many GPUs from the cluster."""
    if values.raw("trainer.accelerator") == "cpu":
        return
    tasks = resources.tasks_per_node
    key, given = "cluster.gpus_per_node", resources.gpus_per_node
    if given is None:
        named = _GRES.fullmatch(resources.gres or "")
        key, given = "cluster.gres", int(named[1]) if named else None
    if given is None or given == tasks:
        return
    shown = resources.gres if key == "cluster.gres" else given
    if given < tasks:
        told = f"{count(tasks, 'task')} to a node ({full(DEVICES)}), and {count(given, 'GPU')} for them"
        yield error("layout.gpus", key, shown, told, f"{full(DEVICES)}={given or 1}", also=(DEVICES,))
    else:
        idle = given - tasks
        told = f"{count(idle, 'GPU')} of each node would be idle: {full(DEVICES)}={tasks}"
        yield warning("layout.gpus", key, shown, told, f"{full(DEVICES)}={given}", also=(DEVICES,))
