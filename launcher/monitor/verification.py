"""The checks of `slipway verify`, which decide if a run did its work: pure functions of the evidence.

The verdict of a check is ``ok``, ``failed`` or ``cannot tell``, or a dash if it does not apply.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from launcher import errors
from launcher.monitor.curves import finite_points
from launcher.monitor.evidence import Evidence
from launcher.slurm.states import State
from launcher.ui import tables

_SHOWN = 5


class RunVerdict(enum.Enum):
    """The verdict of a check."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "cannot tell"
    NOT_APPLICABLE = "-"


@dataclass(frozen=True, slots=True)
class RunCheck:
    """A check with its verdict and the evidence for it."""

    name: str
    verdict: RunVerdict
    evidence: str


def verify(seen: Evidence) -> list[RunCheck]:
    """Run all checks of a run's stage."""
    return [check(seen) for check in _BY_STAGE.get(seen.stage, _WRITING)]


def verify_smoke(seen: Evidence) -> list[RunCheck]:
    """Run the checks of a smoke test, a training of two steps."""
    return [check(seen) for check in _SMOKE]


def exit_code(seen: Evidence, checks: Iterable[RunCheck]) -> int:
    """Return the exit code of a verification; `launcher.errors` has them all."""
    verdicts = {check.verdict for check in checks}
    if seen.status.state.is_live:
        return errors.UNDER_WAY
    if RunVerdict.FAILED in verdicts:
        return errors.WENT_WRONG
    return errors.NOT_KNOWN if RunVerdict.UNKNOWN in verdicts else errors.DONE


def ended(seen: Evidence) -> RunCheck:
    """Check that the job completed, with exit code 0."""
    status = seen.status
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    reason = f" ({status.reason})" if status.reason else ""
    end = f"job {seen.job} {status.state.value}{reason}{code if code[2:] not in reason else ''}"
    if status.state is State.COMPLETED:
        return RunCheck("ended well", RunVerdict.FAILED if status.exit_code else RunVerdict.OK, end)
    return RunCheck("ended well", RunVerdict.FAILED if seen.is_over else RunVerdict.UNKNOWN, end)


def last_step(seen: Evidence) -> RunCheck:
    """Check that the training reached its last step; one that a limit or a signal stopped earlier fails."""
    step = f"step {tables.steps(seen.step, seen.max_steps)}"
    if seen.step is None:
        # Our trainer records every step: without a record there was none.
        verdict = _failed_if_over(seen) if seen.records_each_step else None
        return _check("last step", verdict, "the trainer recorded no step")
    if seen.max_steps is None:
        return _check("last step", None, f"{step}: the requested number of steps is unknown")
    if seen.step >= seen.max_steps:
        return _check("last step", True, step)
    why = f": stopped by {seen.end}" if seen.end and seen.end not in ("max_steps", "stop_after") else ""
    if not seen.is_over:
        return _check("last step", None, f"{step} so far")
    return _check("last step", False, step + why)


def finite(seen: Evidence) -> RunCheck:
    """Check that every loss is a finite number."""
    curves = seen.curves
    train = array("q", _not_finite(curves.steps, curves.losses))
    held_out = array("q", _not_finite(curves.validation.steps, curves.validation.columns[0]))
    wrong = [
        f"{name} of step{'s' * (len(steps) > 1)} {_listed(steps)}"
        for name, steps in (("training loss", train), ("held-out loss", held_out))
        if steps
    ]
    if seen.diverged:
        return _check("losses finite", False, seen.diverged)
    if wrong:
        return _check("losses finite", False, f"not a finite number: {' and '.join(wrong)}")
    if not curves.train:
        return _check("losses finite", None, "the trainer recorded no loss")
    points, validations = len(curves.train), len(curves.validation)
    return _check("losses finite", True, f"{points:,} of training, {validations:,} held-out")


