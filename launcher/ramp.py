"""A staircase to many nodes: a short job on each number of nodes, as long as the one before was good.

A rung is a launch of the run ``<run>_ramp_<nodes>``, shortened as a smoke is (`launcher.smoke`). Its global
batch is scaled with its nodes: each GPU has the work that it has in the whole training, so that tokens per
second and GPU compare. A rung whose files are those that would be launched now, and that was good, is not
repeated: after an interruption the same command goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from launcher.checks.gate import CheckReport, check_drafts, require_passed, show_to_scheduler
from launcher.checks.rules.launch import MACHINE
from launcher.drafting import Request, draft
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
from launcher.monitor.live import LiveView
from launcher.monitor.training_speed import TrainingSpeed, find_cause, measure_speed
from launcher.monitor.verification import RunVerdict, verify
from launcher.runs.paths import display_path
from launcher.runs.receipts import submitted_jobs
from launcher.schedulers.base import JobStatus
from launcher.slurm.notations import expand_hostlist
from launcher.smoke import OF_WHOLE_TRAININGS, ShortRun, scale_batch, shorten
from launcher.ui.tables import UNKNOWN, Cell, count, join_first, print_code, print_listing
from launcher.ui.terminal import open_console, print_json, print_message, print_stderr
from slipway.arithmetic.layout import ParallelConfig, fits
from slipway.common.files import read_text
from slipway.common.node.marks import cancelled_by

STEPS = 20
DROP = 10  # per cent of the speed of the rung before

Verdict = Literal["good", "slow", "failed"]
_COLOURS = {"good": "green", "slow": "bold yellow", "failed": "bold red"}
_COLUMNS = ("NODES", "TOKENS/S/GPU", "OF BEFORE", "ESTIMATE", "VERDICT", "JOB", "RUN")


@dataclass(slots=True)
class Rung:
    """A job of the ramp, planned or done; `estimate` is its tokens per second and GPU.

    `of_before` is its speed as a part of that of the rung before; `why` says what failed or is slow, and
    `suspects` are the nodes at fault.
    """

    nodes: int
    report: CheckReport
    request: Request
    estimate: float | None
    launch: Launch | None = None
    verdict: Verdict = "good"
    speed: TrainingSpeed | None = None
    of_before: float | None = None
    why: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> Sequence[str]:
        return self.speed.hosts if self.speed is not None else ()

    @property
    def per_gpu(self) -> float | None:
        return self.speed.per_gpu if self.speed is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return the rung for programs, once it is done."""
        assert self.launch is not None
        return {
            **{name: getattr(self, name) for name in ("nodes", "verdict", "of_before", "why", "suspects")},
            "run": self.launch.paths.run_name,
            "run_dir": str(self.launch.paths.run_dir),
            "launch": self.launch.paths.number,
            "job_id": self.launch.manifest.job_id,
            "node_list": list(self.hosts),
            "tokens_per_second_per_gpu": self.per_gpu,
            "estimated_tokens_per_second_per_gpu": self.estimate,
        }

    def cells(self) -> list[Cell]:
        assert self.launch is not None
        part = UNKNOWN if self.of_before is None else f"{100 * self.of_before:.0f} %"
        verdict = (self.verdict, _COLOURS[self.verdict])
        job, run = self.launch.job, self.launch.paths.run_name
        return [str(self.nodes), count(self.per_gpu), part, count(self.estimate), verdict, job, run]


def plan_ramp(report: CheckReport, request: Request, counts: Sequence[int], skipped: Sequence[str]) -> Ramp:
    """Plan all rungs; raise UserError if one does not fit, or would be refused."""
    training, job = report.draft.composition.config.training, report.draft.plan.job
    shape = read_parallel_config(Values(training.model_dump())) if training is not None else None
    if shape is None:
        message = f"--ramp: stages=[{job.stage}] has no steps to time, or no layout"
        raise UserError(message, hint="--ramp is for stages=[training]")
    ramp, words, most = Ramp(report, request, skipped, shape), ",".join(map(str, counts)), job.resources.nodes
    if list(counts) != sorted(set(counts)):
        raise UserError(f"--ramp {words}: each rung has more nodes than the one before")
    if counts[-1] > most:
        key = full(keys.NODES)
        raise UserError(f"--ramp {words}: more nodes than {key}={most}", key=key, hint=f"up to {most}")
    for nodes in (nodes for nodes in counts if nodes not in ramp.sizes):
        product = f"tensor {shape.tensor} × pipeline {shape.pipeline} × context {shape.context}"
        raise UserError(
            f"--ramp: {count_of(nodes, 'node')} of {count_of(shape.devices, 'GPU')} cannot hold {product}",
            key=full(keys.NODES),
            also=tuple(map(full, (keys.TENSOR, keys.PIPELINE, keys.CONTEXT, keys.DEVICES))),
            hint=f"numbers of nodes that can: {join_first([*map(str, ramp.sizes)], 8)}",
        )
    ramp.rungs = [ramp.plan_rung(nodes) for nodes in counts]
    return ramp


