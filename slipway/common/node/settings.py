"""The settings of a launch's jobs, ``supervisor.json`` in the launch directory: written by the launcher."""

import json
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from slipway.common.files import AnyPath, read_json, to_printable

NAME = "supervisor.json"
# Next to it: sbatch's messages about the launch's jobs.
SUBMISSION_LOG = "launcher.log"

# The schedulers: how tasks are started.
SLURM, ALLOCATION, LOCAL = "slurm", "allocation", "local"

# Placeholders in the command of its tasks for facts that the job alone knows.
IMAGE = "%SLIPWAY_IMAGE%"
CONTAINER = "%SLIPWAY_CONTAINER%"
HOSTS = "%SLIPWAY_HOSTS%"
TASK_SCRIPT = "task.sh"
# The trainer's exit code when it was asked to stop and has saved: EX_TEMPFAIL of sysexits.h.
EXIT_INTERRUPTED = 75
# The oldest Python that it runs with; `__main__` has it too, for it is read by older ones.
OLDEST_PYTHON = (3, 6, 2)

# The lock of a run whose jobs take turns without Slurm; the holder writes its job into it.
TURN = ".singleton"


class ChainSettings(NamedTuple):
    """The chain that the jobs of a launch are links of.

    Attributes
    ----------
    links
        Number of jobs at most.
    from_job
        Each link submits its successor; otherwise all are submitted at launch.
    max_failures
        Number of links in a row without a new checkpoint after which the chain stops.
    exclude_seconds
        Time for which a node that failed is avoided; 0 excludes none.
    exclude
        Nodes that the user excludes, separated by commas.
    exclude_file
        A team's file of further ones; empty for none.
    singleton
        The script's header has ``--dependency=singleton``.
    begin
        The script's header has a ``--begin``, which is for the first link alone.
    restarts
        How often at most the tasks of a job are started again inside of it.
    """

    links: int = 1
    from_job: bool = True
    max_failures: int = 3
    exclude_seconds: int = 86400
    exclude: str = ""
    exclude_file: str = ""
    singleton: bool = False
    begin: bool = False
    restarts: int = 0


class ContainerSettings(NamedTuple):
    """The container of the tasks, as far as the job completes it.

    Attributes
    ----------
    image
        Path of the image's file, or its reference in a registry.
    is_file
        The image is a file.
    stage_to
        Directory of each node's own disk to which the file is copied; ``None`` copies nothing.
    name
        Name of a container that is kept, to be completed by digits of the image; ``None`` keeps none.
    """

    image: str
    is_file: bool
    stage_to: Optional[str] = None
    name: Optional[str] = None


class HealthSettings(NamedTuple):
    """The request of a job to each of its nodes for its health, before the tasks.

    Attributes
    ----------
    gpus
        GPUs that the tasks need on a node, where Slurm itself gives the step none.
    paths
        Directories and files that the tasks need; a file server may be gone.
    command
        The site's own tool; empty for none.
    """

    gpus: int = 0
    paths: Sequence[str] = ()
    command: Sequence[str] = ()


