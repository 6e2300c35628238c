"""The detectors: pure functions from a run's window to a reading, in one registry."""

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

from slipway.common.node.events import Train
from slipway.watch.parameters import Parameters
from slipway.watch.series import Spikes
from slipway.watch.windows import Window

QUIET, FIRING, BLIND = "quiet", "firing", "blind"

_GIB = 1 << 30
# Seconds after which what Slurm says is no moment between two states.
_PATIENCE = 180.0
# The fewest samples of free space that have a slope.
_SLOPE_SAMPLES = 6


class Reading(NamedTuple):
    """The result of a detector.

    Attributes
    ----------
    detector
        Name in the registry.
    state
        ``quiet``, ``firing``, or ``blind``: it cannot see what it looks for.
    why
        A sentence without its full stop.
    step
        The step at which it began, else the newest.
    since
        Unix time since when it fires.
    values
        The newest values that it looked at, the last one last.
    """

    detector: str
    state: str
    why: str
    step: Optional[int] = None
    since: Optional[float] = None
    values: Tuple[float, ...] = ()


class Detector(NamedTuple):
    """A row of the registry.

    Attributes
    ----------
    name
        Its key in ``watch``.
    read
        Function of the window and all parameters.
    sentence
        What it looks for, for the documentation and for lists.
    """

    name: str
    read: Callable[[Window, Parameters], Reading]
    sentence: str


def read_all(window: Window, parameters: Parameters) -> List[Reading]:
    """Return the readings of the detectors that are not off; the window remembers which of them fire."""
    readings = [
        detector.read(window, parameters)
        for detector in DETECTORS
        if getattr(parameters, detector.name).reaction != "off"
    ]
    window.since = {each.detector: each.since for each in readings if each.since is not None}
    return readings


# --- the loss and the gradient


def read_non_finite(window: Window, parameters: Parameters) -> Reading:
    """Look for a loss, or norms of the gradient in a row, that are not finite."""
    name, first, skipped = "non_finite", window.non_finite, window.skipped
    if first is not None:
        return _fire(window, name, f"the loss is {first.loss} at step {first.step:,}", first)
    if len(skipped) >= parameters.non_finite.skips:
        why = f"the norm of the gradient is not finite in {len(skipped):,} steps in a row"
        return _fire(window, name, why, skipped[0])
    if not window.has_loss:
        return _blind(window, name, "no step has had a loss yet")
    return _quiet(window, name, "loss and gradient are finite", window.loss.last)


def read_loss_spike(window: Window, parameters: Parameters) -> Reading:
    """Look for a rise of the loss."""
    return _read_spike(window, "loss_spike", "loss", window.loss)


def read_grad_norm_spike(window: Window, parameters: Parameters) -> Reading:
    """Look for a rise of the gradient's norm, which often comes before that of the loss."""
    return _read_spike(window, "grad_norm_spike", "norm of the gradient", window.grad_norm)


def _read_spike(window: Window, name: str, words: str, series: Spikes) -> Reading:
    last = tuple(series.last)
    if series.since is not None:
        why = (
            f"the {words} is up to {series.worst:.4g}, usually {series.usual:.4g} ({series.score:.0f} sigmas)"
        )
        return Reading(name, FIRING, why, series.since_step, series.since, last)
    if not last:
        return _blind(window, name, f"no step has had a {words} yet")
    if series.is_blind:
        return _blind(window, name, f"too few steps to know the usual {words}", last)
    return _quiet(window, name, f"the {words} is {last[-1]:.4g}, usually {series.usual:.4g}", last)


# --- the pace


def read_no_step(window: Window, parameters: Parameters) -> Reading:
    """Look for a training whose next step is overdue."""
    name, pace = "no_step", window.pace
    if pace.last_sign is None:
        return _blind(window, name, "no event of the training has been read yet")
    if pace.has_ended:
        return _quiet(window, name, "the training has ended")
    limit, silence = pace.find_limit(parameters.no_step), window.now - pace.last_sign
    usual = f"usual: {say_duration(pace.interval)}" if pace.interval is not None else "no usual pace is known"
    if limit is not None and silence > limit:
        step = "new step" if pace.train else "first step"
        why = f"no {step} for {say_duration(silence)} ({usual})"
        return Reading(name, FIRING, why, _newest_step(window), pace.last_sign)
    return _quiet(window, name, f"the last event is {say_duration(silence)} old ({usual})")


