"""Span corruption, a T5's objective (Raffel et al. 2019, arXiv 1910.10683, section 3.1.4 and figure 2).

Spans of a sequence are taken out; each leaves one sentinel in its place. The encoder reads the remaining
text, the decoder writes each sentinel followed by its span. Both end with the end-of-sequence token. Spans
and the text between them are at least one token long, a sequence begins with text that stays, and all
divisions into spans are equally likely, as in the T5 code base's ``random_spans_noise_mask``.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipway.common.errors import UserError
from slipway.trainer.config.t5 import Denoising
from slipway.trainer.data.source import Tokens
from slipway.trainer.data.vocabulary import Vocabulary

# Tokens of text beyond any sample.
_LONGEST = 1 << 40
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Lengths:
    """Tokens of one sample, which are the same for each.

    Attributes
    ----------
    raw
        Tokens of text.
    noise, spans
        How many of them are taken out, in how many spans.
    """

    raw: int
    noise: int
    spans: int

    @property
    def inputs(self) -> int:
        """Tokens that the encoder reads: the remaining text, the sentinels and the end."""
        return self.raw - self.noise + self.spans + 1

    @property
    def targets(self) -> int:
        """Tokens that the decoder writes: the spans, the sentinels and the end."""
        return self.noise + self.spans + 1


def lengths_of(raw: int, density: float, mean_span: float) -> Lengths:
    """Divide `raw` tokens into text and noise, by the rounding of the T5 code base.

    Parameters
    ----------
    raw
        Tokens of text, at least 2.
    density
        Share of them that is taken out.
    mean_span
        Mean length of a span in tokens.
    """
    noise = min(max(round(raw * density), 1), raw - 1)
    return Lengths(raw, noise, min(max(round(noise / mean_span), 1), noise))


def fit(seq_length: int, density: float, mean_span: float) -> Lengths:
    """Return the lengths for which the encoder reads exactly `seq_length` tokens.

    Where several do, the one with the most text: one token more of it never adds more than one to what the
    encoder reads, so that no length is skipped.

    Raises
    ------
    UserError
        If so much is taken out, in so short spans, that there is no text between them.
    """
    longer = bisect.bisect_right(
        range(_LONGEST), seq_length, lo=3, key=lambda raw: lengths_of(raw, density, mean_span).inputs
    )
    lengths = lengths_of(longer - 1, density, mean_span)
    if lengths.inputs != seq_length or lengths.spans > lengths.raw - lengths.noise:
        raise UserError(
            f"model.data.masked_lm_prob={density:g} and model.data.mean_ngram_size={mean_span:g}: "
            f"{seq_length} tokens of the encoder (model.data.seq_length) have no room for text between "
            "the masked spans; expected less to be masked, in longer spans, or longer sequences"
        )
    return lengths


def sample_lengths(denoising: Denoising, seq_length: int, seq_length_dec: int) -> Lengths:
    """Return how many tokens of text make a sample, and what becomes of them.

    Raises
    ------
    UserError
        If the spans do not fit the decoder, or the sentinels are too few.
    """
    lengths = fit(seq_length, denoising.density, denoising.mean_span)
    if lengths.targets > seq_length_dec:
        raise UserError(
            f"model.data.seq_length_dec={seq_length_dec}: expected at least {lengths.targets}, to hold the "
            f"{lengths.noise} tokens that are taken out of {lengths.raw} (model.data.masked_lm_prob="
            f"{denoising.density:g}), {lengths.spans} sentinels and the end"
        )
    if lengths.spans > denoising.sentinels:
        raise UserError(
            f"model.tokenizer.num_sentinel_tokens={denoising.sentinels}: expected at least {lengths.spans}, "
            f"one for each span of a sequence of {seq_length} tokens"
        )
    return lengths


def corrupt(tokens: Tokens, lengths: Lengths, vocabulary: Vocabulary, seed: int) -> tuple[Tokens, Tokens]:
    """Take spans out of a sequence.

    Parameters
    ----------
    tokens
        Text, ``[lengths.raw]``.
    lengths
        From :func:`fit`, so that text remains between the spans.
    vocabulary
        With as many sentinels as there are spans.
    seed
        64 bits; together with the lengths it decides the spans.

    Returns
    -------
    (Tokens, Tokens)
        The encoder's tokens, ``[lengths.inputs]``, and the decoder's targets, ``[lengths.targets]``.
    """
    keys = _draw(seed, lengths.raw)
    remaining = lengths.raw - lengths.noise
    text = _divide(remaining, lengths.spans, keys[:remaining])
    noise = _divide(lengths.noise, lengths.spans, keys[remaining:])
    # A stretch of text and the span after it, and so on: where each span begins and ends.
    ends = np.cumsum(text + noise)
    begins = ends - noise
    sentinels = vocabulary.first_sentinel + np.arange(lengths.spans)
    masked = np.zeros(lengths.raw + 1, dtype=np.int8)
    masked[begins] += 1
    masked[ends] -= 1
    taken = np.cumsum(masked[:-1], dtype=np.int8).astype(bool)
    inputs = np.full(lengths.inputs, vocabulary.end_of_text, dtype=np.int64)
    targets = np.full(lengths.targets, vocabulary.end_of_text, dtype=np.int64)
    order = np.arange(lengths.spans)
    _fill(inputs, np.cumsum(text) + order, sentinels, tokens[~taken])
    _fill(targets, np.cumsum(noise) - noise + order, sentinels, tokens[taken])
    return inputs, targets


def _fill(sequence: Tokens, places: Tokens, sentinels: Tokens, tokens: Tokens) -> None:
    """Write the sentinels at their places and the tokens, in order, at all others but the last."""
    free = np.ones(len(sequence), dtype=bool)
    free[places] = False
    free[-1] = False
    sequence[places] = sentinels
    sequence[free] = tokens


def _divide(items: int, parts: int, keys: npt.NDArray[np.uint64]) -> Tokens:
    """Return the sizes of `parts` parts of at least one item; all such divisions are equally likely.

    Parameters
    ----------
    keys
        A random number for each item: the parts begin after the items with the smallest ones.
    """
    cuts = np.sort(np.argsort(keys[: items - 1], kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], cuts, [items])))


def _draw(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the first numbers of SplitMix64 (Steele et al. 2014) from `seed`: the same with every numpy."""
    with np.errstate(over="ignore"):
        value = np.uint64(seed) + _steps(count)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@functools.lru_cache(maxsize=8)
def _steps(count: int) -> npt.NDArray[np.uint64]:
    steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    steps.flags.writeable = False
    return steps
