"""The table of faults: the effect of each on a run, and the launches that its user has to repeat."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak import zygote
from benchmarks.soak.cluster import NotPossible
from benchmarks.soak.trial import EVERY, SILENCE, STEPS, Trial
from slipway.trainer.checkpoint import store
from tests.trainer.damages import damage

# The right alerts of a chain that stopped, by their detectors: its own alert, or that of the marks it left.
STOPPED = (("ended",), ("job",))
# More than a launch makes.
_CALLS = 130


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes
    ----------
    relaunches
        How often the user may have to launch the run again.
    alone
        Whether it breaks the whole cluster, so that it has one of its own.
    alerts
        The right alerts, by their detectors, if the chain heals; if it stops, it is one of `STOPPED`.
    """

    strike: Callable[[Trial], None]
    relaunches: int = 0
    alone: bool = False
    alerts: tuple[tuple[str, ...], ...] = ((),)


def leave_undisturbed(trial: Trial) -> None:
    """Let the run go through undisturbed: the others are compared with it."""
    trial.launch()


def launcher_killed(trial: Trial) -> None:
    """Kill the launcher with SIGKILL before one of its calls with an effect; the user launches again."""
    number = trial.chance.randint(1, _CALLS)
    result = trial.launch(fatal_call=number)
    trial.note(
        f"launcher killed before call {number}" if result.code < 0 else f"it had fewer than {number} calls"
    )
    time.sleep(trial.chance.choice((0, 0.2, 1)))
    if result.code < 0:
        trial.launch()


def keeper_killed(trial: Trial) -> None:
    """Kill with SIGKILL the process that keeps the job on its batch host."""
    job = trial.moment()
    trial.kill(trial.cluster.keeper(job), "the keeper")


def srun_killed(trial: Trial) -> None:
    """Kill the srun of the tasks with SIGKILL."""
    job = trial.moment()
    trial.kill(trial.cluster.srun(job), "srun")


def rank_killed(trial: Trial) -> None:
    """Kill a rank with SIGKILL."""
    trial.moment()
    trial.kill_a_rank()


def tasks_restarted(trial: Trial) -> None:
    """Kill a rank or the srun of the tasks with SIGKILL, where the tasks may start again inside the job."""
    _strike_restarting(trial)


def restart_broken(trial: Trial) -> None:
    """Kill a rank or srun, and then the supervisor while it prepares to start the tasks again."""
    job = _strike_restarting(trial)
    time.sleep(trial.chance.uniform(0, 3))
    trial.right_alerts = ((), ("restarted",))
    trial.kill(trial.cluster.keeper(job), "the supervisor")


def rank_stopped(trial: Trial) -> None:
    """Stop a rank with SIGSTOP for good, where the tasks start again after a hang."""
    trial.overrides += ["resilience.restarts=2", "watch.no_step.reaction=restart"]
    trial.hold(trial.chance.randrange(5, STEPS))
    trial.launch()
    trial.wait_until_held()
    os.kill(trial.chance.choice(sorted(pid for _, pid in trial.ranks())), signal.SIGSTOP)
    trial.release()


def _strike_restarting(trial: Trial) -> str:
    trial.overrides.append("resilience.restarts=2")
    job = trial.moment()
    if trial.chance.random() < 0.3:
        trial.kill(trial.cluster.srun(job), "srun")
    else:
        trial.kill_a_rank()
    trial.release()
    trial.right_alerts = (("restarted",),) if trial.notes[-1].startswith("killed") else ((),)
    return job


def time_limit(trial: Trial) -> None:
    """Reach the time limit: the training saves at the signal, or ignores it."""
    trial.hold(trial.chance.randrange(STEPS), deaf=trial.chance.random() < 0.3)
    trial.overrides.append("watch.no_step.reaction=off")  # held for so long, it would be a hang
    trial.launch()
    job = trial.wait_until_held()
    # Slurm looks every 30 seconds.
    trial.cluster.slurm("scontrol", "update", f"JobId={job}", "EndTime=now+45")
    trial.until_gone(job)


def preempted(trial: Trial) -> None:
    """Preempt the job by one of a higher partition."""
    job = trial.moment(deaf=trial.chance.random() < 0.3)
    nodes = trial.nodes_of(job)
    if not nodes:
        return trial.note("it was gone")
    rival = trial.cluster.slurm(
        "sbatch", "--parsable", "--output=/dev/null", "--partition=high", f"--nodelist={nodes[0]}",
        "--exclusive", "--wrap=exec sleep 600",
    )  # fmt: skip
    trial.until_gone(job)
    trial.cluster.slurm("scancel", rival.strip())
    return None


def requeued(trial: Trial) -> None:
    """Requeue the running job with `scontrol requeue`, as an administrator does."""
    job = trial.moment()
    try:
        trial.cluster.slurm("scontrol", "update", f"JobId={job}", "Requeue=1")  # which we submit it without
        trial.cluster.slurm("scontrol", "requeue", job)
        trial.note("requeued")
    except RuntimeError as error:
        trial.note(f"requeue: {error}")