def falling(seen: Evidence) -> RunCheck:
    """Check that the loss falls over all launches of the run; see `launcher.monitor.verification`.

    Of at least two held-out losses the last must be below the first; this alone decides as long as the
    training loss does not rise. Without held-out losses the training loss must fall.
    """
    _, losses = finite_points(seen.curves.steps, seen.curves.losses)
    _, held_out = finite_points(seen.curves.validation.steps, seen.curves.validation.columns[0])
    training, evidence, verdict = measure_trend(losses), [], None
    if training is not None:
        medians = f"{tables.loss(training.first)} → {tables.loss(training.last)}"
        evidence.append(f"training {medians}, {training.trend.value} (noise {training.margin:.4f})")
        verdict = training.trend is Trend.FALLS
    else:
        evidence.append(f"training: {len(losses)} steps, and at least {FEWEST_STEPS} are needed")
    if len(held_out) > 1:
        falls = held_out[-1] < held_out[0]
        evidence.append(f"held-out {tables.loss(held_out[0])} → {tables.loss(held_out[-1])}")
        verdict = falls and not (training and training.trend is Trend.RISES)
    return _check("loss falling", verdict, "; ".join(evidence))


def complete(seen: Evidence) -> RunCheck:
    """Check that no step is missing, not even between one launch and the next."""
    steps = seen.curves.steps
    if not seen.records_each_step:
        evidence = "this trainer does not record every step"
        return RunCheck("no step missing", RunVerdict.NOT_APPLICABLE, evidence)
    if not steps:
        return _check("no step missing", None, "the trainer recorded no step")
    # Steps before the first known launch are not of this run.
    before = seen.curves.first_step
    gaps = [
        (low + 1, high - 1)
        for low, high in itertools.pairwise(itertools.chain([before], steps))
        if high > low + 1
    ]
    if gaps:
        return _check("no step missing", False, f"no record of {_listed(map(_span, gaps))}")
    # The last ones are missing as well, if the trainer ended at a later step than the last recorded one.
    if seen.step is not None and seen.step > steps[-1]:
        return _check("no step missing", False, f"no record of {_span((steps[-1] + 1, seen.step))}")
    return _check("no step missing", True, _span((before + 1, steps[-1])))


def no_error(seen: Evidence) -> RunCheck:
    """Check that no rank reported an error, nor a library or Slurm."""
    if seen.errors is None:
        return _check("no error of a rank", None, "the job has no log")
    if seen.errors:
        more = f"; and {len(seen.errors) - 1} more" if len(seen.errors) > 1 else ""
        return _check("no error of a rank", False, f"{seen.errors[0]}{more}")
    return _check("no error of a rank", True, f"none in the logs of {_ranks(seen.ranks)}")


def all_ranks(seen: Evidence) -> RunCheck:
    """Check that every rank recorded its end."""
    name = "every rank ended"
    if seen.ended_ranks is None:
        return RunCheck(name, RunVerdict.NOT_APPLICABLE, "this trainer's ranks do not record their ends")
    missing = sorted(set(range(seen.ranks)) - seen.ended_ranks)
    if missing:
        ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {_listed(missing)} of {seen.ranks}"
        evidence = (
            f"no record of {ranks}" if seen.ended_ranks else f"no record of any of {_ranks(seen.ranks)}"
        )
        return _check(name, _failed_if_over(seen), evidence)
    return _check(name, True, f"records of {_ranks(seen.ranks)}")


def saved(seen: Evidence) -> RunCheck:
    """Check that a complete checkpoint of the last step exists."""
    name, checkpoint = "last step saved", seen.saved
    if checkpoint is None:
        return RunCheck(name, RunVerdict.NOT_APPLICABLE, "the configuration writes no checkpoints")
    target = seen.max_steps if seen.max_steps is not None else seen.step
    if target is not None and checkpoint.step is not None and checkpoint.step >= target:
        return _check(name, True, str(checkpoint.name))
    newest = "no complete checkpoint"
    if checkpoint.step is not None:
        newest = f"the newest complete checkpoint is of step {checkpoint.step},"
    wrong = f"; {checkpoint.wrong}" if checkpoint.wrong else ""
    verdict = None if target is None else _failed_if_over(seen)
    return _check(name, verdict, f"{newest} in {checkpoint.directory}{wrong}")


