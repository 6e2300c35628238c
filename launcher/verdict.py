"""Our trainer is asked what it would say of a configuration: a job that it would refuse need not wait for it.

In a process of its own, as the launcher imports nothing of the trainer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from launcher.plan import Plan

# The trainer lies beside the launcher, in a checkout and in an installation.
_HOME = Path(__file__).resolve().parents[1]
_PATIENCE_SECONDS = 30


def trainer_verdict(plan: Plan) -> str | None:
    """Return the trainer's message, empty if it is content or not asked; None if it cannot be asked."""
    if plan.job.engine != "megatron" or plan.job.config is None:
        return ""
    resources = plan.job.resources
    asked = {"config": plan.job.config, "world": resources.nodes * resources.tasks_per_node}
    command = [sys.executable, "-m", "trainer.config.verdict"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            # Python looks for modules there first: for ours, and not for what the user's directory may hold.
            cwd=_HOME,
        )
        return json.loads(done.stdout)["mistake"] or ""
    except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError):
        return None
