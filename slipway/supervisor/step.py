"""The step of a job's tasks: where they meet, its command, and its run with all that watches it."""

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence, Tuple

from slipway.common.node import marks
from slipway.common.node.settings import ALLOCATION, CONTAINER, HOSTS, IMAGE, LOCAL, fill_in
from slipway.supervisor import hooks
from slipway.supervisor.job import Job
from slipway.supervisor.rendezvous import rendezvous
from slipway.supervisor.tasks import Signals, map_signals, run, run_before

if TYPE_CHECKING:
    from slipway.supervisor.slurm import Slurm
    from slipway.supervisor.termination import Termination
    from slipway.supervisor.time_limit import TimeLimit

# A shell's, for a missing command.
_NOT_FOUND = 127
# In seconds, after an error of a hook.
_POLL_AGAIN = 60.0


def meet(job: Job, hosts: Sequence[str]) -> None:
    """Choose where the tasks meet: the first of their hosts, and a port that is free there."""
    address, port = rendezvous(job.settings.scheduler, hosts, job.restarts)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    run_name, launch, names = job.settings.run, job.settings.launch, ", ".join(hosts)
    launch_name = f"launch {launch}{f', restart {job.restarts}' if job.restarts else ''}"
    text = f"run {run_name}, {launch_name}, on {names}; rendezvous at {address}:{port}"
    job.say(text)
    if job.restarts and not os.path.samestat(os.fstat(1), os.fstat(2)):
        job.say(text, sys.stderr)  # what is before it in a log is of the tasks before these


def prepare_command(job: Job, command: Sequence[str], hosts: Sequence[str], signals: Signals) -> List[str]:
    """Complete the command of the tasks with facts of the job, after its preparations."""
    container, scheduler = job.settings.container, job.settings.scheduler
    values = {HOSTS: ",".join(hosts)}
    if scheduler == LOCAL:  # no containers, and no other node
        return fill_in(command, values, job.directory)
    if job.settings.chain.restarts:  # by which it is found
        command = [*command[:1], "--job-name=" + os.environ.get("SLURM_JOB_NAME", ""), *command[1:]]
    count = str(len(hosts))
    on_each_node = [
        "srun",
        *(["--overlap"] if scheduler == ALLOCATION else []),
        *(["--nodelist=" + values[HOSTS]] if scheduler == ALLOCATION or job.settings.spares else []),
    ]
    on_each_node += ["--export=ALL", "--nodes=" + count, "--ntasks=" + count, "--ntasks-per-node=1"]
    on_each_node += job.settings.host_arguments
    if container is not None and container.is_file:
        from slipway.supervisor import images  # late: many jobs have no image file

        images.record_digest(job, container, signals)
        values[IMAGE] = container.image
        if container.name is not None:
            values[CONTAINER] = images.container_name(container)
            job.say(f"the container is called {values[CONTAINER]} on each node")
        if container.stage_to is not None:
            values[IMAGE] = images.stage(job, container, on_each_node, signals)
    if job.settings.vboost:
        slider = [*on_each_node, "sudo", "-n", "nvidia-smi", "boost-slider", "--vboost", "1"]
        if run_before(slider, signals):
            job.say("the GPUs' boost slider could not be set on every node", sys.stderr)
    return fill_in(command, values, job.directory)


def run_tasks(
    job: Job,
    limit: "TimeLimit",
    command: Sequence[str],
    signals: Signals,
    termination: "Termination",
    own_hooks: Sequence[hooks.Hook],
) -> int:
    """Run the tasks: one srun, or on this machine alone each by itself; return their exit code."""
    content = job.settings
    commands: List[Tuple[Sequence[str], Optional[Dict[str, str]]]] = [(command, None)]
    if content.scheduler == LOCAL:
        size = content.nodes * content.tasks_per_node  # all on this machine
        world = dict(os.environ, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        commands = [(command, dict(world, RANK=str(rank), LOCAL_RANK=str(rank))) for rank in range(size)]
        return _run(job, limit, commands, signals, termination, [])
    from slipway.supervisor.slurm import Slurm
    from slipway.supervisor.srun import Patience, begin_step

    step = begin_step(job)
    patience = Patience(step, Slurm(job).find_tasks_step)
    code = _run(job, limit, commands, signals, termination, [*own_hooks, patience.hook], patience.is_over)
    if patience.is_over():
        job.say("srun waited in vain for tasks that it had ended: it was killed")
    if code == 0 and step.has_never_run():
        job.say("srun exited with 0, but some tasks never started")
        return 1
    return code


def _run(
    job: Job,
    limit: "TimeLimit",
    commands: "Sequence[Tuple[Sequence[str], Optional[Dict[str, str]]]]",
    signals: Signals,
    termination: "Termination",
    own_hooks: Sequence[hooks.Hook],
    is_stuck: Callable[[], bool] = lambda: False,
) -> int:
    polling: Optional[hooks.Polling] = None

    def poll() -> Optional[float]:
        nonlocal polling
        seconds: List[Optional[float]] = [_POLL_AGAIN]
        with job.best_effort("a hook failed"):
            if polling is None:  # the tasks have started
                polling = hooks.Polling(job, signals, [*own_hooks, termination.hook, *_detectors(job)])
                gc.enable()
                marks.sync_mark(job.directory, job.attempt, marks.STARTED)
            # The end needs it: the archive may be gone by then.
            import slipway.common.node.evidence
            import slipway.common.node.judging  # noqa: F401

            seconds = [polling.poll(), limit.pause()]
            # A job that was signalled ends already, for its own reason.
            if polling.verdict and not termination.verdict and not signals.first:
                termination.begin(polling.verdict)
            seconds.append(termination.pause())
        return min((pause for pause in seconds if pause is not None), default=None)

    def end() -> Optional[int]:
        return signal.SIGKILL if is_stuck() else termination.signal()

    forward = map_signals(job.settings.scheduler, job.settings.save_signal)
    try:
        return run(commands, signals, forward, poll, end)
    except OSError as error:
        job.say(str(error), sys.stderr)
        return _NOT_FOUND
    finally:
        if polling:
            polling.stop()


def _detectors(job: Job) -> List[hooks.Hook]:
    """Return the hooks of the detectors; one that cannot begin, or returns no hook, is left out."""
    from slipway.supervisor.detectors import DETECTORS  # late: they import much

    found: List[hooks.Hook] = []
    for detector in DETECTORS:
        with job.best_effort("a detector could not begin"):
            hook = detector(job)
            if not isinstance(hook, hooks.Hook):
                raise TypeError(f"{detector.__name__} returned {hook!r}")
            found.append(hook)
    return found


def ask_slurm_for_loss(job: Job, slurm: "Slurm") -> int:
    """Return 1 if Slurm ends the job although srun exited 0, as after the loss of a node."""
    from slipway.common.node.slurm_states import is_ending

    state = slurm.squeue_state(slurm.job_id)
    ending = is_ending(state)
    if ending is None:
        says = f": squeue says {state}" if state else ""
        job.say(f"whether Slurm ended it could not be asked{says}")
    elif ending:
        job.say(f"Slurm is ending it ({state})")
    return int(bool(ending))
