"""A T5's two stacks and its objective, from NeMo's ``model.encoder``, ``.decoder`` and ``.data``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from slipway.common.errors import UserError
from slipway.trainer.config.architecture import Architecture, max_positions, read_stack
from slipway.trainer.config.rows import SIZE, Row, read_rows
from slipway.trainer.config.values import Values

ENCODER = "model.encoder"
DECODER = "model.decoder"
POSITIONS = ("learned_absolute", "rope", "relative")
_DENSITY = "model.data.masked_lm_prob"


@dataclass(frozen=True)
class Denoising:
    """Span corruption (Raffel et al. 2019).

    Attributes
    ----------
    density
        Share of the tokens that is taken out.
    mean_span
        Mean length of a span in tokens.
    sentinels
        Number of the vocabulary's sentinels, the tokens that replace a span.
    """

    density: Annotated[float, Row(_DENSITY, partial(Values.number, default=0.15, minimum=0.0, below=1.0))]
    # Section 3.3.4: the mean length of a span in the paper's baseline.
    mean_span: Annotated[
        float, Row("model.data.mean_ngram_size", partial(Values.number, default=3.0, minimum=1.0))
    ]
    sentinels: Annotated[int, Row("model.tokenizer.num_sentinel_tokens", partial(SIZE, default=100))]


def is_t5(flat: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a T5, which has a node for each stack.

    Raises
    ------
    UserError
        If it is of a GPT as well.
    """
    marks = [key for key in flat if key == "model.mcore_t5" or key.startswith((f"{ENCODER}.", f"{DECODER}."))]
    if marks and flat.get("model.mcore_gpt"):
        raise UserError(f"model.mcore_gpt=True: expected a GPT or a T5, but there is {marks[0]} too")
    return bool(marks)


def read_stacks(values: Values) -> tuple[Architecture, Architecture]:
    """Read and cross-check the encoder and the decoder.

    Raises
    ------
    UserError
        If a value is invalid, or two values contradict each other.
    """
    length = values.integer("model.seq_length", minimum=1)
    target_length = values.integer("model.data.seq_length_dec", length, minimum=1)
    if values.integer("model.data.seq_length", length, minimum=1) != length:
        values.fail("model.data.seq_length", f"the same as model.seq_length={length}")
    longest = max(length, target_length)
    key = "model.seq_length" if longest == length else "model.data.seq_length_dec"
    positions = max_positions(values, key, longest)
    tied = values.flag("model.share_decoder_tokens_head_embeddings", True)
    encoder = read_stack(values, ENCODER, length, positions, POSITIONS, tied)
    decoder = read_stack(values, DECODER, target_length, positions, POSITIONS, tied)
    _check_agreement(encoder, decoder)
    tensor = values.integer("model.tensor_model_parallel_size", 1, minimum=1)
    sequence = values.flag("model.sequence_parallel", False)
    lengths = {"model.seq_length": length, "model.data.seq_length_dec": target_length} if sequence else {}
    for node, stack in ((ENCODER, encoder), (DECODER, decoder)):
        check_tensor(tensor, node, stack, lengths)
        if stack.position == "relative" and stack.recompute:
            # Recomputed layers would each go back through the positions' one graph.
            values.fail(
                f"{node}.activations_checkpoint_granularity",
                "null: megatron-core 0.16 recomputes nothing with position_embedding_type=relative",
            )
    return encoder, decoder


def read_denoising(values: Values) -> Denoising:
    """Read how much is taken out, in how long spans.

    Raises
    ------
    UserError
        If a value is invalid.
    """
    denoising = read_rows(Denoising, values)
    if denoising.density == 0:
        values.fail(_DENSITY, "a number above 0: the share of tokens to predict")
    return denoising


def _check_agreement(encoder: Architecture, decoder: Architecture) -> None:
    """Check that the stacks fit: the decoder attends to the encoder, and both share the embeddings."""
    shared = {
        "hidden_size": (encoder.hidden_size, decoder.hidden_size),
        "position_embedding_type": (encoder.position, decoder.position),
    }
    if encoder.position == "relative":
        shared["num_attention_heads"] = (encoder.num_attention_heads, decoder.num_attention_heads)
        assert encoder.relative is not None
        assert decoder.relative is not None
        shared["relative_attention_num_buckets"] = (encoder.relative.buckets, decoder.relative.buckets)
        distances = encoder.relative.max_distance, decoder.relative.max_distance
        shared["relative_attention_max_distance"] = distances
    if encoder.position == "rope":
        shared["kv_channels"] = (encoder.kv_channels, decoder.kv_channels)
    for name, (first, second) in shared.items():
        if first != second:
            raise UserError(f"{DECODER}.{name}={second}: expected the same as {ENCODER}.{name}={first}")


def check_tensor(tensor: int, node: str, stack: Architecture, more: Mapping[str, int]) -> None:
    """Check that tensor-parallel ranks can share a stack, and `more` besides."""
    divided = {
        f"{node}.num_attention_heads": stack.num_attention_heads,
        f"{node}.num_query_groups": stack.num_query_groups,
        f"{node}.ffn_hidden_size": stack.ffn_hidden_size,
        **more,
    }
    for key, value in divided.items():
        if value % tensor:
            raise UserError(
                f"{key}={value}: expected a multiple of model.tensor_model_parallel_size={tensor}"
            )
