"""Everything a running training holds, and how it is put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint import state, store
from trainer.checkpoint.state import Progress
from trainer.config.layout import padded_vocabulary
from trainer.config.saving import Saving
from trainer.config.settings import Settings
from trainer.data.batches import BatchMaker
from trainer.data.heldout import heldout_windows, unigram_entropy
from trainer.data.indexed import IndexedSource, open_indexed
from trainer.data.order import Order
from trainer.data.source import MockSource, Source
from trainer.data.vocabulary import Vocabulary, read_vocabulary
from trainer.distributed import Place, from_main, together
from trainer.errors import UserError
from trainer.logs import LOGGER
from trainer.model.gpt import build_model, parameter_count
from trainer.optim.build import Optimizer
from trainer.optim.schedule import CosineAnnealing
from trainer.report.reporter import Reporter


@dataclass
class Session:
    """A training that is ready to step.

    `resumed_from` is the checkpoint it continues from; `training_id` is rank 0's name for the training over
    all of its launches.
    """

    settings: Settings
    place: Place
    vocabulary: Vocabulary
    padded_vocabulary: int
    training: Source
    heldout: Source | None
    heldout_batches: list[list[int | None]]
    order: Order
    maker: BatchMaker
    masked_token: int | None
    model: Any
    optimizer: Optimizer
    schedule: CosineAnnealing
    reporter: Reporter
    parameters: int
    shape: dict[str, Any]
    progress: Progress = field(default_factory=Progress)
    training_id: str = field(default_factory=store.unique)
    resumed_from: Path | None = None


def open_session(settings: Settings, place: Place) -> Session:
    """Open the data, build the model and optimizer, and restore the newest checkpoint if asked to.

    Raises
    ------
    UserError
        If files are missing or do not fit the configuration.
    """
    vocabulary = together(lambda: read_vocabulary(settings.data))
    training, heldout = together(lambda: _open_sources(settings, vocabulary))
    padded = padded_vocabulary(vocabulary.size, settings.architecture.vocab_divisor, place.layout.tensor)
    model = build_model(settings, place, padded)
    masked = vocabulary.end_of_text if settings.data.eod_mask_loss else None
    session = Session(
        settings=settings,
        place=place,
        vocabulary=vocabulary,
        padded_vocabulary=padded,
        training=training,
        heldout=heldout,
        heldout_batches=_heldout_batches(settings, place, heldout),
        order=Order(training.windows, settings.seed),
        maker=BatchMaker(vocabulary.size, masked, settings.micro_batch, place.device),
        masked_token=masked,
        model=model,
        optimizer=Optimizer(settings, model, place.device),
        schedule=CosineAnnealing.from_settings(settings.optimization),
        reporter=Reporter(settings, place),
        parameters=parameter_count(model, place.layout.tensor),
        shape=state.shapes(settings.architecture, padded, settings.precision),
    )
    _resume(session)
    return session


def report_heldout(session: Session) -> None:
    """Tell the entropy of the held-out tokens; mock tokens have no meaning to compare with."""
    if session.heldout is None or session.settings.data.kind == "mock" or not session.place.is_main:
        return
    tokens, entropy = unigram_entropy(
        session.heldout, session.heldout_batches, session.masked_token, session.vocabulary.size
    )
    session.reporter.heldout(tokens, entropy)


def _open_sources(settings: Settings, vocabulary: Vocabulary) -> tuple[Source, Source | None]:
    data, length = settings.data, settings.architecture.seq_length
    wants_heldout = settings.val_batches > 0
    if data.kind == "mock":
        heldout = MockSource(length, vocabulary.size, settings.seed, True) if wants_heldout else None
        return MockSource(length, vocabulary.size, settings.seed, False), heldout
    assert data.prefix is not None
    dataset = open_indexed(data.prefix)
    return (
        IndexedSource(dataset, 0, data.splits, length),
        IndexedSource(dataset, 1, data.splits, length) if wants_heldout else None,
    )


def _heldout_batches(settings: Settings, place: Place, heldout: Source | None) -> list[list[int | None]]:
    if heldout is None:
        return []
    multiple = settings.micro_batch * place.layout.data
    return heldout_windows(
        heldout.windows, settings.val_batches, settings.global_batch, multiple, settings.seed
    )


def _resume(session: Session) -> None:
    output, saving = session.settings.output, session.settings.saving
    if not output.resume:
        return
    found = from_main(lambda: _find(saving))
    if found is None:
        if output.resume_or_start:
            return
        raise UserError(
            f"exp_manager.resume_ignore_no_checkpoint=False, but there is no complete checkpoint in "
            f"{saving.directory}: True starts from step 0"
        )
    session.progress = state.restore(
        found, session.model, session.optimizer.inner, session.place, session.shape
    )
    session.training_id = found.marker.training or session.training_id
    session.resumed_from = found.path


def _find(saving: Saving) -> store.Found | None:
    found, torn = store.newest(saving.directory)
    for path, reason in torn.items():
        LOGGER.warning("skipping %s: it is not a complete checkpoint (%s)", path, reason)
    if found and saving.enabled:
        # The launch before may have been killed between naming a checkpoint and this.
        store.point_latest(found.path)
    return found