def node_down(trial: Trial) -> None:
    """Cut a node's power, and boot it again."""
    _power_cut(trial)
    time.sleep(trial.chance.choice((0, 2, 8, 20)))
    revive_nodes(trial)


def node_gone(trial: Trial) -> None:
    """Cut a node's power for good."""
    _power_cut(trial)


def _power_cut(trial: Trial) -> None:
    job = trial.moment()
    nodes = trial.nodes_of(job)
    if not nodes:
        return trial.note("it was gone")
    node = trial.chance.choice(nodes)
    trial.down.append(node)
    trial.cluster.kill_node(node)
    return trial.note(f"{node} of {','.join(nodes)} lost power")


def revive_nodes(trial: Trial) -> None:
    """Boot the nodes of a run that are down."""
    while trial.down:
        trial.cluster.revive_node(trial.down.pop())


def controller_stopped(trial: Trial) -> None:
    """Freeze slurmctld for a while, in which the link may end."""
    trial.moment()
    seconds = trial.chance.uniform(1, 12)
    trial.note(f"slurmctld stopped for {seconds:.1f} s")
    os.kill(trial.cluster.controller.pid, signal.SIGSTOP)
    try:
        _meanwhile(trial, seconds)
    finally:
        os.kill(trial.cluster.controller.pid, signal.SIGCONT)


def controller_restarted(trial: Trial) -> None:
    """Stop or kill slurmctld, and start it again a while later."""
    trial.moment()
    seconds = trial.chance.uniform(0, 8)
    stop_signal = trial.chance.choice((signal.SIGTERM, signal.SIGKILL))
    trial.note(f"slurmctld down for {seconds:.1f} s after {stop_signal.name}")
    before = trial.jobs_at_last()
    trial.cluster.kill_controller(stop_signal)
    try:
        _meanwhile(trial, seconds)
    finally:
        trial.cluster.start_controller()
    # It saves its state every few seconds; what it learned since is lost by a SIGKILL.
    after = {job.id: job for job in trial.jobs_at_last()}
    if lost_jobs := [
        job for job in before if job.id not in after or after[job.id].state == "PENDING" != job.state
    ]:
        trial.is_forgotten = stop_signal == signal.SIGKILL
        trial.note(f"it lost {', '.join(f'{job.id} ({job.state})' for job in lost_jobs)}")


def controller_forgot(trial: Trial) -> None:
    """Start slurmctld again without its state: it knows no job."""
    trial.moment()
    trial.cluster.kill_controller()
    trial.cluster.start_controller(forgetful=True)
    trial.is_forgotten = True
    trial.note("slurmctld forgot everything")


def _meanwhile(trial: Trial, seconds: float) -> None:
    """Let a rank die, or the training go on, while nobody answers."""
    if trial.chance.random() < 0.5:
        trial.kill_a_rank()
    trial.release()
    time.sleep(seconds)


def disk_full(trial: Trial) -> None:
    """Fill the file system of the run, all at once or but for its last hundredth first, and free it later."""
    disks = trial.cluster.directory.parent / "disks"
    disk = disks / str(trial.seed % max(1, len(list(disks.glob("*")))))
    if not disk.is_mount():
        raise NotPossible("no file system could be mounted")
    trial.results = disk
    trial.overrides.append("watch.no_step.reaction=off")  # it is held until the disk is full
    # Nothing can be written on a disk that is full before anybody looks.
    is_gradual = trial.chance.random() < 0.5
    trial.right_alerts = (("disk",),) if is_gradual else ((), ("disk",))
    trial.moment(earliest=int(is_gradual))
    filler, total = disk / f"filler-{trial.seed}", shutil.disk_usage(disk).total
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while not is_gradual or shutil.disk_usage(disk).free > total // 100:
            file.write(bytes(1 << 16))
    if is_gradual:
        trial.note("a hundredth was left")
        with suppress(TimeoutError):
            trial.cluster.until("an alert is open", trial.alerts, 10)
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(b"0"):
            pass
    seconds = trial.chance.uniform(1, 10)
    trial.note(f"full for {seconds:.1f} s")
    trial.release()
    time.sleep(seconds)
    filler.unlink()


def torn_checkpoint(trial: Trial) -> None:
    """Damage the newest checkpoint, and kill a rank."""
    trial.moment(earliest=2 * EVERY + 2)
    checkpoints = store.list_complete(trial.checkpoints)
    if len(checkpoints) > 1:  # on a busy machine, the second may still be written
        newest = checkpoints[-1]
        trial.torn.add(newest.marker.step)
        description = damage(newest.path, checkpoints[0].path, trial.chance)
        trial.note(f"step {newest.marker.step}: {description}")
    trial.kill_a_rank()


