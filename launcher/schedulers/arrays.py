"""Job arrays: the numbers of their tasks, and what these are together.

A launch that is an array is one training several times, one task after another: pure functions alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.schedulers.base import JobStatus
from launcher.slurm.hostlists import compress_tasks, expand_tasks
from launcher.slurm.states import State
from supervisor.files import open_regular

_HEADER_BYTES = 1 << 16
# Each of our own arrays has a run directory for every task.
_MOST_DECLARED = 100_000
_HEADER = re.compile(r"^#SBATCH --array=[\"']?([-0-9,:]+)", re.MULTILINE)

_IN_TURN = "JobArrayTaskLimit"

# Of several tasks that live, the first of these is what the array is.
_LIVE = (State.RUNNING, State.COMPLETING, State.SUSPENDED, State.PENDING)


def declared_tasks(launch_dir: Path) -> list[int]:
    """The numbers of the tasks that a launch's script asks for; none if it is no array."""
    for script in launch_dir.glob("*_submission.sh"):
        try:
            with open_regular(script) as stream:
                found = _HEADER.search(stream.read(_HEADER_BYTES).decode("utf-8", "replace"))
        except OSError:
            continue
        if found:
            return expand_tasks(found[1], _MOST_DECLARED)
    return []


def sum_up(tasks: Mapping[int, JobStatus]) -> JobStatus:
    """What an array is, by what its tasks are.

    It runs or waits while one of them does. Otherwise it is UNKNOWN if one of them is, because that one may
    run; then the first that went wrong decides. What a task saved before its end a later one went on with.
    """
    ordered = dict(sorted(tasks.items()))
    decisive = ordered[_decisive(ordered)]
    counted = Counter(status.state.value for status in ordered.values())
    reason = "tasks: " + ", ".join(f"{count} {state}" for state, count in counted.items())
    waiting = next((status for status in ordered.values() if status.state is State.PENDING), None)
    # That the tasks wait for each other is what such an array is for.
    is_held_up = waiting is not None and not (waiting.reason or "").startswith(_IN_TURN)
    telling = waiting if is_held_up and decisive.state.is_live else decisive
    if telling and telling.reason and not telling.state.is_good:
        numbers = [number for number, status in ordered.items() if status == telling]
        reason += f"; {compress_tasks(numbers)}: {telling.reason}"
    told = {str(number): status.state for number, status in ordered.items()}
    if not decisive.state.is_live and decisive.nodes is None:
        # It was cancelled before it began, say: where and how long it ran is another's.
        ran = next((status for status in reversed(ordered.values()) if status.nodes), decisive)
        decisive = replace(decisive, nodes=ran.nodes, elapsed=ran.elapsed)
    return replace(decisive, reason=reason, tasks=told)


def _decisive(tasks: Mapping[int, JobStatus]) -> int:
    """The number of the task whose state is that of the array."""
    for state in (*_LIVE, State.UNKNOWN):
        for number, status in tasks.items():
            if status.state is state:
                return number
    wrong = [number for number, status in tasks.items() if not status.state.is_good]
    worse = [number for number in wrong if tasks[number].state is not State.INTERRUPTED]
    if worse:
        return worse[0]
    last = list(tasks)[-1]
    # What one saved a later one went on with.
    completed = [number for number in tasks if number not in wrong]
    return completed[-1] if completed and (not wrong or completed[-1] > wrong[-1]) else last
