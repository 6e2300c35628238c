"""How to get where a rank of a running job runs: on its node, in its container, with its environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.control.targets import Target, targets
from launcher.errors import UserError, did_you_mean
from launcher.schedulers.base import NoAnswer
from launcher.slurm.commands import ask, error_text
from launcher.slurm.environment import clean_environment, inherited_variables
from launcher.slurm.states import State
from launcher.tracking.finding import Found
from launcher.tracking.launches import Launch


@dataclass(frozen=True, slots=True)
class Place:
    """Where to run what: the node of a rank, or a node and any rank there; `inside` is of the container."""

    rank: int | None = None
    node: str | None = None
    inside: bool = True


@dataclass(frozen=True, slots=True)
class Attachment:
    """A command line, and the environment to run it in.

    `removed` are variables of the shell that would change what it means, `added` those that it needs.
    """

    argv: list[str]
    environment: Mapping[str, str]
    removed: Sequence[str]
    added: Mapping[str, str]

    @property
    def line(self) -> str:
        """The command line, to paste into this shell, a bash."""
        added = [f"{name}={shlex.quote(value)}" for name, value in self.added.items()]
        line = " ".join([*added, shlex.join(self.argv)])
        kinds = dict.fromkeys(name.split("_")[0] for name in self.removed)
        unset = " ".join(f"${{!{kind}_*}}" for kind in kinds)
        return f"(unset {unset}; {line})" if kinds else line


def attach(found: Found, place: Place, command: Sequence[str], terminal: bool) -> Attachment:
    """How to attach to a launch of a run that runs.

    Parameters
    ----------
    command
        What to run there; nothing is a shell.
    terminal
        Whether it is to have a terminal.

    Raises
    ------
    UserError
        If none runs, or several do, or the job has no such rank or node.
    """
    target, launch = _running(found)
    manifest = launch.manifest
    world = launch.nodes * manifest.tasks_per_node
    if place.rank is not None and not 0 <= place.rank < world:
        ranks = "rank 0 alone" if world == 1 else f"the ranks 0 to {world - 1}"
        raise UserError(f"--rank {place.rank}: job {target.job_id} of {target.run} has {ranks}")
    if place.inside and not launch.paths.attach_script.exists():
        raise UserError(
            f"{launch.paths.attach_script} is not there: this launch is of an earlier version of Slipway",
            hint="a shell on the node itself: slipway attach --outside",
        )
    if manifest.scheduler == "local":
        return _here(launch, place, command)
    allocation = _allocation(launch) if manifest.scheduler == "allocation" else _raw_id(target, launch)
    where = _where(launch, place, target.job_id, _nodes(target, launch))
    options = [f"--jobid={allocation}", "--overlap", "--nodes=1", "--ntasks=1", where]
    options += ["--pty"] if terminal else []
    return _in_clean_environment(["srun", *options, *_inside(launch, place, command)], launch.slurm_conf)


def _running(found: Found) -> tuple[Target, Launch]:
    named = targets([found])
    running = [(target, target.launch) for target in named if target.runs and target.launch]
    if len(running) == 1:
        ((target, launch),) = running
        return _running_task(target), launch
    if running:
        numbers = ", ".join(str(target.number) for target, _ in running)
        raise UserError(
            f"several launches of {running[0][0].run} run: {numbers}", hint="choose one: --launch N"
        )
    raise _not_running(named[0])


def _not_running(target: Target) -> UserError:
    reason = target.tracked.status.reason
    told = f"{target.state.value}{f' ({reason})' if reason else ''}"
    what = f"job {target.job_id} of {target.run}" if target.job_id else target.run
    hints = {
        State.PENDING: f"it has not begun; to be told when it does: slipway follow {shlex.quote(target.run)}",
        State.COMPLETING: "it ends just now",
        State.UNKNOWN: "try again, once the scheduler can tell",
    }
    if target.state is State.UNKNOWN and target.launch and target.launch.manifest.scheduler != "slurm":
        hints[State.UNKNOWN] = f"attach from there: ssh {target.launch.manifest.host}"
    hint = hints.get(target.state, f"what it left: slipway logs {shlex.quote(target.run)}")
    kind = NoAnswer if target.state is State.UNKNOWN else UserError
    return kind(f"{what} does not run: it is {told}", hint=hint)


def _here(launch: Launch, place: Place, command: Sequence[str]) -> Attachment:
    if place.node is not None:
        raise UserError(f"--node {place.node}: the job runs on this machine, without Slurm; it has no nodes")
    return _in_clean_environment(_inside(launch, place, command), None)


def _inside(launch: Launch, place: Place, command: Sequence[str]) -> list[str]:
    """What to run on the node."""
    if not place.inside:
        return [*command] or ["bash"]
    rank = "any" if place.rank is None and place.node is not None else str(place.rank or 0)
    return ["bash", str(launch.paths.attach_script), launch.manifest.tag, rank, *command]


def _where(launch: Launch, place: Place, job_id: str | None, nodes: Sequence[str]) -> str:
    """The option of srun that names the node."""
    if place.node is not None:
        if nodes and place.node not in nodes:
            hint = did_you_mean(place.node, nodes)
            raise UserError(f"--node {place.node}: job {job_id} does not run there", hint=hint)
        return f"--nodelist={place.node}"
    index = (place.rank or 0) // launch.manifest.tasks_per_node
    # Without a mark the script has not begun yet; srun knows its nodes by their order as well.
    return f"--nodelist={nodes[index]}" if index < len(nodes) else f"--relative={index}"


def _nodes(target: Target, launch: Launch) -> list[str]:
    """The job's nodes as its script told them when it began."""
    lives = [life for life in launch.lives if life.job_id == target.job_id]
    return lives[-1].nodes.split(",") if lives and lives[-1].nodes else []