def outputs(seen: Evidence) -> RunCheck:
    """Check that the output files exist and are not empty."""
    if seen.outputs is None:
        return _check("outputs exist", None, "the configuration does not name the output files")
    if not seen.outputs:
        evidence = "the merge that follows writes the files"
        return RunCheck("outputs exist", RunVerdict.NOT_APPLICABLE, evidence)
    if seen.missing_outputs:
        evidence = f"missing or empty: {_listed(seen.missing_outputs)}"
        return _check("outputs exist", _failed_if_over(seen), evidence)
    return _check("outputs exist", True, _listed(seen.outputs))


_TRAINING: tuple[Callable[[Evidence], RunCheck], ...] = (
    ended, last_step, finite, falling, complete, no_error, all_ranks, saved,
)  # fmt: skip
_WRITING = (ended, outputs, no_error)
_BY_STAGE = {"training": _TRAINING, "command": (ended, no_error)}  # what a command writes is the site's
_SMOKE = (ended, last_step, finite, no_error)


def _failed_if_over(seen: Evidence) -> bool | None:
    """Return the verdict about something missing: failed if the job is over, else unknown."""
    return False if seen.is_over else None


def _check(name: str, verdict: bool | None, evidence: str) -> RunCheck:
    verdicts = {True: RunVerdict.OK, False: RunVerdict.FAILED, None: RunVerdict.UNKNOWN}
    return RunCheck(name, verdicts[verdict], evidence)


def _not_finite(steps: Iterable[int], losses: Iterable[float]) -> Iterator[int]:
    return (step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss))


def _listed(items: Iterable[object]) -> str:
    rest = iter(items)
    words = [str(item) for item in itertools.islice(rest, _SHOWN)]
    left = sum(1 for _ in rest)
    return ", ".join(words) + (f", and {left} more" if left else "")


def _span(ends: tuple[int, int]) -> str:
    first, last = ends
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"


# --- the trend of a loss

# With fewer steps a tenth of them is a single one.
FEWEST_STEPS = 20
_STANDARD_ERRORS = 3.0
_SIGMA_OF_MAD = 1.4826
_ERROR_OF_MEDIAN = 1.2533
# Of more values than `_SORTED` only those near the median are sorted, as a sample of `_SAMPLE` estimates it.
_SORTED, _SAMPLE = 100_000, 1000


class Trend(enum.Enum):
    """The direction of a curve."""

    FALLS = "falls"
    RISES = "rises"
    FLAT = "within its noise"


@dataclass(frozen=True, slots=True)
class LossTrend:
    """A trend, and the two medians that it follows from; `margin` is the least significant difference."""

    trend: Trend
    first: float
    last: float
    margin: float


def measure_trend(losses: Sequence[float]) -> LossTrend | None:
    """Return the trend of a curve of finite losses; ``None`` if they are too few."""
    count = len(losses) // 10
    if len(losses) < FEWEST_STEPS:
        return None
    first, last = median(losses[:count]), median(losses[-count:])
    differences = array("d", (abs(after - before) for before, after in itertools.pairwise(losses)))
    sigma = _SIGMA_OF_MAD * median(differences) / math.sqrt(2)
    margin = _STANDARD_ERRORS * _ERROR_OF_MEDIAN * sigma * math.sqrt(2 / count)
    return LossTrend(_trend(last - first, margin), first, last, margin)


def median(values: Sequence[float]) -> float:
    """Return the median of finite values without sorting all of many, which would copy all of them.

    A sample bounds the median (Floyd and Rivest 1975, "Expected time bounds for selection"); only the values
    between the bounds are sorted.
    """
    size = len(values)
    if size <= _SORTED:
        return statistics.median(values)
    sample = sorted(values[:: size // _SAMPLE])
    low, high = sample[len(sample) * 2 // 5], sample[len(sample) * 3 // 5]
    below = sum(1 for value in values if value < low)
    between = sorted(value for value in values if low <= value <= high)
    middle = (size - 1) // 2 - below, size // 2 - below
    if middle[0] < 0 or middle[1] >= len(between):
        return statistics.median(values)
    return between[middle[0]] if size % 2 else (between[middle[0]] + between[middle[1]]) / 2


def _trend(change: float, margin: float) -> Trend:
    if abs(change) <= margin:
        return Trend.FLAT
    return Trend.RISES if change > 0 else Trend.FALLS
