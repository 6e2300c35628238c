"""The checks of `slipway verify`, which decide if a run did its work: pure functions of the evidence.

The verdict of a check is ``ok``, ``failed`` or ``cannot tell``, or a dash if it does not apply.
"""

from __future__ import annotations

import enum
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from launcher import errors
from launcher.monitor.curves import keep_finite
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


OK, FAILED = RunVerdict.OK, RunVerdict.FAILED
UNKNOWN, NOT_APPLICABLE = RunVerdict.UNKNOWN, RunVerdict.NOT_APPLICABLE
# The verdict of a check, and the evidence for it.
Judgement = tuple[RunVerdict, str]


@dataclass(frozen=True, slots=True)
class RunCheck:
    """A check with its verdict and the evidence for it."""

    name: str
    verdict: RunVerdict
    evidence: str


def verify(seen: Evidence, *, is_smoke: bool = False) -> list[RunCheck]:
    """Run all checks of a run's stage; of a smoke test, a training of two steps, those that apply to it."""
    names = _SMOKE if is_smoke else _BY_STAGE.get(seen.launch.manifest.stage, _WRITING)
    return [RunCheck(name, *_CHECKS[name](seen)) for name in names]


def exit_code(seen: Evidence, checks: Iterable[RunCheck]) -> int:
    """Return the exit code of a verification; `launcher.errors` has them all."""
    verdicts = {check.verdict for check in checks}
    if seen.status.state.is_live:
        return errors.UNDER_WAY
    if FAILED in verdicts:
        return errors.WENT_WRONG
    return errors.NOT_KNOWN if UNKNOWN in verdicts else errors.DONE


def _check_end(seen: Evidence) -> Judgement:
    """Check that the job completed, with exit code 0."""
    status = seen.status
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    reason = f" ({status.reason})" if status.reason else ""
    job = seen.launch.find_job(status)
    end = f"job {job} {status.state.value}{reason}{code if code[2:] not in reason else ''}"
    is_good = status.state is State.COMPLETED and not status.exit_code
    return OK if is_good else _judge_missing(seen), end


def _check_last_step(seen: Evidence) -> Judgement:
    """Check that the training reached its last step; one that a limit or a signal stopped earlier fails."""
    step = f"step {tables.steps(seen.step, seen.max_steps)}"
    if seen.step is None:
        # Our trainer records every step: without a record there was none.
        verdict = _judge_missing(seen) if seen.records_each_step else UNKNOWN
        return verdict, "the trainer recorded no step"
    if seen.max_steps is None:
        return UNKNOWN, f"{step}: the requested number of steps is unknown"
    if seen.step >= seen.max_steps:
        return OK, step
    if not seen.is_over:
        return UNKNOWN, f"{step} so far"
    why = f": stopped by {seen.end}" if seen.end and seen.end not in ("max_steps", "stop_after") else ""
    return FAILED, step + why


def _check_losses(seen: Evidence) -> Judgement:
    """Check that every loss is a finite number."""
    curves = seen.curves
    train = array("q", _find_nonfinite(curves.steps, curves.losses))
    held_out = array("q", _find_nonfinite(curves.validation.steps, curves.validation.columns[0]))
    wrong = [
        f"{name} of step{'s' * (len(steps) > 1)} {_join(steps)}"
        for name, steps in (("training loss", train), ("held-out loss", held_out))
        if steps
    ]
    if seen.diverged:
        return FAILED, seen.diverged
    if wrong:
        return FAILED, f"not a finite number: {' and '.join(wrong)}"
    if not curves.train:
        return UNKNOWN, "the trainer recorded no loss"
    return OK, f"{len(curves.train):,} of training, {len(curves.validation):,} held-out"


def _check_trend(seen: Evidence) -> Judgement:
    """Check that the loss falls over all launches of the run.

    Of at least two held-out losses the last must be below the first; this alone decides as long as the
    training loss does not rise. Without held-out losses the training loss must fall.
    """
    _, losses = keep_finite(seen.curves.steps, seen.curves.losses)
    _, held_out = keep_finite(seen.curves.validation.steps, seen.curves.validation.columns[0])
    training, verdict = measure_trend(losses), UNKNOWN
    evidence = f"training: {len(losses)} steps, and at least {FEWEST_STEPS} are needed"
    if training is not None:
        medians = f"{tables.loss(training.first)} → {tables.loss(training.last)}"
        evidence = f"training {medians}, {training.trend.value} (noise {training.margin:.4f})"
        verdict = OK if training.trend is Trend.FALLS else FAILED
    if len(held_out) > 1:
        evidence += f"; held-out {tables.loss(held_out[0])} → {tables.loss(held_out[-1])}"
        rises = training is not None and training.trend is Trend.RISES
        verdict = OK if held_out[-1] < held_out[0] and not rises else FAILED
    if spikes := seen.curves.spikes:
        plural = "s" * (len(spikes) > 1)
        evidence += f"; {len(spikes)} spike{plural}, at step{plural} {_join(step for step, _ in spikes)}"
    return verdict, evidence


