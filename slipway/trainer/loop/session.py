"""The session of a training: its data, model, optimizer and progress, opened from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipway.arithmetic.parameters import padded_vocabulary
from slipway.common.errors import UserError
from slipway.trainer.checkpoint import compatible, initial_weights, reader, state, store
from slipway.trainer.checkpoint.choice import Choice, Chooser
from slipway.trainer.checkpoint.description import Description, describe
from slipway.trainer.checkpoint.state import Progress
from slipway.trainer.config.settings import Settings
from slipway.trainer.conversion.teacher import Teacher, open_teacher
from slipway.trainer.data import identity, tokenized
from slipway.trainer.data.heldout import unigram_entropy
from slipway.trainer.data.order import SampleOrder
from slipway.trainer.data.source import MockSource, Source
from slipway.trainer.data.training_data import Indices, find_indices, make_order, open_training, window_length
from slipway.trainer.data.vocabulary import Vocabulary
from slipway.trainer.distributed import RankContext, broadcast_from_rank0, run_on_all_ranks
from slipway.trainer.logs import LOGGER
from slipway.trainer.loop.batch_building import BatchBuilder, make_batch_builder, vocabulary_of
from slipway.trainer.loop.validation import HeldOut, choose_heldout, open_heldout_source
from slipway.trainer.model.build import build_model
from slipway.trainer.model.kernels import describe_attention
from slipway.trainer.model.model import Model, parameter_count
from slipway.trainer.optim.build import Optimizer
from slipway.trainer.optim.schedule import Schedule, freeze, make_schedule, rate_change
from slipway.trainer.report.reporter import Reporter


@dataclass
class Session:
    """A training that is ready to step.

    `resumed_from` is the checkpoint it continues from; `intervention_step` is the step after which ``resume``
    changed the training, 0 without a change; `training_id` is rank 0's name for the training over all of its
    launches; `data_identity` is what rank 0 finds the files of the data to be.
    """

    settings: Settings
    rank_context: RankContext
    vocabulary: Vocabulary
    padded_vocabulary: int
    training: Source
    heldout: HeldOut | None
    order: SampleOrder
    batch_builder: BatchBuilder
    model: Model
    optimizer: Optimizer
    schedule: Schedule
    reporter: Reporter
    parameters: int
    shape: dict[str, Any]
    data_identity: identity.Identity
    progress: Progress = field(default_factory=Progress)
    training_id: str = field(default_factory=store.make_suffix)
    resumed_from: Path | None = None
    intervention_step: int = 0

    @property
    def attention(self) -> str:
        """Return what computes the attention of its layers."""
        return describe_attention(self.settings, self.model.config, self.rank_context.device)

    @property
    def description(self) -> Description:
        """Return what its checkpoints say of the model."""
        return describe(self.settings, self.vocabulary, self.padded_vocabulary, self.data_identity)


def open_session(settings: Settings, rank_context: RankContext) -> Session:
    """Open the data, build the model and optimizer, and restore the newest checkpoint if asked to.

    Raises
    ------
    UserError
        If files are missing or do not fit the configuration.
    """
    settings = settings.set_split_rule(broadcast_from_rank0(partial(_split_rule, settings)))
    vocabulary = run_on_all_ranks(lambda: vocabulary_of(settings))
    data = settings.data
    # Rank 0 alone reads the index files; the others take its word and compare the sizes of the data.
    indices: Indices = broadcast_from_rank0(
        lambda: {} if data.kind == "mock" else find_indices(data, settings.val_batches > 0)
    )
    training, heldout = run_on_all_ranks(lambda: _open_sources(settings, vocabulary, indices))
    padded = padded_vocabulary(
        vocabulary.size, settings.architecture.vocab_divisor, rank_context.layout.tensor
    )
    teacher = open_teacher(settings, rank_context, vocabulary)
    model = build_model(settings, rank_context, padded, teacher=teacher)
    batch_builder = make_batch_builder(settings, rank_context, vocabulary)
    session = Session(
        settings=settings,
        rank_context=rank_context,
        vocabulary=vocabulary,
        padded_vocabulary=padded,
        training=training,
        heldout=choose_heldout(settings, rank_context, heldout, batch_builder) if heldout else None,
        order=make_order(training, settings.seed, settings.resume),
        batch_builder=batch_builder,
        model=model,
        optimizer=Optimizer(settings, model, rank_context.device),
        schedule=make_schedule(settings.optimization, settings.resume.lr_scale),
        reporter=Reporter(settings, rank_context, padded, teacher.shape_for(settings) if teacher else None),
        parameters=parameter_count(model),
        shape=compatible.shapes(settings, padded),
        data_identity=broadcast_from_rank0(lambda: _data_identity(settings)),
    )
    _begin(session, teacher)
    session.schedule = freeze(session.schedule, session.intervention_step, settings.resume.lr_freeze_steps)
    # After the comparison with a checkpoint, which names the files that were exchanged.
    broadcast_from_rank0(lambda: tokenized.check(settings.data, indices))
    return session


def report_heldout(session: Session) -> None:
    """Report the entropy of the held-out tokens; mock tokens have no meaning to compare with."""
    if session.heldout is None or session.settings.data.kind == "mock" or not session.rank_context.is_main:
        return
    heldout = session.heldout
    tokens, entropy = unigram_entropy(
        lambda window: heldout.builder.targets(heldout.source, window),
        heldout.batches,
        session.vocabulary.size,
    )
    session.reporter.report_heldout(tokens, entropy)


def _split_rule(settings: Settings) -> str:
    directory, branch = settings.saving.directory, settings.resume.checkpoint
    places = (directory, directory / branch) if branch else (directory,)
    return store.split_rule(*places if settings.output.resume else ())


def _data_identity(settings: Settings) -> identity.Identity:
    blends = filter(None, (settings.data.training, settings.data.heldout))
    prefixes = [prefix for blend in blends for prefix in blend.prefixes]
    teacher = settings.distillation.teacher if settings.distillation else None
    return identity.identify_data(settings.data, prefixes, teacher)


def _open_sources(
    settings: Settings, vocabulary: Vocabulary, indices: Indices
) -> tuple[Source, Source | None]:
    length = window_length(settings)
    training: Source
    if settings.data.kind == "mock":
        text = vocabulary.size - vocabulary.sentinels
        training = MockSource(length, text, settings.seed, settings.resume.data_generation)
    else:
        training = open_training(settings.data, indices, length)
    heldout = open_heldout_source(settings, vocabulary, indices) if settings.val_batches else None
    return training, heldout


def _begin(session: Session, teacher: Teacher | None) -> None:
    """Continue from the run's own checkpoint, or start from the weights of another one, or of the teacher."""
    _resume(session)
    settings, optimizer, rank_context = session.settings, session.optimizer.inner, session.rank_context
    if session.resumed_from is not None:
        return
    if settings.restore_from is not None:
        initial_weights.load(
            settings.restore_from, settings, session.description, rank_context, session.model, optimizer
        )
    elif teacher is not None and settings.distillation and settings.distillation.starts_from_teacher:
        initial_weights.take_layers(teacher, session.description, rank_context, session.model, optimizer)


