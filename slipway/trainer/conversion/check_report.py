"""The report on a converted model: the comparison, the verdict, and the table that shows both."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipway.common.files import write_atomic

FACTOR = 4
REPORT, TABLE = "report.json", "report.txt"
# Below this share of the largest logit a difference is rounding, even if Hugging Face's own is smaller.
_FLOOR = 2.0**-24
_SHOWN = 5


@dataclass(frozen=True)
class Gradient:
    """The difference of a weight's gradients: largest, the same over the largest gradient, and the cosine."""

    absolute: float
    relative: float
    cosine: float


@dataclass(frozen=True)
class Report:
    """The outcome of a comparison.

    Attributes
    ----------
    text, text_checksum, sequences, tokens
        The text: its origin, the SHA-256 of the file or the built-in text, the sequences, and the tokens in
        each.
    ours, theirs
        The largest differences of logits in 32 bits, ours and Hugging Face's, from Hugging Face's in 64.
    largest
        The largest of the exact logits.
    losses
        Nats per token of the three models, ``ours``, ``theirs`` and ``exact``, and of the files' weights as
        they are ``stored``.
    dtype, rounded, rounding, allowed_rounding
        The type of the files' weights, how many of them are not the checkpoint's exactly, and by how much one
        differs at most and may differ, relative to it.
    gradients
        By Hugging Face's names of the weights.
    """

    text: str
    text_checksum: str
    sequences: int
    tokens: int
    ours: float
    theirs: float
    largest: float
    losses: dict[str, float]
    dtype: str
    rounded: int
    rounding: float
    allowed_rounding: float
    gradients: dict[str, Gradient]

    @property
    def ratio(self) -> float:
        """Return how many times as far from the exact logits ours are as Hugging Face's own."""
        return self.ours / max(self.theirs, _FLOOR * self.largest)

    @property
    def passed(self) -> bool:
        """Return whether the two models are the same but for rounding."""
        return math.isfinite(self.ratio) and self.ratio <= FACTOR and self.has_rounded

    @property
    def has_rounded(self) -> bool:
        """Return whether the files' weights are the checkpoint's, rounded."""
        return self.rounding <= self.allowed_rounding

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "version": 1,
            "passed": self.passed,
            "factor": FACTOR,
            "ratio": self.ratio,
            "perplexity": {name: math.exp(min(loss, 700)) for name, loss in self.losses.items()},
            **asdict(self),
        }

    def table(self) -> str:
        """Return the report for people."""
        verdict = "passed" if self.passed else "FAILED"
        losses = self.losses
        rows = [
            f"{self.sequences} sequences of {self.tokens} tokens ({self.text})",
            "",
            f"{'':52}{'ours':>14}{'Hugging Face':>14}",
            f"{'logits, distance from 64 bits':52}{self.ours:14.1e}{self.theirs:14.1e}"
            f"   {self.ratio:.2f}x, {FACTOR}x is allowed: {verdict}",
            f"{'loss, nats per token':52}{losses['ours']:14.6f}{losses['theirs']:14.6f}",
            f"{'perplexity':52}{_power(losses['ours']):>14}{_power(losses['theirs']):>14}",
            "",
            self._weights(),
            "",
            f"{'gradients (not judged)':52}{'absolute':>14}{'relative':>14}{'cosine':>14}",
        ]
        worst = sorted(self.gradients.items(), key=lambda item: -item[1].relative)
        rows += [
            f"  {name:50}{found.absolute:14.1e}{found.relative:14.1e}{found.cosine:14.8f}"
            for name, found in worst[:_SHOWN]
        ]
        if len(worst) > _SHOWN:
            rows.append(f"  {len(worst) - _SHOWN} others: smaller relative differences")
        return "\n".join(rows) + "\n"

    def _weights(self) -> str:
        if not self.rounded:
            return f"weights ({self.dtype}): those of the checkpoint"
        state = "the checkpoint's but for rounding" if self.has_rounded else "FAILED: not the checkpoint's"
        return (
            f"weights ({self.dtype}): {state}: {self.rounded} tensors, by at most {self.rounding:.1e}; "
            f"their loss as they are stored: {self.losses['stored']:.6f}"
        )


def write_report(report: Report, model_dir: Path) -> None:
    """Write a report into a model's directory, for programs and for people."""
    for name, content in ((REPORT, json.dumps(report.to_json(), indent=1) + "\n"), (TABLE, report.table())):
        write_atomic(model_dir / name, content)


def _power(loss: float) -> str:
    return f"{math.exp(loss):,.4f}" if loss < 20 else f"{math.exp(min(loss, 700)):.4e}"
