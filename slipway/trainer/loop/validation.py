"""The loss on held-out data, computed by all ranks: a training's validation, and an evaluation's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from slipway.trainer.config.settings import Settings
from slipway.trainer.data import tokenized
from slipway.trainer.data.heldout import heldout_windows
from slipway.trainer.data.order import rank_share
from slipway.trainer.data.prefetch import move_to_device
from slipway.trainer.data.seeds import HELDOUT
from slipway.trainer.data.source import MockSource, Source
from slipway.trainer.data.training_data import Indices, find_indices, open_heldout, window_length
from slipway.trainer.data.vocabulary import Vocabulary
from slipway.trainer.distributed import RankContext
from slipway.trainer.loop.batch_building import BatchBuilder
from slipway.trainer.loop.step import evaluate_losses
from slipway.trainer.model.model import Model


@dataclass(frozen=True)
class HeldOut:
    """Held-out data.

    Attributes
    ----------
    source
        Their windows.
    batches
        The numbers of the windows of each batch, None for padding.
    builder
        Makes micro batches of them.
    """

    source: Source
    batches: list[list[int | None]]
    builder: BatchBuilder

    @property
    def windows(self) -> int:
        """Return the number of windows that are evaluated."""
        return sum(window is not None for batch in self.batches for window in batch)


@dataclass(frozen=True)
class LossSum:
    """The sum of the losses of target tokens, in nats, and the number of these tokens."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Return the loss in nats per token."""
        return self.total / max(self.tokens, 1)


def find_heldout(settings: Settings) -> Indices:
    """Return the sample indices of the held-out data; one process does this for all.

    Raises
    ------
    UserError
        If a file is missing or not of the format.
    """
    if settings.data.kind == "mock":
        return {}
    indices = find_indices(replace(settings.data, training=None), heldout=True)
    tokenized.check(settings.data, indices)
    return indices


def open_heldout_source(
    settings: Settings, vocabulary: Vocabulary, indices: Indices, split: str = "validation"
) -> Source:
    """Open the held-out data; of mock data each split is the same.

    Raises
    ------
    UserError
        As :func:`slipway.trainer.data.training_data.open_heldout`.
    """
    length = window_length(settings)
    if settings.data.kind == "mock":
        return MockSource(length, vocabulary.size - vocabulary.sentinels, settings.seed, HELDOUT)
    return open_heldout(settings.data, indices, length, split)


def choose_heldout(
    settings: Settings, rank_context: RankContext, source: Source, builder: BatchBuilder
) -> HeldOut:
    """Return the windows of a source that a validation evaluates (``trainer.limit_val_batches``)."""
    multiple = settings.micro_batch * rank_context.layout.data * rank_context.layout.group
    batches = heldout_windows(source, settings.val_batches, settings.global_batch, multiple, settings.seed)
    return HeldOut(source, batches, builder)


def evaluate(
    settings: Settings,
    rank_context: RankContext,
    model: Model,
    heldout: HeldOut,
    is_stopped: Callable[[], bool] = lambda: False,
) -> LossSum | None:
    """Return the loss of a model on held-out data; every rank calls this.

    Parameters
    ----------
    model
        The model, whose weights are gathered.
    is_stopped
        Called before each batch, with the same answer on all ranks.

    Returns
    -------
    LossSum or None
        The same on all ranks; None if `is_stopped` said so.
    """
    total, tokens = 0.0, 0.0
    for windows in heldout.batches:
        if is_stopped():
            return None
        share = rank_share(0, len(windows), rank_context.data_rank, rank_context.layout.data)
        mine = [windows[index] for index in share]
        micro_batches = heldout.builder.batches(heldout.source, mine)
        batches = (move_to_device(batch, rank_context.device) for batch in micro_batches)
        sums = evaluate_losses(settings, model, batches, len(mine) // settings.micro_batch)
        total, tokens = total + float(sums[0]), tokens + float(sums[1])
    return LossSum(total, round(tokens))