def _check_steps(seen: Evidence) -> Judgement:
    """Check that no step is missing, not even between one launch and the next."""
    steps = seen.curves.steps
    if not seen.records_each_step:
        return NOT_APPLICABLE, "this trainer does not record every step"
    if not steps:
        return UNKNOWN, "the trainer recorded no step"
    # Steps before the first known launch are not of this run.
    before = seen.curves.first_step
    pairs = itertools.pairwise(itertools.chain([before], steps))
    gaps = [(low + 1, high - 1) for low, high in pairs if high > low + 1]
    # The last ones are missing as well, if the trainer ended at a later step than the last recorded one.
    if not gaps and seen.step is not None and seen.step > steps[-1]:
        gaps = [(steps[-1] + 1, seen.step)]
    if gaps:
        return FAILED, f"no record of {_join(map(_span, gaps))}"
    return OK, _span((before + 1, steps[-1]))


def _check_errors(seen: Evidence) -> Judgement:
    """Check that no rank reported an error, nor a library or Slurm."""
    if seen.errors is None:
        return UNKNOWN, "the job has no log"
    if seen.errors:
        more = f"; and {len(seen.errors) - 1} more" if len(seen.errors) > 1 else ""
        return FAILED, f"{seen.errors[0]}{more}"
    return OK, f"none in the logs of {_ranks(seen.ranks)}"


def _check_ranks(seen: Evidence) -> Judgement:
    """Check that every rank recorded its end."""
    if seen.ended_ranks is None:
        return NOT_APPLICABLE, "this trainer's ranks do not record their ends"
    missing = sorted(set(range(seen.ranks)) - seen.ended_ranks)
    if not missing:
        return OK, f"records of {_ranks(seen.ranks)}"
    ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {_join(missing)} of {seen.ranks}"
    if not seen.ended_ranks:
        ranks = f"any of {_ranks(seen.ranks)}"
    return _judge_missing(seen), f"no record of {ranks}"


def _check_checkpoint(seen: Evidence) -> Judgement:
    """Check that a complete checkpoint of the last step exists."""
    checkpoint = seen.saved
    if checkpoint is None:
        return NOT_APPLICABLE, "the configuration writes no checkpoints"
    target = seen.max_steps if seen.max_steps is not None else seen.step
    if target is not None and checkpoint.step is not None and checkpoint.step >= target:
        return OK, str(checkpoint.name)
    newest = "no complete checkpoint"
    if checkpoint.step is not None:
        newest = f"the newest complete checkpoint is of step {checkpoint.step},"
    wrong = f"; {checkpoint.wrong}" if checkpoint.wrong else ""
    verdict = UNKNOWN if target is None else _judge_missing(seen)
    return verdict, f"{newest} in {checkpoint.directory}{wrong}"


def _check_outputs(seen: Evidence) -> Judgement:
    """Check that the output files exist and are not empty."""
    if seen.outputs is None:
        return UNKNOWN, "the configuration does not name the output files"
    if not seen.outputs:
        return NOT_APPLICABLE, "the merge that follows writes the files"
    if seen.missing_outputs:
        return _judge_missing(seen), f"missing or empty: {_join(seen.missing_outputs)}"
    return OK, _join(seen.outputs)


_CHECKS: dict[str, Callable[[Evidence], Judgement]] = {
    "ended well": _check_end,
    "outputs exist": _check_outputs,
    "last step": _check_last_step,
    "losses finite": _check_losses,
    "loss falling": _check_trend,
    "no step missing": _check_steps,
    "no error of a rank": _check_errors,
    "every rank ended": _check_ranks,
    "last step saved": _check_checkpoint,
}
_WRITING = ("ended well", "outputs exist", "no error of a rank")
_BY_STAGE = {
    "training": tuple(name for name in _CHECKS if name != "outputs exist"),
    "command": ("ended well", "no error of a rank"),  # a command's output is unknown
}
_SMOKE = ("ended well", "last step", "losses finite", "no error of a rank")


def _judge_missing(seen: Evidence) -> RunVerdict:
    """Return the verdict about something missing: failed if the job is over, else unknown."""
    return FAILED if seen.is_over else UNKNOWN


def _find_nonfinite(steps: Iterable[int], losses: Iterable[float]) -> Iterator[int]:
    return (step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss))


def _join(items: Iterable[object]) -> str:
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
    trend = Trend.FLAT if abs(last - first) <= margin else Trend.RISES if last > first else Trend.FALLS
    return LossTrend(trend, first, last, margin)