def two_launches(trial: Trial) -> None:
    """Launch the run on two hosts at once."""
    commands = []
    for host in ("login1", "login2"):
        environment = {"SLIPWAY_CACHE_DIR": str(trial.cluster.directory / f"cache-{host}")}
        commands.append(trial.cluster.order(*trial.words, host=host, environment=environment))
        time.sleep(trial.chance.choice((0, 0, 0.1, 0.5)))
    for connection, out, err in commands:
        *_, code = zygote.answers(connection)
        connection.close()
        trial.launches += code == 0
        trial.note(
            f"exit code {code}{': ' + err.read_text().splitlines()[0] if code and err.stat().st_size else ''}"
        )
        for path in (out, err):
            Path(path).unlink()


def clock_off(trial: Trial) -> None:
    """Set the clock of a node off by an hour, for all processes of the job there, and kill a rank."""
    if not (trial.cluster.directory.parent / "clock.so").exists():
        raise NotPossible("no compiler for a clock that is off")
    node, seconds = trial.chance.choice(trial.nodes[:2]), trial.chance.choice((-3600, 3600))
    trial.note(f"the clock of {node} is off by {seconds} s")
    trial.cluster.set_clock(node, seconds)
    trial.moment()
    trial.kill_a_rank()


def rank_hangs(trial: Trial) -> None:
    """Stop a rank with SIGSTOP until there is an alert, or the time for one is over, and let it go on."""
    trial.hold(trial.chance.randrange(5, STEPS))
    trial.launch()
    trial.wait_until_held()
    pid = trial.chance.choice(sorted(pid for _, pid in trial.ranks()))
    os.kill(pid, signal.SIGSTOP)
    trial.release()
    start = time.monotonic()
    with suppress(TimeoutError):
        trial.cluster.until("an alert is open", trial.alerts, 4 * SILENCE)
    os.kill(pid, signal.SIGCONT)
    trial.note(f"stopped for {time.monotonic() - start:.0f} s")


def waited_long(trial: Trial) -> None:
    """Kill a rank, and let the next link wait in the queue, and load, for longer than a step may take."""
    trial.hold(trial.chance.randrange(5, STEPS))
    trial.launch()
    job = trial.wait_until_held()
    (successor,) = (entry.id for entry in trial.live_jobs(fresh=2) if entry.id != job)
    trial.cluster.slurm("scontrol", "hold", successor)
    trial.order("load", 8)
    trial.kill_a_rank()
    trial.until_gone(job)
    time.sleep(SILENCE + 2)
    trial.cluster.slurm("scontrol", "release", successor)
    trial.cluster.until("the next link runs", trial.ranks)
    time.sleep(8)


def last_link_killed(trial: Trial) -> None:
    """Kill the supervisor of the last link with SIGKILL; the user launches again."""
    trial.overrides.append("resilience.links=1")
    trial.hold(trial.chance.randrange(STEPS - 3))  # it ends a step or two later
    trial.launch()
    trial.kill(trial.cluster.keeper(trial.wait_until_held()), "the supervisor")
    trial.until_over()


def crash_loop(trial: Trial) -> None:
    """Let every link fail at the same step, until the chain gives up; then launch a mended one."""
    trial.order("crash", trial.chance.randrange(STEPS))
    trial.launch()
    trial.until_over()


def diverged(trial: Trial) -> None:
    """Let the weights become NaN; the user corrects the cause and launches again."""
    trial.order("diverge", trial.chance.randrange(STEPS))
    trial.launch()
    trial.until_over()


FAULTS: dict[str, Fault] = {
    # The longest faults come first.
    "time_limit": Fault(time_limit),
    "controller_forgot": Fault(controller_forgot, relaunches=1, alone=True),
    "node_down": Fault(node_down),
    "node_gone": Fault(node_gone),
    "controller_stopped": Fault(controller_stopped, alone=True),
    "controller_restarted": Fault(controller_restarted, alone=True),
    "preempted": Fault(preempted),
    "disk_full": Fault(disk_full, relaunches=2),
    "requeued": Fault(requeued),
    "clock_off": Fault(clock_off),
    "torn_checkpoint": Fault(torn_checkpoint),
    "keeper_killed": Fault(keeper_killed),
    "srun_killed": Fault(srun_killed),
    "rank_killed": Fault(rank_killed),
    "tasks_restarted": Fault(tasks_restarted),
    "restart_broken": Fault(restart_broken),
    "rank_stopped": Fault(rank_stopped, alerts=(("no_step", "restarted"),)),
    "launcher_killed": Fault(launcher_killed, relaunches=1),
    "two_launches": Fault(two_launches),
    "waited_long": Fault(waited_long),
    "last_link_killed": Fault(last_link_killed, relaunches=1),
    "rank_hangs": Fault(rank_hangs, alerts=(("no_step",),)),
    "crash_loop": Fault(crash_loop, relaunches=1),
    "diverged": Fault(diverged, relaunches=1),
}
