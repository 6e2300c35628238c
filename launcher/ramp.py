"""A staircase to many nodes: a short job on each number of nodes, as long as the one before was good.

A rung is a launch of the run ``<run>_ramp_<nodes>``, shortened as a smoke is (`launcher.smoke`). Its global
batch is scaled with its nodes: each GPU has the work that it has in the whole training, so that tokens per
second and GPU compare. A rung whose files are those that would be launched now, and that was good, is not
repeated: after an interruption the same command goes on.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher.checks.facts import Facts
from launcher.checks.gate import CheckReport, check_drafts, require_passed, show_to_scheduler
from launcher.checks.rules.launch import MACHINE
from launcher.drafting import Draft, Request, draft
from launcher.errors import DONE, WENT_WRONG, UserError, escape
from launcher.estimates import parallelism as keys
from launcher.estimates.cost import estimate_cost
from launcher.estimates.parallelism import read_parallel_config
from launcher.estimates.values import Values, full
from launcher.estimates.values import count as count_of
from launcher.jobs.cancelling import cancel
from launcher.jobs.launches import Launch, open_launch, readable_launches
from launcher.jobs.status import poll
from launcher.launching import launch
from launcher.monitor.evidence import gather
from launcher.monitor.follow import LinesView, follow_launch
from launcher.monitor.history import history
from launcher.monitor.progress import Progress
from launcher.monitor.training_speed import TrainingSpeed, explains, measure_speed
from launcher.monitor.verification import RunVerdict, verify
from launcher.runs.paths import display_path
from launcher.runs.receipts import submitted_jobs
from launcher.schedulers.base import JobStatus
from launcher.slurm.notations import expand_hostlist
from launcher.smoke import OF_WHOLE_TRAININGS, ShortRun, scale_batch, shorten
from launcher.ui.tables import UNKNOWN, Cell, count, join_first, print_code, print_listing, steps
from launcher.ui.terminal import print_json, print_message, print_stderr, unwrap_stream
from slipway.arithmetic.layout import ParallelConfig, fits
from slipway.common.files import read_text
from slipway.common.node.events import Event
from slipway.common.node.marks import cancelled_by

STEPS = 20
DROP = 10.0  # per cent of the speed of the rung before

Verdict = Literal["good", "slow", "failed"]
_COLOURS = {"good": "green", "slow": "bold yellow", "failed": "bold red"}
_COLUMNS = ("NODES", "TOKENS/S/GPU", "OF BEFORE", "ESTIMATE", "VERDICT", "JOB", "RUN")


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung that is planned, not written yet; `estimate` is its tokens per second and GPU."""

    nodes: int
    report: CheckReport
    request: Request
    estimate: float | None

    @property
    def draft(self) -> Draft:
        return self.report.draft


@dataclass(slots=True)
class RungResult:
    """The result of a rung; `why` says what failed or is slow, `suspects` the nodes that they name."""

    rung: Rung
    launch: Launch
    verdict: Verdict
    speed: TrainingSpeed | None = None
    of_before: float | None = None
    why: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": self.rung.nodes,
            "run": self.launch.paths.run_name,
            "run_dir": str(self.launch.paths.run_dir),
            "launch": self.launch.paths.number,
            "job_id": self.launch.manifest.job_id,
            "node_list": list(self.speed.hosts) if self.speed is not None else None,
            "tokens_per_second_per_gpu": self.speed.per_gpu if self.speed is not None else None,
            "of_rung_before": self.of_before,
            "estimated_tokens_per_second_per_gpu": self.rung.estimate,
            "verdict": self.verdict,
            "why": self.why,
            "suspects": self.suspects,
        }

    def cells(self) -> list[Cell]:
        speed, estimate = self.speed, self.rung.estimate
        return [
            str(self.rung.nodes),
            UNKNOWN if speed is None else count(speed.per_gpu),
            UNKNOWN if self.of_before is None else f"{100 * self.of_before:.0f} %",
            count(estimate),
            (self.verdict, _COLOURS[self.verdict]),
            self.launch.job,
            self.launch.paths.run_name,
        ]


# --- planning