def read_throughput(window: Window, parameters: Parameters) -> Reading:
    """Look for a throughput that has fallen for good."""
    name, speeds = "throughput", window.speeds
    values = speeds.last
    if speeds.is_blind:
        return _blind(window, name, "too few steps to know the usual throughput", values)
    part = f"{speeds.present / speeds.usual:.0%} of the usual throughput"
    if speeds.since is not None:
        return Reading(
            name, FIRING, f"the last steps have {part}", _newest_step(window), speeds.since, tuple(values)
        )
    return _quiet(window, name, f"the last steps have {part}", values)


def read_deadline(window: Window, parameters: Parameters) -> Reading:
    """Look for an expected end after the deadline."""
    name, at = "deadline", parameters.deadline.at
    if at is None:
        return _quiet(window, name, "no deadline is set")
    if window.pace.has_ended:
        return _quiet(window, name, "the training has ended")
    seconds = _find_remaining(window)
    if seconds is None:
        return _blind(window, name, "the end is not known: too few steps, or no max_steps")
    late = window.now + seconds - at
    why = f"the training ends {say_duration(abs(late))} {'after' if late > 0 else 'before'} the deadline"
    # Once late, it has to be ahead by a fiftieth.
    if late + (0.02 * seconds if name in window.since else 0.0) > 0:
        return _fire(window, name, why)
    return _quiet(window, name, why)


# --- facts


