"""The detectors: pure functions from a run's window to a reading, in one registry."""

from functools import partial
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

from slipway.watch.parameters import Parameters
from slipway.watch.series import Spikes
from slipway.watch.windows import JobState, Window

QUIET, FIRING, BLIND = "quiet", "firing", "blind"

_GIB = 1 << 30
# Seconds after which Slurm's answer is no moment between two states.
_PATIENCE = 180.0
# The fewest samples of free space that have a slope.
_SLOPE_SAMPLES = 6


class Reading(NamedTuple):
    """The result of a detector.

    Attributes
    ----------
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


def _make(
    state: str,
    why: str,
    values: Sequence[float] = (),
    step: Optional[int] = None,
    since: Optional[float] = None,
) -> Reading:
    return Reading("", state, why, step, since, tuple(values))


_quiet, _fire, _blind = partial(_make, QUIET), partial(_make, FIRING), partial(_make, BLIND)


class Detector(NamedTuple):
    """A row of the registry: its key in ``watch``, its function, and what it looks for in a sentence."""

    name: str
    look: Callable[[Window, Parameters], Reading]
    sentence: str

    def read(self, window: Window, parameters: Parameters) -> Reading:
        """Return the reading, with the newest step and the time of the first firing where it has no other."""
        reading = self.look(window, parameters)
        since = reading.since
        if since is None and reading.state == FIRING:
            since = window.since.get(self.name, window.now)
        step = window.pace.step if reading.step is None else reading.step
        return reading._replace(detector=self.name, step=step, since=since)


def read_all(window: Window, parameters: Parameters) -> List[Reading]:
    """Return the readings of the detectors that are not off; the window remembers which of them fire."""
    detectors = [each for each in DETECTORS if getattr(parameters, each.name).reaction != "off"]
    readings = [detector.read(window, parameters) for detector in detectors]
    window.since = {each.detector: each.since for each in readings if each.since is not None}
    return readings


# --- the loss and the gradient


def look_for_non_finite(window: Window, parameters: Parameters) -> Reading:
    """Look for a loss, or norms of the gradient in a row, that are not finite."""
    first, skipped = window.non_finite, window.skipped
    if first is not None:
        return _fire(f"the loss is {first.loss} at step {first.step:,}", (), first.step, first.time)
    if len(skipped) >= parameters.non_finite.skips:
        why = f"the norm of the gradient is not finite in {len(skipped):,} steps in a row"
        return _fire(why, (), skipped[0].step, skipped[0].time)
    if not window.loss.last:
        return _blind("no step has had a loss yet")
    return _quiet("loss and gradient are finite", window.loss.last)


def look_for_loss_spike(window: Window, parameters: Parameters) -> Reading:
    """Look for a rise of the loss."""
    return _look_for_spike("loss", window.loss)


def look_for_grad_norm_spike(window: Window, parameters: Parameters) -> Reading:
    """Look for a rise of the gradient's norm, which often comes before that of the loss."""
    return _look_for_spike("norm of the gradient", window.grad_norm)


def _look_for_spike(words: str, series: Spikes) -> Reading:
    last = series.last
    if series.since is not None:
        why = f"the {words} is up to {series.worst:.4g}, usually {series.usual:.4g}"
        return _fire(f"{why} ({series.score:.0f} sigmas)", last, series.since_step, series.since)
    if not last:
        return _blind(f"no step has had a {words} yet")
    if series.is_blind:
        return _blind(f"too few steps to know the usual {words}", last)
    return _quiet(f"the {words} is {last[-1]:.4g}, usually {series.usual:.4g}", last)


# --- the pace


def look_for_no_step(window: Window, parameters: Parameters) -> Reading:
    """Look for a training whose next step is overdue."""
    pace, job = window.pace, window.facts.job
    if pace.last_sign is None:
        return _blind("no event of the training has been read yet")
    due = pace.find_due(parameters.no_step, job.began if isinstance(job, JobState) else None)
    if due is None:
        return _quiet("the training has ended" if pace.end else "no step is expected yet")
    since, limit = due
    silence = window.now - since
    usual = f"usual: {say_duration(pace.interval)}" if pace.interval is not None else "no usual pace is known"
    if silence > limit:
        is_first = pace.train is None or since > pace.last_sign
        why = f"no {'first' if is_first else 'new'} step for {say_duration(silence)} ({usual})"
        return _fire(why, since=since)
    return _quiet(f"the last event is {say_duration(window.now - pace.last_sign)} old ({usual})")


def look_for_throughput(window: Window, parameters: Parameters) -> Reading:
    """Look for a throughput that has fallen for good."""
    speeds = window.speeds
    if speeds.is_blind:
        return _blind("too few steps to know the usual throughput", speeds.last)
    why = f"the last steps have {speeds.present / speeds.usual:.0%} of the usual throughput"
    return _quiet(why, speeds.last) if speeds.since is None else _fire(why, speeds.last, since=speeds.since)


