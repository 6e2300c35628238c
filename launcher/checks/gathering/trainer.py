"""Our trainer is asked what it would say of a configuration: a job that it would refuse need not wait for it.

In a process of its own, as the launcher imports nothing of the trainer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.plan import Plan

# The trainer lies beside the launcher, in a checkout and in an installation.
_HOME = Path(__file__).resolve().parents[3]
_PATIENCE_SECONDS = 30
_EACH_SECONDS = 0.1


def trainer_verdicts(plans: Sequence[Plan]) -> list[str | None]:
    """Return the trainer's message on each plan, asked in one process.

    A message is empty if the trainer is content or does not train the plan, None if it cannot be asked.
    """
    asked = [plan for plan in plans if _is_asked(plan)]
    message = iter(_ask(asked) if asked else ())
    return [next(message) if _is_asked(plan) else "" for plan in plans]


def _is_asked(plan: Plan) -> bool:
    return plan.job.engine == "megatron" and plan.job.config is not None


def _ask(plans: Sequence[Plan]) -> list[str | None]:
    command = [sys.executable, "-m", "trainer.config.verdict"]
    try:
        done = subprocess.run(
            command,
            input="\n".join(map(_question, plans)),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS + _EACH_SECONDS * len(plans),
            # Python looks for modules there first: for ours, and not for what the user's directory may hold.
            cwd=_HOME,
        )
        answers = [json.loads(line)["mistake"] or "" for line in done.stdout.splitlines()]
    except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError):
        answers = []
    return answers if len(answers) == len(plans) else [None] * len(plans)


def _question(plan: Plan) -> str:
    resources = plan.job.resources
    # Of a range the ends: what depends on the number in between is looked at by a check of our own.
    nodes = sorted({resources.nodes, resources.max_nodes or resources.nodes})
    worlds = [each * resources.tasks_per_node for each in nodes]
    return json.dumps({"config": plan.job.config, "worlds": worlds})
