"""The loss of checkpoints on held-out data, by the training's own model, data and batches, in any layout."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

from slipway.arithmetic.parameters import padded_vocabulary
from slipway.common.errors import UserError
from slipway.trainer.checkpoint import compatible, reader, state
from slipway.trainer.checkpoint.choice import check_owners
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.layout import Layout
from slipway.trainer.config.settings import Settings
from slipway.trainer.data.vocabulary import Vocabulary
from slipway.trainer.distributed import RankContext, broadcast_from_rank0, run_on_all_ranks
from slipway.trainer.errors import DivergedError
from slipway.trainer.evaluation.other_data import differences
from slipway.trainer.evaluation.spec import Perplexity
from slipway.trainer.logs import LOGGER
from slipway.trainer.loop.batch_building import make_batch_builder, vocabulary_of
from slipway.trainer.loop.validation import (
    HeldOut,
    choose_heldout,
    evaluate,
    find_heldout,
    open_heldout_source,
)
from slipway.trainer.model.build import build_model
from slipway.trainer.model.model import Model

_REPORT_SECONDS = 10.0


@dataclass
class Measured:
    """The held-out loss of a checkpoint."""

    checkpoint: Checkpoint
    loss: float
    tokens: int
    seconds: float

    def values(self) -> dict[str, Any]:
        """Return the values of the result; the loss is in nats per token."""
        return {"loss": self.loss, "perplexity": perplexity_of(self.loss), "tokens": self.tokens}


def perplexity_of(loss: float) -> float | None:
    """Return ``exp(loss)``; None where that is no number that a file can hold."""
    return math.exp(loss) if loss < 700 else None


class HeldOutEvaluation:
    """The evaluation of one checkpoint after the other; every rank has one.

    Parameters
    ----------
    settings
        Those of :func:`slipway.trainer.evaluation.spec.read_heldout_settings`.
    """

    def __init__(self, settings: Settings, rank_context: RankContext, perplexity: Perplexity) -> None:
        self._settings, self._rank_context, self._perplexity = settings, rank_context, perplexity
        self._vocabulary = run_on_all_ranks(lambda: vocabulary_of(settings))
        self._heldout = self._open(perplexity.split)
        self._model: Model | None = None
        self._padded = 0
        self._reported = 0.0

    @property
    def windows(self) -> int:
        """Return the number of windows that are evaluated."""
        return self._heldout.windows

    def measure(self, checkpoint: Checkpoint) -> Measured:
        """Return the held-out loss of a checkpoint; every rank calls this.

        Raises
        ------
        UserError
            If the checkpoint is damaged, another user's, or does not fit the configuration.
        DivergedError
            If the loss is not finite.
        """
        began = self._reported = time.perf_counter()
        self._check(checkpoint)
        model = self._model_for(checkpoint)
        state.load_weights(checkpoint.path, model)
        step, numbers = checkpoint.marker.step, itertools.count()
        result = evaluate(
            self._settings,
            self._rank_context,
            model,
            self._heldout,
            lambda: self._report(step, next(numbers)),
        )
        assert result is not None
        if not math.isfinite(result.mean):
            raise DivergedError(f"the held-out loss of {checkpoint.path} is {result.mean}")
        return Measured(checkpoint, result.mean, result.tokens, time.perf_counter() - began)

    def _report(self, step: int, batch: int) -> bool:
        """Log the number of a batch now and then; return False, as nothing stops an evaluation."""
        if time.perf_counter() - self._reported >= _REPORT_SECONDS:
            self._reported = time.perf_counter()
            LOGGER.info("step %d | %d of %d batches", step, batch, len(self._heldout.batches))
        return False

    def _open(self, split: str) -> HeldOut:
        settings, vocabulary = self._settings, self._vocabulary
        indices = broadcast_from_rank0(lambda: find_heldout(settings))
        source = run_on_all_ranks(lambda: open_heldout_source(settings, vocabulary, indices, split))
        builder = make_batch_builder(settings, self._rank_context, vocabulary)
        return choose_heldout(settings, self._rank_context, source, builder)

    def _check(self, checkpoint: Checkpoint) -> None:
        trusted = self._settings.resume.trust_owner
        broadcast_from_rank0(lambda: check_owners(checkpoint.path, None, trusted))
        damage = reader.verify(checkpoint, self._rank_context)
        if damage is not None:
            raise UserError(f"the checkpoint {checkpoint.path} is damaged ({damage})")

    def check_data(self, checkpoint: Checkpoint) -> None:
        """Raise UserError if the data are not those of a checkpoint's training; every rank calls this."""
        found = broadcast_from_rank0(
            lambda: list(differences(checkpoint.marker, self._settings, self._perplexity))
        )
        changes = "; ".join(found)
        if changes and not self._perplexity.other_data:
            raise UserError(
                f"the checkpoint {checkpoint.path} was trained on other data: {changes}: expected the "
                "training's, or data to measure in evaluation.perplexity.data_prefix; "
                "evaluation.perplexity.other_data=True measures on these"
            )
        if changes:
            LOGGER.warning("the data are not the training's of %s: %s", checkpoint.path, changes)

    def _model_for(self, checkpoint: Checkpoint) -> Model:
        """Return a model of the checkpoint's shapes; its padding is part of them, and of the loss."""
        settings, layout = self._settings, self._rank_context.layout
        divisor = settings.architecture.vocab_divisor
        expected = padded_vocabulary(self._vocabulary.size, divisor, layout.tensor)
        padded = int(checkpoint.marker.architecture.get("padded_vocabulary", expected))
        _check_vocabulary(checkpoint, self._vocabulary, padded, layout)
        compatible.check(checkpoint, compatible.shapes(settings, padded), layout)
        if self._model is None or padded != self._padded:
            self._model = build_model(settings, self._rank_context, padded, is_trained=False)
            self._padded = padded
        return self._model


def _check_vocabulary(checkpoint: Checkpoint, vocabulary: Vocabulary, padded: int, layout: Layout) -> None:
    if padded < vocabulary.size:
        raise UserError(
            f"model.tokenizer has {vocabulary.size:,} tokens ({vocabulary.origin}), but the checkpoint "
            f"{checkpoint.path} has embeddings of {padded:,}: it was trained with another tokenizer"
        )
    if padded % layout.tensor:
        raise UserError(
            f"the checkpoint {checkpoint.path} has embeddings of {padded:,} tokens, which {layout.tensor} "
            "tensor-parallel ranks do not share evenly: expected another "
            "evaluation.perplexity.layout.tensor"
        )
