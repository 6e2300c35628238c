"""Whether a run did what it was launched for: checks, as pure functions over what was read of it.

Each check says ``ok``, ``failed`` or ``cannot tell``, and from what; one that the run gives no cause for says
so with a dash.
"""

from __future__ import annotations

import enum
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from launcher.monitor.curves import finite_points
from launcher.monitor.evidence import Evidence
from launcher.monitor.loss_trend import FEWEST_STEPS, Trend, measure_trend
from launcher.schedulers.base import State
from launcher.tracking import exit_codes
from launcher.ui import formatting

_SHOWN = 5


class RunVerdict(enum.Enum):
    """What a check says."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "cannot tell"
    NO_CAUSE = "-"


@dataclass(frozen=True, slots=True)
class RunCheck:
    """One check, with what it was told from."""

    name: str
    verdict: RunVerdict
    evidence: str


def verify(seen: Evidence) -> list[RunCheck]:
    """All checks of a run's stage."""
    checks = _TRAINING if seen.stage == "training" else _DATA_PREPARATION
    return [check(seen) for check in checks]


def verify_smoke(seen: Evidence) -> list[RunCheck]:
    """The checks of a training of two steps."""
    return [check(seen) for check in _SMOKE]


def exit_code(seen: Evidence, checks: Iterable[RunCheck]) -> int:
    """The exit code that stands for a verification: of `launcher.tracking.exit_codes`."""
    verdicts = {check.verdict for check in checks}
    if seen.status.state.is_live:
        return exit_codes.UNDER_WAY
    if RunVerdict.FAILED in verdicts:
        return exit_codes.WENT_WRONG
    return exit_codes.NOT_KNOWN if RunVerdict.UNKNOWN in verdicts else exit_codes.DONE


def ended(seen: Evidence) -> RunCheck:
    """The job completed, with exit code 0."""
    status = seen.status
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    reason = f" ({status.reason})" if status.reason else ""
    told = f"job {seen.job} {status.state.value}{reason}{code if code[2:] not in reason else ''}"
    if status.state is State.COMPLETED:
        return RunCheck("ended well", RunVerdict.FAILED if status.exit_code else RunVerdict.OK, told)
    return RunCheck("ended well", RunVerdict.FAILED if seen.is_over else RunVerdict.UNKNOWN, told)


def last_step(seen: Evidence) -> RunCheck:
    """The training came to its last step; one that was stopped by a limit or a signal before did not."""
    told = f"step {formatting.steps(seen.step, seen.max_steps)}"
    if seen.step is None:
        # Our trainer tells of each of its steps: that it told of none means that it made none.
        verdict = _not_yet(seen) if seen.tells_each_step else None
        return _as("last step", verdict, "the trainer told of no step")
    if seen.max_steps is None:
        return _as("last step", None, f"{told}: how many were asked for is not known")
    if seen.step >= seen.max_steps:
        return _as("last step", True, told)
    why = f": stopped by {seen.end}" if seen.end and seen.end not in ("max_steps", "stop_after") else ""
    if not seen.is_over:
        return _as("last step", None, f"{told} so far")
    return _as("last step", False, told + why)


def finite(seen: Evidence) -> RunCheck:
    """Every loss is a number."""
    curves = seen.curves
    train = array("q", _not_finite(curves.steps, curves.losses))
    held_out = array("q", _not_finite(curves.validation.steps, curves.validation.columns[0]))
    wrong = [
        f"{name} of step{'s' * (len(steps) > 1)} {_listed(steps)}"
        for name, steps in (("training loss", train), ("held-out loss", held_out))
        if steps
    ]
    if seen.diverged:
        return _as("losses finite", False, seen.diverged)
    if wrong:
        return _as("losses finite", False, f"not a finite number: {' and '.join(wrong)}")
    if not curves.train:
        return _as("losses finite", None, "no loss was told")
    points, validations = len(curves.train), len(curves.validation)
    return _as("losses finite", True, f"{points:,} of training, {validations:,} held-out")


