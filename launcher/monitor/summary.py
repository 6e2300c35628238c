"""The closing table of a run: its size, its losses and its throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.jobs.launches import Launch, open_launches
from launcher.jobs.status import poll
from launcher.monitor.curves import Curves
from launcher.monitor.evaluations import Evaluation, progress_rows, read_evaluations
from launcher.monitor.events import Start
from launcher.monitor.readers import all_events
from launcher.monitor.run_status import finite
from launcher.ui import formatting


@dataclass(frozen=True)
class RunSummary:
    """The closing table. Losses and the entropy are in nats per token.

    `world` is the number of tasks; `below_entropy` is True if the last held-out loss is below the unigram
    entropy of the same tokens, that is, if the model learned more than the tokens' frequencies. `entropy_of`
    names these tokens: a T5's are targets, with sentinels. `evaluations` are the results of its checkpoints.
    """

    run: str
    launches: int
    job_id: str | None
    state: str
    reason: str | None
    nodes: int
    tasks_per_node: int
    world: int
    tensor: int | None
    data: int | None
    layout: str
    parameters: int | None
    step: int | None
    max_steps: int | None
    tokens: int | None
    first_loss: float | None
    last_loss: float | None
    first_held_out_loss: float | None
    last_held_out_loss: float | None
    unigram_entropy: float | None
    entropy_of: str
    below_entropy: bool | None
    tokens_per_second: float | None
    seconds: float
    evaluations: Sequence[Evaluation] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the table for programs; a number that is not finite is a string, ``"nan"``."""
        table = {
            key: finite(value) if isinstance(value, float) else value for key, value in asdict(self).items()
        }
        return {**table, "evaluations": [evaluation.to_json() for evaluation in self.evaluations]}

    def rows(self) -> list[tuple[str, str]]:
        """Return the table for people: names and values."""
        state = self.state + (f" ({self.reason})" if self.reason else "")
        return [
            ("run", self.run + (f", {self.launches} launches" if self.launches > 1 else "")),
            ("job", formatting.text(self.job_id)),
            ("state", state),
            ("tasks", f"{formatting.tasks(self.nodes, self.tasks_per_node)} = {self.world}"),
            ("parallel", self.layout),
            ("parameters", formatting.count(self.parameters)),
            ("steps", formatting.steps(self.step, self.max_steps)),
            ("tokens seen", formatting.count(self.tokens)),
            ("train loss", _arrow(self.first_loss, self.last_loss)),
            ("held-out loss", _arrow(self.first_held_out_loss, self.last_held_out_loss)),
            ("unigram entropy", f"{formatting.loss(self.unigram_entropy)} nats of the {self.entropy_of}"),
            ("below entropy", self._verdict()),
            *progress_rows(self.evaluations),
            ("throughput", f"{formatting.count(self.tokens_per_second)} tokens/s, mean"),
            ("wall time", formatting.duration(self.seconds)),
        ]

    def _verdict(self) -> str:
        if self.below_entropy is None or self.last_held_out_loss is None or self.unigram_entropy is None:
            return formatting.UNKNOWN
        distance = abs(self.unigram_entropy - self.last_held_out_loss)
        return f"yes, by {distance:.4f} nats" if self.below_entropy else f"no, above by {distance:.4f} nats"


def _arrow(first: float | None, last: float | None) -> str:
    return formatting.UNKNOWN if last is None else f"{formatting.loss(first)} → {formatting.loss(last)}"


def load_curves(launches: Sequence[Launch]) -> Curves:
    """Return the joined curves of the launches of a run."""
    curves = Curves()
    for launch in launches:
        curves.add(all_events(launch))
    return curves


def summarize(run_dir: Path) -> tuple[RunSummary, Curves]:
    """Return the closing table and the curves of a run.

    Raises
    ------
    UserError
        If no launch of the run has recorded a step yet.
    """
    launches = open_launches(run_dir)
    curves = load_curves(launches)
    if not curves.train:
        raise UserError(
            f"{run_dir.name} has no training step yet",
            hint=f"show its state: slipway status {run_dir.name}",
        )
    return replace(_summary(launches, curves), evaluations=read_evaluations(run_dir)), curves


def _summary(launches: Sequence[Launch], curves: Curves) -> RunSummary:
    manifest = launches[-1].manifest
    status = poll(launches[-1:])[0].status
    first, last, validations = curves.point(0), curves.point(-1), curves.validations
    start, entropy = curves.start, curves.entropy
    held_out = validations[-1][1] if validations else None
    return RunSummary(
        run=manifest.run,
        launches=len(launches),
        job_id=status.chain.job_id if status.chain else manifest.job_id,
        state=status.state.value,
        reason=status.reason,
        nodes=launches[-1].nodes,
        tasks_per_node=manifest.tasks_per_node,
        world=launches[-1].nodes * manifest.tasks_per_node,
        tensor=start.tensor if start else None,
        data=start.data if start else None,
        layout=_layout(start),
        parameters=start.parameters if start else None,
        step=last.step,
        max_steps=start.max_steps if start else None,
        tokens=curves.tokens,
        first_loss=first.loss,
        last_loss=last.loss,
        first_held_out_loss=validations[0][1] if validations else None,
        last_held_out_loss=held_out,
        unigram_entropy=entropy,
        entropy_of=curves.held_out.name if curves.held_out else "held-out tokens",
        below_entropy=None if held_out is None or entropy is None else held_out < entropy,
        tokens_per_second=curves.tokens_per_second,
        seconds=curves.seconds,
    )


def _layout(start: Start | None) -> str:
    """Format the parallel sizes in a trainer's start event: tensor 2 × pipeline 2 × data 4."""
    if start is None or start.tensor is None or start.data is None:
        return formatting.UNKNOWN
    between = (("pipeline", start.pipeline), ("virtual", start.virtual), ("context", start.context))
    sizes = [("tensor", start.tensor), *((n, s) for n, s in between if s and s > 1), ("data", start.data)]
    return " × ".join(f"{name} {size}" for name, size in sizes)
