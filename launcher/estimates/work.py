"""What of a model its speed depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from launcher.estimates.countable import has_fused_attention, is_countable, model_type_of
from launcher.estimates.parallelism import Stack as Found
from launcher.estimates.parallelism import is_encoder_decoder, stacks_of
from launcher.estimates.values import Values, full
from launcher.parameters import count_parameters, vocabulary_size

# What the time of a step is not known of, as people call it.
_NOT_TIMED = {
    "model.num_moe_experts": "how long experts take is not estimated",
    "model.multi_latent_attention": "how long multi-latent attention takes is not estimated",
    "model.window_size": "how long attention to a sliding window takes is not estimated",
}
# A vocabulary of this size is counted with where the tokenizer's is not known.
_VOCABULARY = 50_304


class Stack(NamedTuple):
    """Layers that are alike. `attends_to` has the length of what each attention of a layer looks at.

    `width` and `kv_width` are those of all queries and of all keys, `ways_in` the matrices on the way into
    the MLP, `reductions` how often tensor parallel ranks add up their parts in a forward pass.
    """

    layers: int
    hidden: int
    heads: int
    width: int
    kv_width: int
    ffn: int
    ways_in: int
    length: int
    attends_to: tuple[int, ...]
    causal: bool

    @property
    def reductions(self) -> int:
        return len(self.attends_to) + 1

    def products(self, tensor: int) -> Iterator[tuple[float, float]]:
        """The matrices of a layer, as a rank of tensor parallel has them: inner side × columns."""
        for _ in self.attends_to:
            yield self.hidden, (self.width + 2 * self.kv_width) / tensor
            yield self.width / tensor, self.hidden
        yield self.hidden, self.ways_in * self.ffn / tensor
        yield self.ffn / tensor, self.hidden


class Work(NamedTuple):
    """A model, and what its configuration lets overlap with computing."""

    stacks: tuple[Stack, ...]
    vocabulary: int
    parameters: int
    devices: int
    flash: bool
    overlaps_tensor: bool
    overlaps_pipeline: bool
    overlaps_data: bool

    def stages(self, stack: Stack, pipeline: int) -> int:
        """The pipeline's stages that a stack has: a T5's encoder the first half of them."""
        if len(self.stacks) == 1 or pipeline == 1:
            return pipeline
        return pipeline // 2 if stack is self.stacks[0] else pipeline - pipeline // 2


def work_of(values: Values, devices: int, engine: str) -> Work | None:
    """What a job's model comes to; ``None`` if one of its sizes is not known, or how long it takes."""
    model, stacks = values.node("model"), _stacks(values)
    if model is None or not stacks or not is_countable(values) or untimed(values) is not None:
        return None
    vocabulary = vocabulary_size(model) or _VOCABULARY
    return Work(
        stacks=stacks,
        vocabulary=vocabulary,
        parameters=count_parameters(model, vocabulary, model_type_of(values)),
        devices=devices,
        flash=all(has_fused_attention(values, one.node, engine) for one in stacks_of(values)),
        overlaps_tensor=values.flag("model.ub_tp_comm_overlap"),
        overlaps_pipeline=values.flag("model.overlap_p2p_comm"),
        overlaps_data=values.flag("model.optim.overlap_grad_sync"),
    )


def untimed(values: Values) -> str | None:
    """Return why the steps of a good configuration are not timed, with the key; ``None`` if they are."""
    for key, why in _NOT_TIMED.items():
        if values.raw(key):
            return f"{full(key)}={values.raw(key)}: {why}"
    return None


def _stacks(values: Values) -> tuple[Stack, ...]:
    two = is_encoder_decoder(values)
    length = values.whole("model.seq_length" if two else "model.encoder_seq_length")
    found = stacks_of(values)
    if length is None or any(None in (one.layers, one.hidden, one.heads) for one in found):
        return ()
    if not two:
        return tuple(_stack(values, one, length, (length,)) for one in found)
    inner = values.whole("model.data.seq_length_dec", length) or length
    encoder, decoder = found
    # Both look at themselves, and the decoder at the encoder too.
    return _stack(values, encoder, length, (length,)), _stack(values, decoder, inner, (inner, length))


def _stack(values: Values, found: Found, length: int, attends_to: tuple[int, ...]) -> Stack:
    assert found.layers and found.hidden and found.heads
    head = found.kv_channels or max(found.hidden // found.heads, 1)
    return Stack(
        layers=found.layers,
        hidden=found.hidden,
        heads=found.heads,
        width=head * found.heads,
        kv_width=head * (found.groups or found.heads),
        ffn=found.ffn or 4 * found.hidden,
        ways_in=2 if str(values.raw(f"{found.node}.activation")).endswith("glu") else 1,
        length=length,
        attends_to=attends_to,
        causal=found.node != "model.encoder",
    )