def plan_ramp(report: CheckReport, request: Request, counts: Sequence[int], skipped: Sequence[str]) -> Ramp:
    """Plan all rungs; raise UserError if one does not fit, or would be refused."""
    whole = report.draft
    training, most = whole.composition.config.training, whole.plan.job.resources.nodes
    if training is None:
        raise UserError(
            f"--ramp: stages=[{whole.plan.job.stage}] has no steps to time",
            hint="--ramp is for stages=[training]",
        )
    shape = read_parallel_config(Values(training.model_dump()))
    if shape is None:
        raise UserError("--ramp: the sizes of the layout cannot be read")
    if list(counts) != sorted(set(counts)):
        raise UserError(f"--ramp {_join(counts)}: each rung has more nodes than the one before")
    if counts[-1] > most:
        key = full(keys.NODES)
        raise UserError(
            f"--ramp {_join(counts)}: more nodes than {key}={most}", key=key, hint=f"up to {most}"
        )
    ramp = Ramp(report, request, skipped, shape)
    for nodes in counts:
        if not fits(ramp.scale(nodes), nodes):
            raise _misfit(shape, most, nodes)
    ramp.rungs = [ramp.plan_rung(nodes) for nodes in counts]
    return ramp


def _misfit(shape: ParallelConfig, most: int, nodes: int) -> UserError:
    valid = [n for n in range(1, most + 1) if fits(_scale(shape, most, n), n)]
    product = f"tensor {shape.tensor} × pipeline {shape.pipeline} × context {shape.context}"
    return UserError(
        f"--ramp: {count_of(nodes, 'node')} of {count_of(shape.devices, 'GPU')} cannot hold {product}",
        key=full(keys.NODES),
        also=(full(keys.TENSOR), full(keys.PIPELINE), full(keys.CONTEXT), full(keys.DEVICES)),
        hint=f"numbers of nodes that can: {join_first([*map(str, valid)], 8)}" if valid else None,
    )


def _scale(shape: ParallelConfig, most: int, nodes: int) -> ParallelConfig:
    """Return a layout with the global batch of fewer nodes: the micro batches of a GPU stay."""
    return shape._replace(batch=shape.micro * shape.data(nodes) * shape.micro_batches(most))


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


@dataclass
class Ramp:
    """A staircase of a launch, whose checked draft and request these are."""

    report: CheckReport
    request: Request
    skipped: Sequence[str]
    shape: ParallelConfig
    drop: float = DROP
    rungs: list[Rung] = field(default_factory=list)
    results: list[RungResult] = field(default_factory=list)

    @property
    def most(self) -> int:
        return self.report.draft.plan.job.resources.nodes

    def scale(self, nodes: int) -> ParallelConfig:
        return _scale(self.shape, self.most, nodes)

    def plan_rung(self, nodes: int, hosts: Sequence[str] | None = None, suffix: str = "") -> Rung:
        """Plan the job of a rung, on these hosts if they are given."""
        whole = self.report.draft
        training = whole.composition.config.training
        assert training is not None
        if hosts is None and (chosen := expand_hostlist(whole.plan.job.queue.nodelist or "")):
            hosts = sorted(chosen, key=lambda name: (len(name), name))[:nodes]
        short = ShortRun(f"_ramp_{suffix or nodes}", nodes, STEPS, ",".join(hosts) if hosts else None)
        with whole.composition.annotated():
            batch = scale_batch(training.model_dump(), self.scale(nodes).batch)
            overrides = shorten(whole, short, batch)
        smaller = replace(self.request, overrides=[*self.request.overrides, *overrides])
        (report,) = check_drafts([draft(smaller)], [*self.skipped, *OF_WHOLE_TRAININGS, MACHINE])
        require_passed([report])
        return Rung(nodes, report, smaller, _estimate(report.draft, report.facts))

    # --- running

    def run(self) -> int:
        """Run the rungs, the first that is not good being the last; return the exit code."""
        require_passed([show_to_scheduler(self.report)])  # the whole launch is judged before it is tried
        for number, rung in enumerate(self.rungs, start=1):
            what = f"rung {number} of {len(self.rungs)}, {count_of(rung.nodes, 'node')}"
            result = self._run_rung(rung, what)
            self.results.append(result)
            if result.verdict == "slow":
                self._explain_drop(result, self.results[-2])
            if result.verdict != "good":
                return WENT_WRONG
        return DONE

    def _run_rung(self, rung: Rung, what: str) -> RungResult:
        """Run a rung, or take the result of one that was good; go on with one that is under way."""
        launched = _find_same(rung)
        if launched is not None:
            (status,) = poll([launched])
            is_cancelled = cancelled_by(launched.paths.directory, launched.job) is not None
            if status.state.is_live and not is_cancelled:
                _say(f"{what}: goes on with job {launched.job}")
                return self._judge(rung, launched, _follow(launched, what))
            result = self._judge(rung, launched, status)
            if result.verdict == "good":
                _say(f"{what}: was good already, job {launched.job}")
                return result
        return self._judge(rung, *_launch_and_follow(rung, what))

    def _judge(self, rung: Rung, launched: Launch, status: JobStatus) -> RungResult:
        launched = open_launch(launched.paths.run_dir, launched.paths.number)
        result = RungResult(rung, launched, "good", measure_speed(launched))
        checks = verify(gather(launched.paths.run_dir, launched.paths.number), is_smoke=True)
        failed = [check for check in checks if check.verdict is RunVerdict.FAILED]
        if failed or not status.state.is_good:
            result.verdict = "failed"
            result.why = [f"{check.name}: {check.evidence}" for check in failed] or [status.state.value]
            _add_diagnosis(result)
            return result
        before = self.results[-1].speed if self.results else None
        if result.speed is not None and before is not None:
            result.of_before = result.speed.per_gpu / before.per_gpu
            if result.of_before < 1 - self.drop / 100:
                result.verdict = "slow"
        return result

    # --- the cause of a drop

    def _explain_drop(self, slow: RungResult, before: RungResult) -> None:
        """Name the rank and the phase that the others wait for, or else find the node by further jobs."""
        assert slow.speed is not None and before.speed is not None
        if explains(slow.speed.slowest, slow.speed, before.speed):
            assert slow.speed.slowest is not None
            slow.why = [str(slow.speed.slowest)]
            slow.suspects = [slow.speed.slowest.host]
            return
        hosts = slow.speed.hosts
        if self.report.draft.plan.scheduler != "slurm" or len(set(hosts)) != slow.rung.nodes:
            slow.why = ["no rank stands out by its phases"]
            return
        cleared = [host for result in self.results[:-1] if result.speed for host in result.speed.hosts]
        number = 0

        def is_slow(some: Sequence[str]) -> bool:
            nonlocal number
            number += 1
            rung = self.plan_rung(len(some), some, f"part_{number}")
            launched, status = _launch_and_follow(rung, f"part {number}, to find the node")
            result = self._judge(rung, launched, status)
            assert before.speed is not None
            speed = result.speed.per_gpu if result.speed is not None else 0.0
            slower = result.verdict == "failed" or speed < (1 - self.drop / 100) * before.speed.per_gpu
            _say(f"{join_first(some)}: {count(speed)} tokens/s per GPU{', slow' if slower else ''}")
            return slower

        sizes = [n for n in range(1, slow.rung.nodes + 1) if fits(self.scale(n), n)]
        suspects = [host for host in hosts if host not in cleared]
        names, is_sure = bisect(suspects, cleared, [n for n in sizes if n >= before.rung.nodes], is_slow)
        slow.suspects = names if is_sure else []
        if is_sure:
            slow.why = [f"slow: {', '.join(names)}, as jobs on parts of the nodes showed"]
        else:
            slow.why = [f"no part of the nodes is slow by itself: {slow.rung.nodes} nodes together are"]


