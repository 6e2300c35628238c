"""The parameters of the detectors: ``watch`` in the configuration and in ``supervisor.json``.

Each detector has a class with its parameters, whose defaults hold for launches that were stored without
them. The schema of the configuration is made of these classes, and `conf/config.yaml` says what they mean.
"""

from typing import Any, Mapping, NamedTuple, Optional

# What is done when a detector fires; `off` does not run it.
REACTIONS = ("notify", "hold", "save", "stop", "off")
# Of a hang alone: the tasks end, and the training begins again from the newest checkpoint.
RESTART = "restart"


class NonFinite(NamedTuple):
    reaction: str = "notify"
    skips: int = 10


class Spike(NamedTuple):
    reaction: str = "notify"
    sigmas: float = 2.5
    enough: float = 12.0
    steps: int = 4
    least: float = 0.01


class NoStep(NamedTuple):
    reaction: str = "notify"
    factor: float = 10.0
    least: float = 60.0
    first: float = 1800.0
    pause: float = 600.0


class Throughput(NamedTuple):
    reaction: str = "notify"
    part: float = 0.7
    steps: int = 50


class Checkpoint(NamedTuple):
    reaction: str = "notify"
    factor: float = 2.0


class Chain(NamedTuple):
    reaction: str = "notify"


class Job(NamedTuple):
    reaction: str = "notify"


class Disk(NamedTuple):
    reaction: str = "notify"
    hours: float = 12.0
    part: float = 0.02


class Deadline(NamedTuple):
    """`at` is in Unix seconds; ``None`` sets no deadline."""

    reaction: str = "notify"
    at: Optional[float] = None


class Parameters(NamedTuple):
    """The parameters of all detectors, by the detectors' names."""

    non_finite: NonFinite = NonFinite()
    loss_spike: Spike = Spike()
    grad_norm_spike: Spike = Spike(enough=9.0, steps=3, least=0.05)
    no_step: NoStep = NoStep()
    throughput: Throughput = Throughput()
    checkpoint: Checkpoint = Checkpoint()
    chain: Chain = Chain()
    job: Job = Job()
    disk: Disk = Disk()
    deadline: Deadline = Deadline()


def from_json(content: Mapping[str, Any]) -> Parameters:
    """Return the parameters that mappings hold, else their defaults; raise ValueError for unknown ones."""
    defaults = Parameters()
    try:
        sections = {name: getattr(defaults, name)._replace(**values) for name, values in content.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the parameters of the detectors are not of this version: {error}") from error
    return defaults._replace(**sections)