def _resume(session: Session) -> None:
    output, saving = session.settings.output, session.settings.saving
    if not output.resume:
        return
    choice = _choose(session)
    if choice is None:
        if output.resume_or_start:
            return
        raise UserError(
            f"exp_manager.resume_ignore_no_checkpoint=False, but there is no complete checkpoint in "
            f"{saving.directory}: True starts from step 0"
        )
    marker, resume = choice.checkpoint.marker, session.settings.resume
    compatible.check(choice.checkpoint, session.shape, session.rank_context.layout)
    form = state.optimizer_format(session.optimizer.inner, session.rank_context)
    compatible.check_optimizer(choice, form, session.rank_context.layout)
    accepted = session.settings.data.accepted
    broadcast_from_rank0(lambda: compatible.check_data(choice.checkpoint, session.data_identity, accepted))
    compatible.check_past(choice.checkpoint, resume)
    session.progress = state.restore(
        choice, session.model, session.optimizer.inner, session.rank_context, session.settings.seed
    )
    if not choice.is_branch:
        session.training_id = marker.training or session.training_id
    session.resumed_from = choice.checkpoint.path
    goes_on = resume.was_made(marker.resume)
    session.intervention_step = marker.intervention_step if goes_on else session.progress.step
    planned = marker.configuration.get("trainer.max_steps")
    change = rate_change(session.settings.configuration, planned, session.progress.step)
    if change and session.rank_context.is_main:
        LOGGER.warning(
            "trainer.max_steps=%d, planned were %s: it changes the learning rate of step %d from %.2g to "
            "%.2g; model.optim.sched.max_steps=%s keeps it",
            *(session.settings.max_steps, planned, *change, planned),
        )


def _choose(session: Session) -> Choice | None:
    """Return the checkpoint to start from, whose files are verified."""
    chooser = Chooser(session.settings.saving, session.settings.resume, session.reporter.report_damaged)
    while True:
        choice = broadcast_from_rank0(chooser.choose)
        wrong = reader.verify(choice.checkpoint, session.rank_context) if choice else None
        if choice is None or wrong is None:
            return choice
        broadcast_from_rank0(partial(chooser.reject, choice, wrong))