def bisect(
    suspects: Sequence[str],
    cleared: Sequence[str],
    sizes: Sequence[int],
    is_slow: Callable[[Sequence[str]], bool],
) -> tuple[list[str], bool]:
    """Find the slow one of some nodes by jobs on halves of them, filled up with nodes that are good.

    Return the nodes that are left, and True if a job on them was slow. There are at most as many jobs as the
    logarithm of the suspects, to the base of two and rounded up, and one more if all of these were fast.
    """
    left, good, is_sure = list(suspects), list(dict.fromkeys(cleared)), False

    def fill(some: list[str]) -> list[str]:
        room = next((size for size in sizes if len(some) <= size <= len(some) + len(good)), None)
        return [*some, *good[: room - len(some)]] if room is not None else []

    while len(left) > 1:
        half = left[: len(left) // 2]
        job = fill(half)
        if not job:
            break
        if is_slow(job):
            left, is_sure = half, True
        else:
            good, left = [*good, *half], left[len(half) :]
    if left and not is_sure and (job := fill(left)):
        is_sure = is_slow(job)
    return left, is_sure


# --- one job


def _launch_and_follow(rung: Rung, what: str) -> tuple[Launch, JobStatus]:
    launched = launch(rung.draft, rung.request, report=rung.report)
    for warning in launched.warnings:
        print_message(warning)
    _say(f"{what}: job {launched.manifest.job_id}, run {launched.paths.run_name}")
    status = _follow(launched, what)
    submitted_jobs.pop(str(launched.manifest.job_id), None)
    return launched, status


def _follow(launched: Launch, what: str) -> JobStatus:
    """Follow a job to its end; Ctrl-C cancels it."""
    launched = open_launch(launched.paths.run_dir, launched.paths.number)
    try:
        return follow_launch(launched, _RungView(launched, what))
    except KeyboardInterrupt:
        outcomes = cancel(poll([launched]))
        how = ", ".join(outcome.effect.value for outcome in outcomes)
        _say(f"interrupted; job {launched.job}: {how}")
        _say("the same command goes on after the rungs that were good")
        raise


def _find_same(rung: Rung) -> Launch | None:
    """Return the newest launch of a rung if it has the files that would be launched now."""
    launches = readable_launches(rung.draft.plan.paths.run_dir)
    if not launches or launches[-1].manifest.job_id is None:
        return None
    newest = launches[-1]
    same = rung.draft.numbered(newest.paths.number, newest.manifest.tag)
    with contextlib.suppress(OSError, ValueError):
        if all(read_text(path) == text for path, text in same.texts.items()):
            return newest
    return None


def _add_diagnosis(result: RungResult) -> None:
    """Add the job's own judgement of its end: the rule, the rank that failed first, the nodes at fault."""
    rows = [row for row in history(result.launch.paths.run_dir) if row.number == result.launch.paths.number]
    reading = next((row.reading for row in rows), None)
    if reading is not None:
        result.why = reading.lines()
        result.suspects = list(reading.nodes)
    elif rows and rows[0].status.reason:
        result.why.append(rows[0].status.reason)


def _estimate(drafted: Draft, facts: Facts) -> float | None:
    """Return the estimated tokens per second of a GPU."""
    cost = estimate_cost(drafted.plan, facts.gpu_types)
    return cost.tokens / cost.seconds / cost.gpus if cost is not None and cost.seconds else None


class _RungView(LinesView):
    """A view of a rung: a line that is redrawn on a terminal, and a line for each state anywhere else."""

    def __init__(self, launched: Launch, what: str) -> None:
        super().__init__(launched)
        self._what, self._line = what, ""
        self._is_live = sys.stderr.isatty()

    def __enter__(self) -> None:
        """Print nothing yet."""

    def __exit__(self, *exception: object) -> None:
        if self._is_live and self._line:
            print(file=sys.stderr)

    def show(
        self, status: JobStatus, progress: Progress, new: Sequence[Event], *, is_over: bool = False
    ) -> None:
        """Show the newest state, and on a terminal the step."""
        words = [status.state.value, *filter(None, [status.nodes and f"on {status.nodes}", status.reason])]
        line = f"{self._what}: {' '.join(words)}"
        if self._is_live:
            step = f", step {steps(progress.step, STEPS)}" if progress.step is not None else ""
            terminal = unwrap_stream(sys.stderr)
            print(f"\r\x1b[Kramp: {escape(line)}{step}", end="", file=terminal, flush=True)
        elif line != self._line:
            _say(f"{time.strftime('%H:%M:%S')} {line}")
        self._line = line


def _say(line: str) -> None:
    print_stderr(f"ramp: {escape(line)}")


# --- what is printed


def print_plan(ramp: Ramp) -> None:
    """Print the scripts of all rungs, for a dry run."""
    for rung in ramp.rungs:
        _say(f"{count_of(rung.nodes, 'node')}, {STEPS} steps, global batch {ramp.scale(rung.nodes).batch}")
        print_code(f"# --- {count_of(rung.nodes, 'node')}: {rung.draft.plan.paths.script} ---\n", "bash")
        print_code(rung.draft.script, "bash")


def print_results(ramp: Ramp, *, as_json: bool) -> None:
    """Print the rungs, the cause of the end, and the command of the whole launch or of the next try."""
    last, command = ramp.results[-1], drop_ramp(ramp.request.command)
    command[0] = Path(command[0]).name
    is_good = last.verdict == "good"
    if as_json:
        rungs = [result.to_json() for result in ramp.results]
        print_json({"rungs": rungs, "verdict": last.verdict, "suspects": last.suspects, "command": command})
        return
    print_listing(_COLUMNS, [result.cells() for result in ramp.results], numbers=3, unfolded=(0, 6))
    for line in last.why:
        print(escape(f"{count_of(last.rung.nodes, 'node')}: {line}"))
    if is_good:
        print(f"\n{shlex.join(command)}")
        return
    print(f"the files of this rung: {display_path(last.launch.paths.run_dir)}")
    if last.suspects:
        print(f"to go on without it: the same command with cluster.exclude={','.join(last.suspects)}")


def drop_ramp(command: Sequence[str]) -> list[str]:
    """Return the command line without the options of the ramp, also shortened."""
    end = command.index("--") if "--" in command else len(command)
    return [*_keep(command[:end]), *command[end:]]


def _keep(words: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        name, sign, _ = word.partition("=")
        if not (name.startswith("--ramp") and "--ramp-drop".startswith(name)):
            yield word
        elif not sign:
            next(rest)
