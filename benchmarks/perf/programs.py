"""The programs that `train_step.py` and `gpu_step.py` measure: the trainer's step, and those of its peers."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.measuring import Step
from slipway.arithmetic.parameters import padded_vocabulary
from slipway.trainer.config.settings import Settings

if TYPE_CHECKING:
    from plain_gpt import Peer


@dataclass(frozen=True)
class Shape:
    """A GPT-2, or with `is_llama` a Llama: counts of layers, heads and tokens, and sizes.

    A Llama has RMS norms, no biases, SwiGLU, rotary positions, `groups` of queries and an untied head.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int
    micro_batches: int
    dropout: float = 0.0
    is_llama: bool = False
    ffn: int = 0
    groups: int = 0
    rotary_base: int = 500_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "groups", self.groups or self.heads)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.length * self.micro_batch * self.micro_batches

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, {self.length} tokens, "
            f"vocabulary {self.vocabulary:,}, batch {self.micro_batches} x {self.micro_batch}"
            f"{f', dropout {self.dropout}' if self.dropout else ''}"
        )


class Program(NamedTuple):
    """A training of a model: its step, which returns the loss, and its number of parameters."""

    step: Step
    parameters: int


def keys_of(shape: Shape, precision: str, directory: str) -> dict[str, Any]:
    """Return a shape's configuration, with one rank and without Transformer Engine."""
    llama: dict[str, Any] = {
        "model.normalization": "rmsnorm",
        "model.bias": False,
        "model.activation": "fast-swiglu",
        "model.position_embedding_type": "rope",
        "model.rotary_base": shape.rotary_base,
        "model.share_embeddings_and_output_weights": False,
    }
    return {
        "trainer.max_steps": 1000,
        "trainer.gradient_clip_val": 1.0,
        "trainer.precision": "bf16" if precision == "bf16" else 32,
        "exp_manager.explicit_log_dir": directory,
        "model.micro_batch_size": shape.micro_batch,
        "model.global_batch_size": shape.micro_batch * shape.micro_batches,
        "model.encoder_seq_length": shape.length,
        "model.num_layers": shape.layers,
        "model.hidden_size": shape.hidden,
        "model.ffn_hidden_size": shape.ffn,
        "model.num_attention_heads": shape.heads,
        "model.num_query_groups": shape.groups,
        "model.hidden_dropout": shape.dropout,
        "model.attention_dropout": shape.dropout,
        "model.megatron_amp_O2": precision == "bf16",
        "model.transformer_engine": False,
        "model.make_vocab_size_divisible_by": 128,
        "model.override_vocab_size": shape.vocabulary,
        "model.optim.name": "mcore_distributed_optim",
        "model.optim.lr": 1e-4,
        "model.optim.weight_decay": 0.1,
        "model.optim.betas": [0.9, 0.95],
        "model.data.data_impl": "mock",
        **(llama if shape.is_llama else {}),
    }


def our_program(settings: Settings, rank_context: Any, batches: list[Any]) -> Program:
    """Build the trainer's model and optimizer; the step is that of its loop."""
    from slipway.trainer.loop.batch_building import vocabulary_of
    from slipway.trainer.loop.step import StepReduction, train_losses
    from slipway.trainer.model.build import build_model
    from slipway.trainer.model.model import parameter_count
    from slipway.trainer.optim.build import Optimizer

    padded = padded_vocabulary(vocabulary_of(settings).size, settings.architecture.vocab_divisor, 1)
    model = build_model(settings, rank_context, padded)
    optimizer = Optimizer(settings, model, rank_context.device)

    def step() -> float:
        reduction = StepReduction(train_losses(settings, model, iter(batches), len(batches)))
        optimizer.step(1e-4)
        loss, _ = reduction.read()
        optimizer.zero_grad()
        return loss

    return Program(step, parameter_count(model))


def peer_program(peer: Peer, batches: list[Any]) -> Program:
    """Let a peer train on the trainer's micro batches."""
    pairs = [(batch.tokens, batch.labels) for batch in batches]
    return Program(lambda: peer(pairs), peer.parameters)


def micro_batches(settings: Settings, rank_context: Any) -> list[Any]:
    """Make the tokens of a step, once."""
    from slipway.trainer.data.prefetch import move_to_device
    from slipway.trainer.data.source import MockSource
    from slipway.trainer.loop.batch_building import make_batch_builder, vocabulary_of

    vocabulary = vocabulary_of(settings)
    source = MockSource(settings.seq_length, vocabulary.size, settings.seed)
    windows: list[int | None] = list(range(settings.global_batch))
    batch_builder = make_batch_builder(settings, rank_context, vocabulary)
    return [move_to_device(batch, rank_context.device) for batch in batch_builder.batches(source, windows)]


def check_sizes(programs: dict[str, Program]) -> int:
    """Return the number of parameters, the same for all programs."""
    counts = {name: program.parameters for name, program in programs.items()}
    if len(set(counts.values())) != 1:
        raise SystemExit(f"the models differ in size: {counts}")
    return next(iter(counts.values()))


def check_learning(name: str, losses: list[float]) -> None:
    """End the benchmark if a program's loss did not fall over its first steps."""
    if not losses[-1] < losses[0]:
        raise SystemExit(f"{name} does not learn: {losses[0]:.4f}, then {losses[-1]:.4f}")


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port
