"""The detectors: each watches the tasks of every job, and may end them with its own reason.

docs/architecture.md, "How to add a detector", has an example.
"""

from typing import Callable, Tuple

from slipway.supervisor.hooks import Hook
from slipway.supervisor.job import Job
from slipway.supervisor.watching import tell_people, watch_training

# Each is called once, when the tasks are about to start.
DETECTORS: Tuple[Callable[[Job], Hook], ...] = (watch_training, tell_people)