@dataclass
class Ramp:
    """A staircase of a launch, whose checked draft and request these are; `done` are its rungs so far."""

    report: CheckReport
    request: Request
    skipped: Sequence[str]
    shape: ParallelConfig
    drop: int = DROP
    rungs: list[Rung] = field(default_factory=list)
    done: list[Rung] = field(default_factory=list)

    def scale(self, nodes: int) -> ParallelConfig:
        """Return the layout with the global batch of fewer nodes: the micro batches of a GPU stay."""
        each = self.shape.micro_batches(self.report.draft.plan.job.resources.nodes)
        return self.shape._replace(batch=self.shape.micro * self.shape.data(nodes) * each)

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of nodes that the layout fits on, up to those of the launch."""
        most = self.report.draft.plan.job.resources.nodes
        return [nodes for nodes in range(1, most + 1) if fits(self.scale(nodes), nodes)]

    def plan_rung(self, nodes: int, hosts: Sequence[str] | None = None, suffix: str = "") -> Rung:
        """Plan the job of a rung, on these hosts if they are given."""
        whole = self.report.draft
        training = whole.composition.config.training
        assert training is not None
        if hosts is None and (chosen := expand_hostlist(whole.plan.job.queue.nodelist or "")):
            hosts = sorted(chosen, key=lambda name: (len(name), name))[:nodes]
        short = ShortRun(f"_ramp_{suffix or nodes}", nodes, STEPS, ",".join(hosts) if hosts else None)
        with whole.composition.annotated():
            overrides = shorten(whole, short, scale_batch(training.model_dump(), self.scale(nodes).batch))
        smaller = replace(self.request, overrides=[*self.request.overrides, *overrides])
        (report,) = check_drafts([draft(smaller)], [*self.skipped, *OF_WHOLE_TRAININGS, MACHINE])
        require_passed([report])
        cost = estimate_cost(report.draft.plan, report.facts.gpu_types)
        estimate = cost.tokens / cost.seconds / cost.gpus if cost is not None and cost.seconds else None
        return Rung(nodes, report, smaller, estimate)

    def run(self) -> int:
        """Run the rungs, the first that is not good being the last; return the exit code."""
        require_passed([show_to_scheduler(self.report)])  # the whole launch is judged before it is tried
        for number, rung in enumerate(self.rungs, start=1):
            self._run_rung(rung, f"rung {number} of {len(self.rungs)}, {count_of(rung.nodes, 'node')}")
            if rung.verdict == "slow":
                self._explain_drop(rung, self.done[-1])
            self.done.append(rung)
            if rung.verdict != "good":
                return WENT_WRONG
        return DONE

    def _run_rung(self, rung: Rung, what: str) -> None:
        """Run a rung, or take the result of one that was good; go on with one that is under way."""
        if (launched := _find_same(rung)) is not None:
            (status,) = poll([launched])
            if status.state.is_live and cancelled_by(launched.paths.directory, launched.job) is None:
                _say(f"{what}: goes on with job {launched.job}")
                return self._judge(rung, launched, _follow(launched))
            self._judge(rung, launched, status)
            if rung.verdict == "good":
                return _say(f"{what}: was good already, job {launched.job}")
        return self._judge(rung, *_launch_and_follow(rung, what))

    def _judge(self, rung: Rung, launched: Launch, status: JobStatus) -> None:
        """Set the verdict of a rung, and its reason if it failed."""
        run_dir, number = launched.paths.run_dir, launched.paths.number
        rung.launch = launched = open_launch(run_dir, number)
        rung.speed, rung.verdict, rung.why = measure_speed(launched), "good", []
        checks = verify(gather(run_dir, number), is_smoke=True)
        failed = [f"{check.name}: {check.evidence}" for check in checks if check.verdict is RunVerdict.FAILED]
        if failed or not status.state.is_good:
            rung.verdict, rung.why = "failed", failed or [status.state.value]
            reading = next((row.reading for row in history(run_dir) if row.number == number), None)
            if reading is not None:
                rung.why, rung.suspects = reading.lines(), list(reading.nodes)
        elif self.done and rung.per_gpu is not None and (before := self.done[-1].per_gpu):
            rung.of_before = rung.per_gpu / before
            rung.verdict = "slow" if rung.of_before < 1 - self.drop / 100 else "good"

    def _explain_drop(self, slow: Rung, before: Rung) -> None:
        """Name the rank and the phase that the others wait for, or else find the node by further jobs."""
        assert slow.speed is not None and before.speed is not None
        if (slowest := find_cause(slow.speed, before.speed)) is not None:
            slow.why, slow.suspects = [str(slowest)], [slowest.host]
            return
        if self.report.draft.plan.scheduler != "slurm" or len(set(slow.hosts)) != slow.nodes:
            slow.why = ["no rank stands out by its phases"]
            return
        names = (f"part_{number}" for number in itertools.count(1))

        def is_slow(some: Sequence[str]) -> bool:
            part = self.plan_rung(len(some), some, name := next(names))
            self._judge(part, *_launch_and_follow(part, f"{name.replace('_', ' ')}, to find the node"))
            slower = part.verdict != "good"
            _say(f"{join_first(some)}: {count(part.per_gpu)} tokens/s per GPU{', slow' if slower else ''}")
            return slower

        cleared = [host for rung in self.done for host in rung.hosts]
        suspects = [host for host in slow.hosts if host not in cleared]
        sizes = [nodes for nodes in self.sizes if nodes >= before.nodes]
        left, is_sure = bisect(suspects, cleared, sizes, is_slow)
        slow.suspects = left if is_sure else []
        slow.why = [f"slow: {', '.join(left)}, as jobs on parts of the nodes showed"]
        if not is_sure:
            slow.why = [f"no part of the nodes is slow by itself: {slow.nodes} nodes together are"]


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
    launched = launch(rung.report.draft, rung.request, report=rung.report)
    for warning in launched.warnings:
        print_message(warning)
    _say(f"{what}: job {launched.manifest.job_id}, run {launched.paths.run_name}")
    status = _follow(launched)
    submitted_jobs.pop(str(launched.manifest.job_id), None)
    return launched, status


def _follow(launched: Launch) -> JobStatus:
    """Follow a job to its end, on stderr; Ctrl-C cancels it."""
    launched = open_launch(launched.paths.run_dir, launched.paths.number)
    view: LinesView | LiveView = LinesView(launched)
    if sys.stderr.isatty():
        view = LiveView(launched, open_console(stderr=True))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return follow_launch(launched, view)
    except KeyboardInterrupt:
        (outcome,) = cancel(poll([launched]))
        _say(f"interrupted; job {launched.job}: {outcome.effect.value}")
        _say("the same command goes on after the rungs that were good")
        raise


def _find_same(rung: Rung) -> Launch | None:
    """Return the newest launch of a rung if it has the files that would be launched now."""
    for newest in readable_launches(rung.report.draft.plan.paths.run_dir)[-1:]:
        same = rung.report.draft.numbered(newest.paths.number, newest.manifest.tag)
        with contextlib.suppress(OSError, ValueError):
            texts = same.texts.items() if newest.manifest.job_id is not None else ()
            if texts and all(read_text(path) == text for path, text in texts):
                return newest
    return None


def _say(line: str) -> None:
    print_stderr(f"ramp: {escape(line)}")


# --- what is printed


def print_plan(ramp: Ramp) -> None:
    """Print the scripts of all rungs, for a dry run."""
    for rung in ramp.rungs:
        nodes, drafted = count_of(rung.nodes, "node"), rung.report.draft
        _say(f"{nodes}, {STEPS} steps, global batch {ramp.scale(rung.nodes).batch}")
        print_code(f"# --- {nodes}: {drafted.plan.paths.script} ---\n{drafted.script}", "bash")


def print_results(ramp: Ramp, *, as_json: bool) -> None:
    """Print the rungs, the cause of the end, and the command of the whole launch or of the next try."""
    last, command = ramp.done[-1], drop_ramp(ramp.request.command)
    command[0] = Path(command[0]).name
    if as_json:
        rungs = [rung.to_json() for rung in ramp.done]
        print_json({"rungs": rungs, "verdict": last.verdict, "suspects": last.suspects, "command": command})
        return
    assert last.launch is not None
    print_listing(_COLUMNS, [rung.cells() for rung in ramp.done], numbers=3, unfolded=(0, 6))
    for line in last.why:
        print(escape(f"{count_of(last.nodes, 'node')}: {line}"))
    if last.verdict == "good":
        print(f"\n{shlex.join(command)}")
    else:
        print(f"the files of this rung: {display_path(last.launch.paths.run_dir)}")
    if last.suspects:
        avoided = [ramp.report.draft.plan.job.queue.exclude, *last.suspects]
        names = ",".join(filter(None, avoided))
        word = shlex.quote(f"cluster.exclude='{names}'" if "," in names else f"cluster.exclude={names}")
        print(f"to go on without it: the same command with {word}")


def drop_ramp(command: Sequence[str]) -> list[str]:
    """Return the command line without the options of the ramp, also shortened."""
    kept, rest = list[str](), iter(command)
    for word in rest:
        name, sign, _ = word.partition("=")
        if word == "--":
            return [*kept, word, *rest]
        if not (name.startswith("--ramp") and "--ramp-drop".startswith(name)):
            kept.append(word)
        elif not sign:
            next(rest)
    return kept
