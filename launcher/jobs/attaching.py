"""Attach to a rank of a running job: on its node, in its container, with its environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError, did_you_mean
from launcher.jobs.launches import Launch
from launcher.jobs.lookup import RunRef
from launcher.jobs.status import LaunchStatus, named_statuses, pick_task
from launcher.runs.trust import why_untrusted
from launcher.schedulers.base import NoAnswer
from launcher.slurm.commands import ask, error_text
from launcher.slurm.environment import clean_environment, inherited_variables
from launcher.slurm.states import State
from slipway.common.files import is_job_id


@dataclass(frozen=True, slots=True)
class AttachPoint:
    """The node of a rank, or a node with any of its ranks; `inside` means in the container."""

    rank: int | None = None
    node: str | None = None
    inside: bool = True


@dataclass(frozen=True, slots=True)
class Attachment:
    """A command line and its environment.

    `removed` are variables of the shell that would change its meaning, `added` those that it needs.
    """

    argv: list[str]
    environment: Mapping[str, str]
    removed: Sequence[str]
    added: Mapping[str, str]

    @property
    def line(self) -> str:
        """Return the command line, to paste into a bash."""
        added = [f"{name}={shlex.quote(value)}" for name, value in self.added.items()]
        line = " ".join([*added, shlex.join(self.argv)])
        kinds = dict.fromkeys(name.split("_")[0] for name in self.removed)
        unset = " ".join(f"${{!{kind}_*}}" for kind in kinds)
        return f"(unset {unset}; {line})" if kinds else line


def attach(ref: RunRef, point: AttachPoint, command: Sequence[str], terminal: bool) -> Attachment:
    """Return the command line that attaches to the running launch of a run.

    Raise UserError if none runs, or several do, or the job has no such rank or node.
    """
    target, launch = _find_running(ref)
    manifest = launch.manifest
    world = launch.nodes * manifest.tasks_per_node
    if point.rank is not None and not 0 <= point.rank < world:
        ranks = "rank 0 alone" if world == 1 else f"the ranks 0 to {world - 1}"
        raise UserError(f"--rank {point.rank}: job {target.job_id} of {target.run} has {ranks}")
    if point.inside and not launch.paths.attach_script.exists():
        raise UserError(
            f"{launch.paths.attach_script} is not there: this launch is of an earlier version of Slipway",
            hint="a shell on the node itself: slipway attach --outside",
        )
    if manifest.scheduler == "local":
        if point.node is not None:
            message = f"--node {point.node}: the job runs on this machine, without Slurm; it has no nodes"
            raise UserError(message)
        return _clean_attachment(_build_command(launch, point, command), None)
    allocation = _allocation(launch) if manifest.scheduler == "allocation" else _raw_id(target, launch)
    where = _node_option(launch, point, target.job_id)
    options = [f"--jobid={allocation}", "--overlap", "--nodes=1", "--ntasks=1", where]
    options += ["--pty"] if terminal else []
    return _clean_attachment(["srun", *options, *_build_command(launch, point, command)], launch.slurm_conf)


def _find_running(ref: RunRef) -> tuple[LaunchStatus, Launch]:
    named = named_statuses([ref])
    running = [(target, target.launch) for target in named if target.runs and target.launch]
    if not running:
        raise _explain_state(named[0])
    (target, launch), *others = running
    if others:
        numbers = ", ".join(str(target.number) for target, _ in running)
        raise UserError(f"{target.run} runs several launches: {numbers}", hint="choose one: --launch N")
    return _find_running_task(target), launch


def _explain_state(target: LaunchStatus) -> UserError:
    reason = target.reason
    state = f"{target.state.value}{f' ({reason})' if reason else ''}"
    what = f"job {target.job_id} of {target.run}" if target.job_id else target.run
    hints = {
        State.PENDING: f"it has not begun; wait for its start: slipway follow {shlex.quote(target.run)}",
        State.COMPLETING: "it is ending",
        State.UNKNOWN: "try again when the scheduler answers",
    }
    if target.state is State.UNKNOWN and target.launch and target.launch.manifest.scheduler != "slurm":
        hints[State.UNKNOWN] = f"attach from there: ssh {target.launch.manifest.host}"
    hint = hints.get(target.state, f"its logs: slipway logs {shlex.quote(target.run)}")
    kind = NoAnswer if target.state is State.UNKNOWN else UserError
    return kind(f"{what} is not running: it is {state}", hint=hint)


def _build_command(launch: Launch, point: AttachPoint, command: Sequence[str]) -> list[str]:
    """Return the command to run on the node."""
    if not point.inside:
        return [*command] or ["bash"]
    rank = "any" if point.rank is None and point.node is not None else str(point.rank or 0)
    script = [str(launch.paths.attach_script)]
    if why_untrusted(launch.paths.attach_script):
        # Imported late, as it is rarely needed. The text, because the node may not have our own file.
        from launcher.rendering.render import TEMPLATE_DIR

        script = ["-c", (TEMPLATE_DIR / launch.paths.attach_script.name).read_text(encoding="utf-8"), "bash"]
    return ["bash", *script, launch.manifest.tag, rank, *command]


def _node_option(launch: Launch, point: AttachPoint, job_id: str | None) -> str:
    """Return the option of srun that names the node, by the mark that the job left when it began."""
    marked = [attempt.nodes for attempt in launch.attempts if attempt.job_id == job_id]
    nodes = marked[-1].split(",") if marked and marked[-1] else []
    if point.node is not None:
        if nodes and point.node not in nodes:
            hint = did_you_mean(point.node, nodes)
            raise UserError(f"--node {point.node}: job {job_id} does not run there", hint=hint)
        return f"--nodelist={point.node}"
    index = (point.rank or 0) // launch.manifest.tasks_per_node
    # Without a mark the script has not begun yet; srun knows the nodes by their order as well.
    return f"--nodelist={nodes[index]}" if index < len(nodes) else f"--relative={index}"


def _find_running_task(target: LaunchStatus) -> LaunchStatus:
    """Return the running task of an array: usually there is only one."""
    running = [task for task, state in target.tasks.items() if state is State.RUNNING]
    if target.task is not None or not running:
        return target
    if len(running) > 1:
        raise UserError(
            f"job {target.job_id} of {target.run} is an array, and several of its tasks run",
            hint=f"choose one: {', '.join(f'slipway attach {target.job_id}_{task}' for task in running[:3])}",
        )
    return pick_task(target, running[0])


def _raw_id(target: LaunchStatus, launch: Launch) -> str:
    """Return the job's id for srun, which does not know the tasks of arrays by theirs."""
    job_id = str(target.job_id)
    if "_" not in job_id:
        return job_id
    command = ["squeue", "--all", "--local", "--noheader", "--Format=JobID:|", f"--jobs={job_id}"]
    answer = ask(command, clean_environment(launch.slurm_conf))
    raw = answer.stdout.strip().rstrip("|").strip()
    if not raw.isdigit():
        raise UserError(f"job {job_id} of {target.run} is not running: {error_text(answer.stderr)}")
    return raw


def _allocation(launch: Launch) -> str:
    """Return the allocation that a job of `cluster=interactive` uses."""
    try:
        environment = Path(f"/proc/{launch.manifest.job_id}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise UserError(
            f"job {launch.job} of {launch.manifest.run} uses an allocation of {launch.manifest.host}",
            hint=f"attach from there: ssh {launch.manifest.host}",
        ) from error
    variables = dict(os.fsdecode(item).partition("=")[::2] for item in environment)
    allocation = variables.get("SLURM_JOB_ID", "")
    if not is_job_id(allocation):  # of a manifest that names any process
        raise UserError(f"job {launch.job} of {launch.manifest.run} is in no allocation of Slurm")
    return allocation


def _clean_attachment(argv: list[str], slurm_conf: str | None) -> Attachment:
    environment = clean_environment(slurm_conf)
    removed, conf = inherited_variables(os.environ), environment.get("SLURM_CONF")
    is_new = conf is not None and (removed or conf != os.environ.get("SLURM_CONF"))
    return Attachment(argv, environment, removed, {"SLURM_CONF": str(conf)} if is_new else {})