def _running_task(target: Target) -> Target:
    """Of an array the task that runs: usually there is one."""
    running = [task for task, state in target.tracked.status.tasks.items() if state is State.RUNNING]
    if target.task is not None or not running:
        return target
    if len(running) > 1:
        raise UserError(
            f"job {target.job_id} of {target.run} is an array, and several of its tasks run",
            hint=f"choose one: {', '.join(f'slipway attach {target.job_id}_{one}' for one in running[:3])}",
        )
    return replace(target, task=running[0])


def _raw_id(target: Target, launch: Launch) -> str:
    """The job's id for srun, which does not know the tasks of arrays by theirs."""
    job_id = str(target.job_id)
    if "_" not in job_id:
        return job_id
    command = ["squeue", "--noheader", "--Format=JobID:|", f"--jobs={job_id}"]
    answer = ask(command, clean_environment(launch.slurm_conf))
    raw = answer.stdout.strip().rstrip("|").strip()
    if not raw.isdigit():
        raise UserError(f"job {job_id} of {target.run} does not run: {error_text(answer.stderr)}")
    return raw


def _allocation(launch: Launch) -> str:
    """The allocation that a job of `cluster=interactive` uses."""
    try:
        environment = Path(f"/proc/{launch.manifest.job_id}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise UserError(
            f"job {launch.job} of {launch.manifest.run} uses an allocation of {launch.manifest.host}",
            hint=f"attach from there: ssh {launch.manifest.host}",
        ) from error
    variables = dict(os.fsdecode(item).partition("=")[::2] for item in environment)
    return variables["SLURM_JOB_ID"]


def _in_clean_environment(argv: list[str], slurm_conf: str | None) -> Attachment:
    environment = clean_environment(slurm_conf)
    removed, conf = inherited_variables(os.environ), environment.get("SLURM_CONF")
    is_new = conf is not None and (removed or conf != os.environ.get("SLURM_CONF"))
    return Attachment(argv, environment, removed, {"SLURM_CONF": str(conf)} if is_new else {})