class Settings(NamedTuple):
    """The launcher's settings for the supervisor.

    Attributes
    ----------
    run, launch, tag
        Name of the run, number of the launch, and its tag, which no other launch has.
    run_dir, script, log
        Directory of the run, path of the job script, and path of its logs up to the job's id.
    scheduler
        ``slurm``; ``allocation``, inside of a salloc; or ``local``, without Slurm.
    engine
        Engine of the tasks: ``nemo``, ``megatron``, ``megatron_lm``, ...
    nodes, max_nodes, tasks_per_node
        Number of nodes (at least, where `max_nodes` is set), and of tasks on each.
    singleton
        With the scheduler ``local``: the jobs of a run wait for each other.
    save_signal
        Signal that makes the payload save; ``None`` if it cannot.
    save_before_end, time_limit
        Seconds before the limit at which Slurm was asked to signal the supervisor, and of the limit that was
        asked for; each ``None`` for none.
    results, metrics
        Directory of the results, and the file in it to which our trainer appends a record of each step.
    watch, tell
        Parameters of the detectors, and how people are told, as `slipway.watch` reads them.
    checkpoints
        Directory whose newest checkpoint shows a link's progress, or ``None``.
    failures
        Directory with records of failed ranks, or ``None``.
    vboost
        Set the GPUs' boost slider before the tasks start.
    host_arguments
        The site's arguments for srun on the nodes themselves.
    spares
        Number of nodes beyond `nodes`, for those that are not healthy.
    health
        The request to the nodes before the tasks; ``None`` asks nothing.
    """

    run: str
    launch: int
    tag: str
    run_dir: str
    script: str
    log: str
    scheduler: str
    engine: str
    nodes: int = 1
    max_nodes: Optional[int] = None
    tasks_per_node: int = 1
    singleton: bool = False
    save_signal: Optional[str] = None
    save_before_end: Optional[int] = None
    time_limit: Optional[int] = None
    checkpoints: Optional[str] = None
    failures: Optional[str] = None
    vboost: bool = False
    host_arguments: Tuple[str, ...] = ()
    chain: ChainSettings = ChainSettings()
    container: Optional[ContainerSettings] = None
    results: Optional[str] = None
    metrics: Optional[str] = None
    watch: Mapping[str, Mapping[str, Any]] = {}
    tell: Mapping[str, Any] = {}
    spares: int = 0
    health: Optional[HealthSettings] = None


class SweepSettings(NamedTuple):
    """The launcher's settings for the tasks of a sweep's array.

    Attributes
    ----------
    sweep, tag, script
        Name of the sweep, tag of the array, which no other array has, and name of each point's script.
    points
        By the number of the task: the launch's directory and its tag.
    """

    sweep: str
    tag: str
    script: str
    points: Sequence[Sequence[str]]


def to_json(settings: Settings) -> str:
    """Return the text of ``supervisor.json``."""
    content = settings._asdict()
    content["chain"] = settings.chain._asdict()
    for name in ("container", "health"):
        value = getattr(settings, name)
        content[name] = value._asdict() if value else None
    return json.dumps(content, indent=2) + "\n"


def from_json(content: Dict[str, Any]) -> Settings:
    """Return the settings that ``supervisor.json`` holds.

    Raises
    ------
    ValueError
        If a setting is missing, or one is unknown.
    """
    try:
        container, health = content.get("container"), content.get("health")
        values = dict(
            content,
            chain=ChainSettings(**content.get("chain", {})),
            container=ContainerSettings(**container) if container else None,
            health=HealthSettings(**health) if health else None,
            host_arguments=tuple(content.get("host_arguments", ())),
        )
        return Settings(**values)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} is not of this version: {error}") from error


def why_lost(directory: AnyPath, tag: str) -> str:
    """Return why a directory is not that of a launch any more; empty if it seems to be."""
    try:
        other = read_json(os.path.join(directory, NAME)).get("tag", tag)
    except FileNotFoundError:
        return "" if os.path.isdir(directory) else f"{os.fspath(directory)} was deleted or moved"
    except (OSError, ValueError):
        return ""
    why = f"{os.fspath(directory)} is another launch by now, {to_printable(str(other))}"
    return "" if other == tag else why


def decode_file_names(value: Any) -> Any:
    """Return a value of JSON with its texts as this Python names files: one in a C locale has ASCII alone."""
    if isinstance(value, str):
        return os.fsdecode(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, list):
        return [decode_file_names(each) for each in value]
    if isinstance(value, dict):
        return {name: decode_file_names(each) for name, each in value.items()}
    return value


def fill_in(command: Sequence[str], values: Mapping[str, str], directory: str) -> List[str]:
    """Replace the placeholders in the arguments before the launch's task script: others are the user's."""
    script = os.path.join(directory, TASK_SCRIPT)
    paths = [os.path.normpath(text) for text in command]
    end = paths.index(script) if script in paths else len(command)
    filled = list(command)
    for index in range(end):
        for placeholder, value in values.items():
            filled[index] = filled[index].replace(placeholder, value)
    return filled
