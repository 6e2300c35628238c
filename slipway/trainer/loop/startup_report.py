"""The lines that a training logs before its first step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from slipway.arithmetic.indexed import FIRST_SPLIT_RULE
from slipway.trainer.config.data import Blend, Data
from slipway.trainer.config.layout import Layout
from slipway.trainer.config.settings import Settings
from slipway.trainer.data.source import BlendedSource, IndexedSource
from slipway.trainer.data.spans import sample_lengths
from slipway.trainer.loop.session import Session
from slipway.trainer.model.backends import (
    has_apex_accumulation,
    overlaps_tensor,
    uses_transformer_engine,
)
from slipway.trainer.model.transformer import overlaps_p2p
from slipway.trainer.optim.build import DISTRIBUTED_OPTIMIZERS, uses_distributed_optimizer
from slipway.trainer.optim.schedule import remark
from slipway.trainer.report.flops import note_unknown_peak
from slipway.trainer.report.progress import count, number
from slipway.trainer.requirements import list_untested


def startup_report(session: Session) -> list[str]:
    """Return the lines that describe a training."""
    return [
        _model(session),
        _world(session),
        _batch(session),
        *_data(session),
        _checkpoints(session),
        *_notes(session),
    ]


def _model(session: Session) -> str:
    shape, encoder = session.settings.architecture, session.settings.encoder
    kind = "T5" if encoder else "GPT"
    layers = f"{encoder.num_layers} + {shape.num_layers}" if encoder else f"{shape.num_layers}"
    precision = "bf16 weights, fp32 masters" if session.settings.precision == "bf16" else "fp32"
    if session.model.config.fp8:
        precision += f", matrices in FP8 ({session.model.config.fp8}, {session.model.config.fp8_recipe})"
    return (
        f"{kind}: {count(session.parameters)} parameters | {layers} layers, "
        f"hidden {shape.hidden_size}, ffn {shape.ffn_hidden_size}, {shape.num_attention_heads} heads | "
        f"attention: {session.attention}{'' if session.model.uncompiled else ', layers compiled'} | "
        f"{precision} | vocabulary {session.vocabulary.size:,} padded to {session.padded_vocabulary:,}"
    )


def _world(session: Session) -> str:
    rank_context = session.rank_context
    device = (
        torch.cuda.get_device_name(rank_context.device)
        if rank_context.device.type == "cuda"
        else "CPU (gloo)"
    )
    threads = (
        "" if rank_context.device.type == "cuda" else f", {number(torch.get_num_threads(), 'thread')} each"
    )
    processes, nodes = number(rank_context.layout.world, "process"), number(_nodes(session), "node")
    return (
        f"world: {processes} on {nodes} | "
        f"{_sizes(rank_context.layout)} | {device}{threads} | rendezvous "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    )


def _nodes(session: Session) -> int:
    configured, world = session.settings.nodes, session.rank_context.world
    return configured if configured is not None else -(-world.size // world.local_size)


def _sizes(layout: Layout) -> str:
    sizes = {"pipeline": layout.pipeline, "virtual": layout.virtual, "context": layout.context}
    others = "".join(f" x {name} {size}" for name, size in sizes.items() if size > 1)
    return f"tensor {layout.tensor}{others} x data {layout.data}"


def _batch(session: Session) -> str:
    settings = session.settings
    line = (
        f"batch: {settings.global_batch} x {settings.seq_length} tokens "
        f"= {settings.tokens_per_step:,} a step{_denoising(settings)} | "
        f"{number(session.rank_context.layout.micro_batches, 'micro batch')} of {settings.micro_batch} "
        "on each data-parallel rank"
    )
    if (ramp := settings.rampup) is None:
        return line
    return f"{line} | growing from {ramp.start} by {ramp.increment} over the first {ramp.samples:,} samples"


def _denoising(settings: Settings) -> str:
    denoising, length = settings.denoising, settings.architecture.seq_length
    if denoising is None:
        return ""
    lengths = sample_lengths(denoising, settings.seq_length, length)
    return (
        f" | each from {lengths.raw} of text: {lengths.noise} in {number(lengths.spans, 'span')} become "
        f"{lengths.targets} targets, padded to {length}"
    )


def _data(session: Session) -> list[str]:
    source = session.training
    if not isinstance(source, IndexedSource | BlendedSource):
        return [f"data: mock sequences | tokenizer: {session.vocabulary.origin}"]
    lines = [
        f"data: {session.settings.data.training} | training {source.tokens:,} tokens in {source.documents:,} "
        f"documents | tokenizer: {session.vocabulary.origin}"
    ]
    if session.settings.data.splits and session.settings.data.split_rule == FIRST_SPLIT_RULE:
        lines.append("data: divided into splits as an earlier version rounded them: so this training began")
    heldout = session.heldout.source if session.heldout else None
    if session.heldout and isinstance(heldout, IndexedSource | BlendedSource):
        lines.append(
            f"held out: {heldout.tokens:,} tokens in {heldout.documents:,} documents, "
            f"{session.heldout.windows:,} windows are evaluated"
        )
    if session.settings.data.splits is None:
        lines.append("data sets are named for each split and taken whole, not by model.data.splits_string")
        lines += _overlap(session.settings.data)
    return lines


def _overlap(data: Data) -> list[str]:
    if data.training is None or data.heldout is None:
        return []
    both = [str(prefix) for prefix in data.heldout.prefixes if prefix in data.training.prefixes]
    return [f"warning: held out and trained on: {', '.join(both)}"] if both else []


def _checkpoints(session: Session) -> str:
    saving = session.settings.saving
    if not saving.enabled:
        return "checkpoints: none, as exp_manager.create_checkpoint_callback=False asks for"
    times = f"after every {saving.every:,} steps and at the end" if saving.every else "at the end"
    best = f"the best {saving.keep} by {saving.monitor} ({saving.mode}) and the newest"
    retained = "all" if saving.keep < 0 else best if saving.keep else "the newest"
    return f"checkpoints: {times}, in {saving.directory} | kept: {retained}"


def _interventions(session: Session) -> Iterator[str]:
    resume, trained_on = session.settings.resume, session.settings.data.training
    steps = resume.lr_freeze_steps
    if session.progress.step < session.intervention_step + steps:
        until = session.intervention_step + steps
        yield f"note: resume.lr_freeze_steps={steps}: the learning rate is 0 up to step {until:,}"
    if resume.lr_scale != 1:
        yield f"note: resume.lr_scale={resume.lr_scale:g}: it multiplies each learning rate"
    if resume.data_generation:
        yield f"note: resume.data_generation={resume.data_generation}: the data have another order"
    for first, end in resume.skip_samples:
        yield f"note: resume.skip_samples: samples {first:,} to {end - 1:,} are passed over"
    for first, weights in resume.exact_weights():
        if trained_on:
            blend = Blend(trained_on.prefixes, tuple(weights))
            yield f"note: resume.data_weights: {blend} from sample {first:,} on"


def _notes(session: Session) -> list[str]:
    settings, device = session.settings, session.rank_context.device
    shape, name = settings.architecture, settings.optimization.name
    notes = []
    if device.type == "cuda" and (
        unknown := note_unknown_peak(torch.cuda.get_device_name(device), settings.operands)
    ):
        notes.append(unknown)
    notes += list_untested()
    if device.type == "cuda" and settings.parallel.overlap_tensor and not overlaps_tensor(settings, device):
        missing = "model.sequence_parallel=True" if not settings.parallel.sequence else "Transformer Engine"
        notes.append(f"warning: model.ub_tp_comm_overlap=True: nothing overlaps without {missing}")
    if device.type == "cuda" and settings.accumulation_fusion and not has_apex_accumulation():
        notes.append(
            "note: model.gradient_accumulation_fusion=True: the head needs Apex for it, which is not there"
            f"{'' if uses_transformer_engine(shape, device) else ', and the layers Transformer Engine'}"
        )
    uncompiled = session.model.uncompiled
    if device.type == "cuda" and uncompiled and not uses_transformer_engine(shape, device):
        notes.append(
            f"note: model.compile_layers={settings.compile_layers}: layers are not compiled: {uncompiled}"
        )
    if device.type == "cuda" and overlaps_p2p(settings.parallel) and not settings.parallel.overlap_p2p:
        notes.append(
            "note: model.overlap_p2p_comm=False: True is used, as two stages with virtual ones need it"
        )
    if device.type == "cuda" and not settings.deterministic:
        notes.append(
            "note: not bitwise repeatable on a GPU: model.deterministic_mode=True is meant to be, and slower"
        )
    if name in DISTRIBUTED_OPTIMIZERS and not uses_distributed_optimizer(settings, device):
        notes.append(
            f"note: model.optim.name={name}: AdamW is used, and every rank keeps whole optimizer states"
        )
    if settings.data.reset_positions and shape.position != "learned_absolute":
        notes.append(
            "note: model.data.reset_position_ids=True: only learned positions are reset; rotary ones are "
            "distances, which are the same wherever a document starts"
        )
    if remarked := remark(settings.optimization):
        notes.append(f"note: {remarked}")
    notes += _interventions(session)
    if session.resumed_from:
        notes.append(f"resuming from {session.resumed_from} at step {session.progress.step}")
    return notes
