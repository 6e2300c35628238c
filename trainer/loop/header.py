"""What is said once, before the first step."""

from __future__ import annotations

import os

import torch

from trainer.data.indexed import IndexedSource
from trainer.loop.session import Session
from trainer.model.gpt import uses_transformer_engine
from trainer.optim.build import DISTRIBUTED_OPTIMIZERS, uses_distributed_optimizer
from trainer.report.progress import count


def header(session: Session, unused: list[str]) -> list[str]:
    """Return the lines that describe a training.

    Parameters
    ----------
    session
        The training.
    unused
        Keys of the configuration that change nothing here, with the reasons.
    """
    return [
        _model(session),
        _world(session),
        _batch(session),
        *_data(session),
        _checkpoints(session),
        *_notes(session),
        *_unused(unused),
    ]


def _model(session: Session) -> str:
    shape = session.settings.architecture
    precision = "bf16 weights, fp32 masters" if session.settings.precision == "bf16" else "fp32"
    return (
        f"GPT: {count(session.parameters)} parameters | {shape.num_layers} layers, "
        f"hidden {shape.hidden_size}, ffn {shape.ffn_hidden_size}, {shape.num_attention_heads} heads | "
        f"{precision} | vocabulary {session.vocabulary.size:,} padded to {session.padded_vocabulary:,}"
    )


def _world(session: Session) -> str:
    place = session.place
    device = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU (gloo)"
    threads = "" if place.device.type == "cuda" else f", {torch.get_num_threads()} threads each"
    return (
        f"world: {place.layout.world} processes on {session.settings.nodes} nodes | "
        f"tensor {place.layout.tensor} x data {place.layout.data} | {device}{threads} | rendezvous "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    )


def _batch(session: Session) -> str:
    settings = session.settings
    return (
        f"batch: {settings.global_batch} x {settings.architecture.seq_length} tokens "
        f"= {settings.tokens_per_step:,} a step | {session.place.layout.micro_batches} micro batches of "
        f"{settings.micro_batch} on each data-parallel rank"
    )


def _data(session: Session) -> list[str]:
    source = session.training
    if not isinstance(source, IndexedSource):
        return [f"data: mock sequences | tokenizer: {session.vocabulary.origin}"]
    lines = [
        f"data: {session.settings.data.prefix} | training {source.tokens:,} tokens in {source.documents:,} "
        f"documents | tokenizer: {session.vocabulary.origin}"
    ]
    if isinstance(session.heldout, IndexedSource):
        evaluated = sum(window is not None for batch in session.heldout_batches for window in batch)
        lines.append(
            f"held out: {session.heldout.tokens:,} tokens in {session.heldout.documents:,} documents, "
            f"of which {evaluated:,} windows are evaluated"
        )
    return lines


def _checkpoints(session: Session) -> str:
    saving = session.settings.saving
    if not saving.enabled:
        return "checkpoints: none, as exp_manager.create_checkpoint_callback=False asks for"
    often = f"after every {saving.every:,} steps and at the end" if saving.every else "at the end"
    best = f"the best {saving.keep} by {saving.monitor} ({saving.mode}) and the newest"
    kept = "all" if saving.keep < 0 else best if saving.keep else "the newest"
    return f"checkpoints: {often}, in {saving.directory} | kept: {kept}"


def _notes(session: Session) -> list[str]:
    settings, device = session.settings, session.place.device
    shape, name, schedule = settings.architecture, settings.optimization.name, session.schedule
    notes = []
    if settings.accelerator in ("gpu", "cuda") and device.type == "cpu":
        notes.append(f"note: trainer.accelerator={settings.accelerator}: there is no CUDA device, so the CPU")
    if shape.transformer_engine and device.type == "cuda" and not uses_transformer_engine(shape, device):
        notes.append("note: Transformer Engine is not importable: megatron-core's local layers")
    if name in DISTRIBUTED_OPTIMIZERS and not uses_distributed_optimizer(settings, device):
        notes.append(f"note: model.optim.name={name}: AdamW here, every rank keeps whole optimizer states")
    if schedule.decay <= 0:
        notes.append(
            f"note: warm-up ({schedule.warmup}) and constant steps ({schedule.constant}) fill the "
            f"{schedule.total} steps of the schedule: no cosine in between"
        )
    if session.resumed_from:
        notes.append(f"resuming from {session.resumed_from} at step {session.progress.step}")
    return notes


def _unused(unused: list[str]) -> list[str]:
    return ["keys without effect here:", *(f"  {line}" for line in unused)] if unused else []
