"""Sequence lengths: what the data gives, what the model takes, and what it has positions for."""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Iterator

from launcher.checks.findings import Finding, error
from launcher.estimates.parallelism import is_encoder_decoder
from launcher.estimates.values import Values, full

_DATA = "model.data.seq_length"
_DECODER_DATA = "model.data.seq_length_dec"
_POSITIONS = "model.max_position_embeddings"
# The mean length of a masked span where the configuration does not say: the paper's.
_MEAN_SPAN = 3.0


def sequence_problems(values: Values) -> Iterator[Finding]:
    """The lengths agree.

    NeMo's GPT is built for `encoder_seq_length` (megatron_gpt_model.py, max_sequence_length, and the shapes
    that pipeline stages exchange) and fed `data.seq_length`; a T5 has `seq_length` for the former.
    """
    key = "model.seq_length" if is_encoder_decoder(values) else "model.encoder_seq_length"
    length = values.whole(key)
    if length is None:
        return
    data = values.whole(_DATA)
    if data is not None and data != length:
        told = f"the model is built for sequences of {length} tokens ({full(key)})"
        yield error("model.sequence", _DATA, data, told, f"{length}, or ${{{full(key)}}}", also=(key,))
    positions = values.whole(_POSITIONS)
    if positions is not None and positions < length and _learned(values):
        told = f"there are learned positions for fewer tokens than {full(key)}={length} has"
        yield error("model.sequence", _POSITIONS, positions, told, f"{length} or more", also=(key,))


def _learned(values: Values) -> bool:
    node = "model.encoder" if is_encoder_decoder(values) else "model"
    return values.raw(f"{node}.position_embedding_type") in (None, "learned_absolute", "learned_parameters")


def decoder_problems(values: Values, engine: str) -> Iterator[Finding]:
    """A T5's decoder has room for all that is masked (NeMo: megatron_t5_model.py, _validate_cfg).

    Our trainer packs text until the encoder is full, as the T5 paper's code does: more than `seq_length`
    tokens of it, and a sentinel for each span is written too.
    """
    length, decoder = values.whole(_DATA), values.whole(_DECODER_DATA)
    masked, kind = values.number("model.data.masked_lm_prob"), values.raw("model.data.dataset_type")
    if length is None or decoder is None or not 0 <= (masked or 0) < 1:
        return
    least = length if kind == "ul2" else math.ceil(length * (masked or 0)) if kind == "t5" else 0
    why = f"data.seq_length {length}" if kind == "ul2" else f"{length} × masked_lm_prob {masked} = {least}"
    if engine == "megatron" and kind == "t5":
        least = _written(length, masked or 0, values.number("model.data.mean_ngram_size") or _MEAN_SPAN)
        why = f"{least}, what is masked of a full encoder, the sentinels and the end"
    if decoder < least:
        told = f"shorter than {why}: it would not hold what is masked"
        yield error("model.sequence", _DECODER_DATA, decoder, told, f"{least} or more", also=(_DATA,))


def _written(length: int, density: float, mean_span: float) -> int:
    """Return the tokens that a decoder writes when its encoder reads `length` (Raffel et al. 2019, 3.1.4).

    The encoder reads the text without its noise, a sentinel for each span, and the end; the decoder writes
    the noise, the sentinels and the end. The rounding is that of the T5 code base.
    """

    def divided(text: int) -> tuple[int, int]:
        noise = min(max(round(text * density), 1), text - 1)
        return noise, min(max(round(noise / max(mean_span, 1)), 1), noise)

    text = (
        bisect.bisect_right(
            range(2, min(4 * length, sys.maxsize)),
            length,
            key=lambda n: n - divided(n)[0] + divided(n)[1] + 1,
        )
        + 1
    )
    return sum(divided(text)) + 1