def look_for_deadline(window: Window, parameters: Parameters) -> Reading:
    """Look for an expected end after the deadline."""
    at, seconds = parameters.deadline.at, window.pace.remaining
    if at is None:
        return _quiet("no deadline is set")
    if seconds is None:
        return _blind("the end is not known: too few steps, or no max_steps")
    late = window.now + seconds - at
    why = f"the training ends {say_duration(abs(late))} {'after' if late > 0 else 'before'} the deadline"
    # Once late, it has to be ahead by a fiftieth.
    ease = 0.02 * seconds if "deadline" in window.since else 0.0
    return _fire(why) if seconds > 0 and late + ease > 0 else _quiet(why)


# --- facts


def look_for_checkpoint(window: Window, parameters: Parameters) -> Reading:
    """Look for steps that no new checkpoint has followed."""
    newest, train = window.facts.checkpoint, window.pace.train
    if isinstance(newest, str):
        return _blind(newest)
    if train is None or window.pace.end is not None:
        return _quiet("no step is being trained")
    steps = sorted(window.checkpoints)
    gaps = sorted(steps[index] - steps[index - 1] for index in range(1, len(steps)))
    every = window.pace.schedule.save_every or (gaps[len(gaps) // 2] if len(gaps) > 1 else None)
    if every is None:
        return _blind("the save interval is not known, and there are fewer than three checkpoints")
    behind = train.step - newest
    why = f"the newest checkpoint is {behind:,} steps behind, one is due every {every:,}"
    return _fire(why, steps) if behind > parameters.checkpoint.factor * every else _quiet(why, steps)


def look_for_chain(window: Window, parameters: Parameters) -> Reading:
    """Look for a training that will not be done when its job ends, and has no next job to go on."""
    chain, seconds = window.facts.chain, window.pace.remaining
    if isinstance(chain, str):
        return _blind(chain)
    missing = None if chain.ends_at is None or seconds is None else window.now + seconds - chain.ends_at
    if seconds == 0 or (missing is not None and missing <= 0):
        return _quiet("the training ends in this job")
    link = f"link {chain.link:,} of {chain.links:,}"
    if chain.link < chain.links:
        if chain.has_successor is None:
            return _blind(f"{link}: nobody can say if the next one is in the queue")
        return _fire_if_lasting(window, "chain", f"{link} has no successor in the queue", f"{link} goes on")
    if missing is None:
        return _blind(f"{link} is the last, and its end or the training's is not known")
    return _fire(f"{link} is the last, and the training needs {say_duration(missing)} more than it has")


def look_for_job(window: Window, parameters: Parameters) -> Reading:
    """Look for a job that ended without its supervisor's word."""
    job = window.facts.job
    if isinstance(job, str):
        return _blind(job)
    state = "Slurm does not know the job" if job.state is None else f"Slurm says {job.state}"
    lost = f"{state}, and its supervisor left no mark of the end"
    return _fire_if_lasting(window, "job", lost, "the job has ended" if job.has_end_mark else state)


def _fire_if_lasting(window: Window, condition: str, why: str, why_quiet: str) -> Reading:
    began = window.conditions.get(condition)
    is_lasting = began is not None and window.now - began >= _PATIENCE
    return _fire(why, since=began) if is_lasting else _quiet(why_quiet)


def look_for_disk(window: Window, parameters: Parameters) -> Reading:
    """Look for a file system that is full, or will be soon by its present rate."""
    disk, limits, ease = window.facts.disk, parameters.disk, 1.5 if "disk" in window.since else 1.0
    if isinstance(disk, str):
        return _blind(disk)
    values = [free / _GIB for _, free in window.disk]
    why = f"{disk.free / _GIB:,.0f} GiB free"
    if disk.free < ease * limits.part * disk.total:
        return _fire(f"{why}, {disk.free / disk.total:.1%} of the file system", values)
    slope = find_slope(window.disk) if len(window.disk) >= _SLOPE_SAMPLES else 0.0
    if slope < 0 and disk.free / -slope < ease * limits.hours * 3600:
        return _fire(f"{why}, full in {say_duration(disk.free / -slope)} by the present rate", values)
    return _quiet(why, values)


def find_slope(points: Sequence[Tuple[float, float]]) -> float:
    """Return the median of the slopes between all pairs of points (Theil and Sen)."""
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in list(points)[index + 1 :]
    )
    return slopes[len(slopes) // 2]


def say_duration(seconds: float) -> str:
    """Return a time in its two largest units: ``1 m 40 s``."""
    for unit, name, less, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} {seconds % unit // less:.0f} {smaller}"
    return f"{seconds:.3g} s"


DETECTORS: Tuple[Detector, ...] = (
    Detector("non_finite", look_for_non_finite, "The loss or the norm of the gradient is not finite."),
    Detector("loss_spike", look_for_loss_spike, "The loss rises by more than chance."),
    Detector(
        "grad_norm_spike", look_for_grad_norm_spike, "The gradient's norm rises, often before the loss."
    ),
    Detector("no_step", look_for_no_step, "The next step is overdue."),
    Detector("throughput", look_for_throughput, "The throughput has fallen, and stays there."),
    Detector("checkpoint", look_for_checkpoint, "Checkpoints do not follow the steps."),
    Detector("chain", look_for_chain, "The training will not be done when its last job ends."),
    Detector("job", look_for_job, "The job is gone, and its supervisor did not say why."),
    Detector("disk", look_for_disk, "The disk of the results is full, or will be soon."),
    Detector("deadline", look_for_deadline, "The training will end after its deadline."),
)
