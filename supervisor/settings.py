"""The settings of a launch's jobs, ``supervisor.json`` in the launch directory: written by the launcher."""

import json
from typing import Any, Dict, NamedTuple, Optional

NAME = "supervisor.json"


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
    header_excludes
        The script's header has an ``--exclude``.
    singleton
        The script's header has ``--dependency=singleton``.
    begin
        The script's header has a ``--begin``, which is for the first link alone.
    """

    links: int = 1
    from_job: bool = True
    max_failures: int = 3
    exclude_seconds: int = 86400
    exclude: str = ""
    header_excludes: bool = False
    singleton: bool = False
    begin: bool = False


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


class Settings(NamedTuple):
    """Everything that the launcher tells the supervisor.

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
        Signal that tells the payload to save; ``None`` where it cannot.
    checkpoints
        Directory whose newest checkpoint tells whether a link got on; ``None`` if there is none.
    failures
        Directory with what ranks left that failed; ``None`` if there is none.
    vboost
        Set the GPUs' boost slider before the tasks start.
    host_arguments
        The site's arguments for srun on the nodes themselves.
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
    checkpoints: Optional[str] = None
    failures: Optional[str] = None
    vboost: bool = False
    host_arguments: tuple = ()
    chain: ChainSettings = ChainSettings()
    container: Optional[ContainerSettings] = None


def to_json(settings: Settings) -> str:
    """Return the text of ``supervisor.json``."""
    content = settings._asdict()
    content["chain"] = settings.chain._asdict()
    content["container"] = settings.container._asdict() if settings.container else None
    return json.dumps(content, indent=2) + "\n"


def from_json(content: Dict[str, Any]) -> Settings:
    """Return the settings that ``supervisor.json`` holds.

    Raises
    ------
    ValueError
        If a setting is missing, or one is unknown.
    """
    try:
        container = content.get("container")
        values = dict(
            content,
            chain=ChainSettings(**content.get("chain", {})),
            container=ContainerSettings(**container) if container else None,
            host_arguments=tuple(content.get("host_arguments", ())),
        )
        return Settings(**values)
    except (TypeError, AttributeError) as error:
        raise ValueError("{} is not of this version: {}".format(NAME, error))