def falling(seen: Evidence) -> RunCheck:
    """The loss falls, over all launches of the run: `launcher.monitor.loss_trend`.

    The held-out loss, where there are two values of it, must be below its first; it alone decides as long as
    the training loss does not rise. Without it the training loss must fall.
    """
    _, losses = finite_points(seen.curves.steps, seen.curves.losses)
    _, held_out = finite_points(seen.curves.validation.steps, seen.curves.validation.columns[0])
    judged, told, verdict = measure_trend(losses), [], None
    if judged is not None:
        medians = f"{formatting.loss(judged.first)} → {formatting.loss(judged.last)}"
        told.append(f"training {medians}, {judged.trend.value} (noise {judged.margin:.4f})")
        verdict = judged.trend is Trend.FALLS
    else:
        told.append(f"training: of {len(losses)} steps, and {FEWEST_STEPS} are needed to tell")
    if len(held_out) > 1:
        falls = held_out[-1] < held_out[0]
        told.append(f"held-out {formatting.loss(held_out[0])} → {formatting.loss(held_out[-1])}")
        verdict = falls and not (judged and judged.trend is Trend.RISES)
    return _as("loss falling", verdict, "; ".join(told))


def complete(seen: Evidence) -> RunCheck:
    """No step is missing, also not between one launch and the next."""
    steps = seen.curves.steps
    if not seen.tells_each_step:
        return RunCheck("no step missing", RunVerdict.NO_CAUSE, "this trainer does not tell of every step")
    if not steps:
        return _as("no step missing", None, "no step was told")
    # What came before the first launch that is known is not of this run.
    before = seen.curves.first_step
    gaps = [
        (low + 1, high - 1)
        for low, high in itertools.pairwise(itertools.chain([before], steps))
        if high > low + 1
    ]
    if gaps:
        return _as("no step missing", False, f"nothing was told of {_listed(map(_span, gaps))}")
    # The last ones are missing as well, if the trainer ended at a later step than it told of.
    if seen.step is not None and seen.step > steps[-1]:
        return _as("no step missing", False, f"nothing was told of {_span((steps[-1] + 1, seen.step))}")
    return _as("no step missing", True, _span((before + 1, steps[-1])))


def no_error(seen: Evidence) -> RunCheck:
    """No rank told of an error, nor did a library or Slurm for it."""
    if seen.errors is None:
        return _as("no error of a rank", None, "the job has left no log")
    if seen.errors:
        more = f"; and {len(seen.errors) - 1} more" if len(seen.errors) > 1 else ""
        return _as("no error of a rank", False, f"{seen.errors[0]}{more}")
    return _as("no error of a rank", True, f"none in the logs of {_tasks(seen.ranks)}")


def all_ranks(seen: Evidence) -> RunCheck:
    """Every rank told that it ended."""
    name = "every rank ended"
    if seen.ended_ranks is None:
        return RunCheck(name, RunVerdict.NO_CAUSE, "this trainer's ranks do not tell")
    missing = sorted(set(range(seen.ranks)) - seen.ended_ranks)
    if missing:
        which = f"by {'rank' if len(missing) == 1 else 'ranks'} {_listed(missing)} of {seen.ranks}"
        told = f"not told {which}" if seen.ended_ranks else f"told by none of {_tasks(seen.ranks)}"
        return _as(name, _not_yet(seen), told)
    return _as(name, True, f"{_tasks(seen.ranks)} told so")


def saved(seen: Evidence) -> RunCheck:
    """A complete checkpoint of the last step is there."""
    name, found = "last step saved", seen.saved
    if found is None:
        return RunCheck(name, RunVerdict.NO_CAUSE, "no checkpoints were asked for")
    target = seen.max_steps if seen.max_steps is not None else seen.step
    if target is not None and found.step is not None and found.step >= target:
        return _as(name, True, str(found.name))
    newest = "there is none" if found.step is None else f"the newest complete one is of step {found.step}"
    wrong = f"; {found.wrong}" if found.wrong else ""
    verdict = None if target is None else _not_yet(seen)
    return _as(name, verdict, f"{newest} in {found.directory}{wrong}")


def outputs(seen: Evidence) -> RunCheck:
    """The files that a data preparation is to make are there, and hold something."""
    if seen.outputs is None:
        return _as("outputs exist", None, "which ones were asked for cannot be read from its script")
    if seen.missing_outputs:
        told = f"missing or empty: {_listed(seen.missing_outputs)}"
        return _as("outputs exist", _not_yet(seen), told)
    return _as("outputs exist", True, _listed(seen.outputs))


_TRAINING: tuple[Callable[[Evidence], RunCheck], ...] = (
    ended, last_step, finite, falling, complete, no_error, all_ranks, saved,
)  # fmt: skip
_DATA_PREPARATION = (ended, outputs, no_error)
_SMOKE = (ended, last_step, finite, no_error)


def _not_yet(seen: Evidence) -> bool | None:
    """What it says that something is not there: a job that goes on may still bring it."""
    return False if seen.is_over else None


def _as(name: str, verdict: bool | None, evidence: str) -> RunCheck:
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


def _tasks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"
