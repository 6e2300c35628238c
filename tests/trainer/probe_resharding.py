"""A training that changes its layout; run by test_resharding.py in processes forked from a warm one.

``probe_resharding CONFIG OUTPUT STAGES``: the stages are JSON, taken by all ranks one after the other: a
name, what changes in the configuration, and which stage's checkpoint is restored, if any. Each saves what it
has then, and takes the next two steps, whose losses it prints. Checkpoints lie beside the configuration. For
those in shards of the optimizer's buckets it prints the tensors of a resharded copy, which stays; the first
stage is saved in megatron-core's own format for all parallel sizes too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from megatron.core import parallel_state
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from slipway.trainer.checkpoint import reshard, state, store
from slipway.trainer.checkpoint.async_save import AsyncSave
from slipway.trainer.checkpoint.choice import Choice
from slipway.trainer.checkpoint.description import describe
from slipway.trainer.checkpoint.marker import DP_RESHARDABLE, FULLY_RESHARDABLE, Marker
from slipway.trainer.checkpoint.state import Progress
from slipway.trainer.checkpoint.strategies import SaveStrategy
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.data.batches import GPTBatchBuilder
from slipway.trainer.data.order import rank_share
from slipway.trainer.data.source import MockSource
from slipway.trainer.data.vocabulary import Vocabulary
from slipway.trainer.distributed import RankContext, make_rank_context, process_group
from slipway.trainer.logs import LOGGER
from slipway.trainer.loop.step import StepReduction, train_losses
from slipway.trainer.model.build import build_model
from slipway.trainer.optim.build import Optimizer
from slipway.trainer.world import World

# Tokens, and rows of the embedding.
TOKENS, VOCABULARY = 301, 304


@dataclass
class Training:
    """A training without a loop around it."""

    settings: Settings
    rank_context: RankContext
    progress: Progress

    def __post_init__(self) -> None:
        self.model = build_model(self.settings, self.rank_context, VOCABULARY)
        self.optimizer = Optimizer(self.settings, self.model, self.rank_context.device)
        self.strategy = SaveStrategy()

    def step(self) -> float:
        """Take a step and return its loss."""
        settings, layout = self.settings, self.rank_context.layout
        source = MockSource(settings.architecture.seq_length, VOCABULARY, 1)
        batch_builder = GPTBatchBuilder(VOCABULARY, None, settings.micro_batch, self.rank_context.device)
        samples = rank_share(
            self.progress.consumed_samples, settings.global_batch, self.rank_context.data_rank, layout.data
        )
        batches = batch_builder.batches(source, list(samples))
        reduction = StepReduction(train_losses(settings, self.model, batches, layout.micro_batches))
        self.optimizer.step(1e-2)
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.consumed_samples += settings.global_batch
        return reduction.read()[0]

    def save(self, directory: Path, name: str, background: bool = False) -> AsyncSave:
        """Begin to save."""
        layout = self.rank_context.layout
        marker = Marker(
            step=self.progress.step,
            consumed_samples=self.progress.consumed_samples,
            world_size=layout.world,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual,
            context_parallel_size=layout.context,
            architecture={},
            model=describe(self.settings, Vocabulary(TOKENS, 0, "made up"), VOCABULARY).to_json(),
        )
        progress = Progress(self.progress.step, self.progress.consumed_samples)
        inner = self.optimizer.inner
        return state.save(
            directory,
            name,
            self.model,
            inner,
            progress,
            self.rank_context,
            marker,
            self.strategy,
            background,
        )

    def restore(self, path: Path) -> None:
        """Load a checkpoint."""
        checkpoint, problem = store.open_checkpoint(path)
        assert checkpoint, problem
        choice = Choice(checkpoint, load_optimizer=True, is_branch=False)
        self.progress = state.restore(
            choice, self.model, self.optimizer.inner, self.rank_context, self.settings.seed
        )


def main(arguments: list[str]) -> int:
    config = Path(arguments[0])
    base, world = flatten(yaml.safe_load(config.read_text())), World.from_environment(os.environ)
    results: dict[str, Any] = {}
    LOGGER.addHandler(logging.StreamHandler())
    LOGGER.setLevel(logging.INFO)
    with process_group(world, "auto") as device:
        for name, changes, source in json.loads(arguments[2]):
            settings = read_settings({**base, **changes})
            rank_context = make_rank_context(world, make_layout(settings, world.size), device)
            training = Training(settings, rank_context, Progress())
            if source:
                training.restore(config.parent / source)
            else:
                training.step()
                training.step()
            training.save(config.parent, name).finish()
            if (
                not source
                and state.optimizer_format(training.optimizer.inner, rank_context) == DP_RESHARDABLE
            ):
                # Another structure, for which the plans of the training's strategy do not hold.
                strategy, training.strategy = training.strategy, SaveStrategy()
                with patch.object(state, "optimizer_format", lambda *_: FULLY_RESHARDABLE):
                    training.save(config.parent, f"{name}-gathered").finish()
                training.strategy = strategy
            results[name] = _beside(training, config.parent, name)
            parallel_state.destroy_model_parallel()
    if world.is_main:
        for name in results:
            results[name]["tensors"] = _digests(config.parent / name)
            if (gathered := config.parent / f"{name}-gathered").exists():
                results[name]["gathered"] = _digests(gathered)
            results[name]["beside"] = _digests(config.parent / f"{name}-beside")
        Path(arguments[1]).write_text(json.dumps(results))
    return 0


def _beside(training: Training, directory: Path, name: str) -> dict[str, Any]:
    """Save beside the next step: not a byte is written before the step is done."""
    gate, write = threading.Event(), AsyncSave._write

    def write_late(pending: AsyncSave) -> None:
        gate.wait()
        write(pending)

    AsyncSave._write = write_late  # type: ignore[method-assign]
    pending = training.save(directory, f"{name}-beside", background=True)
    AsyncSave._write = write  # type: ignore[method-assign]
    loss = training.step()
    written_early = not pending.is_writing()
    gate.set()
    checkpoint = pending.finish()
    # The first loss does not depend on the optimizer's states.
    return {
        "losses": [loss, training.step()],
        "written_early": written_early,
        "step": checkpoint.marker.step,
        "format": checkpoint.marker.optimizer,
    }


def _digests(path: Path) -> dict[str, str]:
    """Return a digest of each whole tensor in a checkpoint, or in its copy for all parallel sizes."""
    checkpoint, problem = store.open_checkpoint(path)
    assert checkpoint, problem
    if checkpoint.marker.optimizer == DP_RESHARDABLE:
        path = reshard.reshard(checkpoint).path
    reader = FileSystemReader(str(path))
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _load_state_dict(tensors, storage_reader=reader, no_dist=True)
    return {name: f"{tuple(tensor.shape)} {_bits(tensor)}" for name, tensor in sorted(tensors.items())}


def _bits(tensor: Any) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