def read_checkpoint(window: Window, parameters: Parameters) -> Reading:
    """Look for steps that no new checkpoint has followed."""
    name, newest, train = "checkpoint", window.facts.checkpoint, window.pace.train
    if isinstance(newest, str):
        return _blind(window, name, newest)
    if train is None or window.pace.has_ended:
        return _quiet(window, name, "no step has been trained since the start")
    steps = sorted(window.checkpoints)
    gaps = sorted(after - before for before, after in zip(steps, steps[1:]))
    every = window.pace.schedule.save_every or (gaps[len(gaps) // 2] if len(gaps) > 1 else None)
    if every is None:
        return _blind(window, name, "neither the save interval nor two checkpoints' distance is known")
    behind = train.step - newest
    why = f"the newest checkpoint is {behind:,} steps behind, one is due every {every:,}"
    if behind > parameters.checkpoint.factor * every:
        return _fire(window, name, why, values=steps)
    return _quiet(window, name, why, steps)


def read_chain(window: Window, parameters: Parameters) -> Reading:
    """Look for a training that will go on after its job, and has no next job to do so."""
    name, chain, pace = "chain", window.facts.chain, window.pace
    if isinstance(chain, str):
        return _blind(window, name, chain)
    if pace.has_ended:
        return _quiet(window, name, "the training has ended")
    seconds = _find_remaining(window)
    missing = None
    if chain.ends_at is not None and seconds is not None:
        missing = window.now + seconds - chain.ends_at
    if missing is not None and missing <= 0:
        return _quiet(window, name, "the training ends in this job")
    link = f"link {chain.link:,} of {chain.links:,}"
    if chain.link < chain.links:
        if chain.has_successor is None:
            return _blind(window, name, f"{link}: nobody can say if the next one is in the queue")
        began = window.conditions.get(name)
        if began is not None and window.now - began >= _PATIENCE:
            return _fire(window, name, f"{link} has no successor in the queue", began=began)
        return _quiet(window, name, f"{link} has a successor")
    if missing is None:
        return _blind(window, name, f"{link} is the last, and its end or the training's is not known")
    why = f"{link} is the last, and the training needs {say_duration(missing)} more than it has"
    return _fire(window, name, why)


def read_job(window: Window, parameters: Parameters) -> Reading:
    """Look for a job that ended without its supervisor's word."""
    name, job = "job", window.facts.job
    if isinstance(job, str):
        return _blind(window, name, job)
    began = window.conditions.get(name)
    if began is not None and window.now - began >= _PATIENCE:
        state = "Slurm does not know the job" if job.state is None else f"Slurm says {job.state}"
        return _fire(window, name, f"{state}, and its supervisor left no mark of the end", began=began)
    return _quiet(window, name, "the job has ended" if job.has_end_mark else f"Slurm says {job.state}")


def read_disk(window: Window, parameters: Parameters) -> Reading:
    """Look for a file system that is full, or will be soon by its present rate."""
    name, disk = "disk", window.facts.disk
    if isinstance(disk, str):
        return _blind(window, name, disk)
    limits, ease = parameters.disk, 1.5 if name in window.since else 1.0
    values = [free / _GIB for _, free in window.disk]
    free = f"{disk.free / _GIB:,.0f} GiB free"
    if disk.free < ease * limits.part * disk.total:
        return _fire(window, name, f"{free}, {disk.free / disk.total:.1%} of the file system", values=values)
    slope = find_slope(window.disk) if len(window.disk) >= _SLOPE_SAMPLES else 0.0
    if slope < 0 and disk.free / -slope < ease * limits.hours * 3600:
        why = f"{free}, full in {say_duration(disk.free / -slope)} by the present rate"
        return _fire(window, name, why, values=values)
    return _quiet(window, name, free, values)


def find_slope(points: Sequence[Tuple[float, float]]) -> float:
    """Return the median of the slopes between all pairs of points (Theil and Sen)."""
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in list(points)[index + 1 :]
    )
    return slopes[len(slopes) // 2]


# --- readings


def _fire(
    window: Window,
    name: str,
    why: str,
    first: Optional[Train] = None,
    began: Optional[float] = None,
    values: Sequence[float] = (),
) -> Reading:
    """Return a reading that fires since the first step, since `began`, or since it fired first."""
    since = began if first is None else first.time
    step = first.step if first else _newest_step(window)
    return Reading(
        name, FIRING, why, step, window.since.get(name, window.now) if since is None else since, tuple(values)
    )


def _quiet(window: Window, name: str, why: str, values: Sequence[float] = ()) -> Reading:
    return Reading(name, QUIET, why, _newest_step(window), None, tuple(values))


def _blind(window: Window, name: str, why: str, values: Sequence[float] = ()) -> Reading:
    return Reading(name, BLIND, why, _newest_step(window), None, tuple(values))


def _newest_step(window: Window) -> Optional[int]:
    pace = window.pace
    newest = pace.train or pace.start
    return newest.step if newest else None


def _find_remaining(window: Window) -> Optional[float]:
    """Return the seconds that the remaining steps will take."""
    start, train, rate = window.pace.start, window.pace.train, window.pace.steps_per_second
    if start is None or start.max_steps is None or train is None or rate is None:
        return None
    return max(start.max_steps - train.step, 0) / rate


def say_duration(seconds: float) -> str:
    """Return a time in its two largest units: ``1 m 40 s``."""
    for unit, name, less, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} {seconds % unit // less:.0f} {smaller}"
    return f"{seconds:.3g} s"


DETECTORS: Tuple[Detector, ...] = (
    Detector("non_finite", read_non_finite, "The loss or the norm of the gradient is not finite."),
    Detector("loss_spike", read_loss_spike, "The loss rises by more than chance, and does not come back."),
    Detector("grad_norm_spike", read_grad_norm_spike, "The gradient's norm rises, often before the loss."),
    Detector("no_step", read_no_step, "The next step is overdue."),
    Detector("throughput", read_throughput, "The throughput has fallen, and stays there."),
    Detector("checkpoint", read_checkpoint, "Checkpoints do not follow the steps."),
    Detector("chain", read_chain, "The training will not be done when its last job ends."),
    Detector("job", read_job, "The job is gone, and its supervisor did not say why."),
    Detector("disk", read_disk, "The disk of the results is full, or will be soon."),
    Detector("deadline", read_deadline, "The training will end after its deadline."),
)
