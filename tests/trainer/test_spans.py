"""Span corruption: the spans taken out of a text, and the inputs and targets of a T5."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from slipway.common.errors import UserError
from slipway.trainer.config.t5 import Denoising
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.data.denoising import T5Batch, T5BatchBuilder
from slipway.trainer.data.source import MockSource, Tokens, check_tokens
from slipway.trainer.data.spans import Lengths, corrupt, fit, lengths_of, sample_lengths
from slipway.trainer.data.vocabulary import Vocabulary, read_vocabulary

pytestmark = pytest.mark.trainer

# Text is below 1000, so that sentinels are recognised.
SPECIAL = Vocabulary(1100, 1, "a test", start=2, padding=0, sentinels=100)
SEEDS = st.integers(0, 2**64 - 1)
DENOISING = Denoising(density=0.15, mean_span=3.0, sentinels=100)


@st.composite
def samples(draw: st.DrawFn) -> tuple[Tokens, Lengths, int]:
    lengths = lengths_of(draw(st.integers(8, 700)), draw(st.floats(0.05, 0.5)), draw(st.floats(1.0, 10.0)))
    # Others are refused: there would be no text between some of the spans.
    assume(lengths.spans <= lengths.raw - lengths.noise)
    tokens = np.random.default_rng(draw(st.integers(0, 99))).integers(3, 1000, lengths.raw)
    return tokens, lengths, draw(SEEDS)


def spans_of(sequence: Tokens) -> dict[int, list[int]]:
    """Return the tokens after each sentinel, up to the next or the end; under -1 those before the first."""
    spans: dict[int, list[int]] = {-1: []}
    for token in sequence[:-1].tolist():
        if token >= SPECIAL.first_sentinel:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    return spans


@given(samples())
def test_inputs_and_targets_make_the_text_again(sample: tuple[Tokens, Lengths, int]) -> None:
    tokens, lengths, seed = sample
    inputs, targets = corrupt(tokens, lengths, SPECIAL, seed)
    assert (len(inputs), len(targets)) == (lengths.inputs, lengths.targets)
    assert inputs[-1] == targets[-1] == SPECIAL.end_of_text
    text, spans = spans_of(inputs), spans_of(targets)
    sentinels = list(range(1000, 1000 + lengths.spans))
    assert list(text) == list(spans) == [-1, *sentinels]
    assert spans[-1] == []
    again = list(text[-1])
    for sentinel in sentinels:
        again += spans[sentinel] + text[sentinel]
    assert again == tokens.tolist()


@given(samples())
def test_spans_are_apart_and_have_the_requested_number_and_length(
    sample: tuple[Tokens, Lengths, int],
) -> None:
    tokens, lengths, seed = sample
    inputs, targets = corrupt(tokens, lengths, SPECIAL, seed)
    text, spans = spans_of(inputs), spans_of(targets)
    # Text, a span, text, a span, ...: the sequence ends with one.
    last = SPECIAL.first_sentinel + lengths.spans - 1
    assert all(words for sentinel, words in text.items() if sentinel != last)
    assert text[last] == []
    sizes = [len(words) for sentinel, words in spans.items() if sentinel >= 0]
    assert min(sizes) >= 1
    assert sum(sizes) == lengths.noise


@given(st.integers(2, 5000), st.floats(0.01, 0.5), st.floats(1.0, 10.0))
def test_density_and_mean_span_are_within_the_rounding(raw: int, density: float, mean_span: float) -> None:
    lengths = lengths_of(raw, density, mean_span)
    assert abs(lengths.noise - raw * density) <= 0.5 or lengths.noise == 1
    assert abs(lengths.spans - lengths.noise / mean_span) <= 0.5 or lengths.spans == 1


@given(st.integers(16, 5000), st.floats(0.01, 0.4), st.floats(1.5, 10.0))
def test_the_encoder_reads_exactly_its_length(length: int, density: float, mean_span: float) -> None:
    lengths = fit(length, density, mean_span)
    assert lengths.inputs == length
    assert lengths_of(lengths.raw + 1, density, mean_span).inputs > length


def test_lengths_equal_those_of_the_paper() -> None:
    # T5's code base has these: 568 tokens of text become 512 and 114.
    assert (fit(512, 0.15, 3.0).raw, fit(512, 0.15, 3.0).targets) == (568, 114)


def test_spans_depend_on_the_seed_alone_and_never_change() -> None:
    tokens, lengths = np.arange(10) + 500, lengths_of(10, 0.3, 2.0)
    inputs, targets = corrupt(tokens, lengths, SPECIAL, 3)
    # Other numbers here are other trainings: of runs that were begun before, too.
    assert inputs.tolist() == [500, 501, 502, 503, 1000, 506, 507, 508, 1001, 1]
    assert targets.tolist() == [1000, 504, 505, 1001, 509, 1]
    np.random.seed(1)
    assert np.array_equal(corrupt(tokens, lengths, SPECIAL, 3)[0], inputs)
    assert any(not np.array_equal(corrupt(tokens, lengths, SPECIAL, seed)[0], inputs) for seed in range(5))


def test_all_divisions_are_equally_likely() -> None:
    # Two spans of six tokens of noise: five divisions; the first span is 1 to 5 tokens long.
    lengths, tokens = Lengths(raw=20, noise=6, spans=2), np.arange(20)
    firsts = [len(spans_of(corrupt(tokens, lengths, SPECIAL, seed)[1])[1000]) for seed in range(5000)]
    counts = np.bincount(firsts, minlength=6)[1:]
    # Five standard deviations of a binomial distribution.
    assert np.abs(counts - 1000).max() < 5 * math.sqrt(5000 * 0.2 * 0.8)


class Text:
    """Windows of random text."""

    windows: int | None = 50

    def __init__(self, highest: int = 199) -> None:
        self._highest = highest

    def window(self, index: int) -> Tokens:
        return np.random.default_rng(index).integers(3, self._highest + 1, 72)


def make_builder(generation: int = 0, micro_batch: int = 2) -> T5BatchBuilder:
    vocabulary = Vocabulary(200, 1, "a test", start=2, padding=0).add_sentinels(100)
    lengths = sample_lengths(DENOISING, 64, 20)
    return T5BatchBuilder(lengths, vocabulary, 20, (7, generation), micro_batch, torch.device("cpu"))


def rows(builder: T5BatchBuilder, windows: list[int | None], samples: list[int] | None) -> list[list[int]]:
    return [row for batch in builder.batches(Text(), windows, samples) for row in batch.inputs.tolist()]


def test_batch_has_the_arguments_of_megatrons_t5() -> None:
    (batch,) = make_builder().batches(Text(), [3, None], [0, 1])
    lengths = fit(64, 0.15, 3.0)
    assert batch.inputs.shape == (2, 64)
    assert batch.labels.shape == batch.decoder_inputs.shape == batch.mask.shape == (2, 20)
    assert batch.decoder_inputs[:, 0].tolist() == [2, 2]
    assert torch.equal(batch.decoder_inputs[:, 1:], batch.labels[:, :-1])
    assert batch.labels[0, 0] == 200, "the first sentinel follows the tokenizer's tokens"
    assert batch.labels[0, lengths.targets - 1] == 1
    assert batch.labels[0, lengths.targets :].tolist() == [0] * (20 - lengths.targets)
    # Padding does not count, nor does a missing sample.
    assert batch.mask.sum(1).tolist() == [lengths.targets, 0]
    assert set(batch.arguments()) == {
        "encoder_input_ids",
        "decoder_input_ids",
        "encoder_attn_mask",
        "decoder_attn_mask",
        "encoder_decoder_attn_mask",
        "lm_labels",
    }


def test_a_sample_depends_on_its_number_and_the_generation_and_on_no_batch() -> None:
    windows: list[int | None] = [4, 9, 4, 1]
    once = rows(make_builder(), windows, [10, 11, 12, 13])
    assert once == rows(make_builder(micro_batch=4), windows, [10, 11, 12, 13])
    assert once[2:] == rows(make_builder(), windows[2:], [12, 13])
    # One window differs in another epoch, and in another generation.
    assert once[0] != once[2]
    assert once[0] != rows(make_builder(generation=1), [4], [10])[0]


def test_held_out_windows_have_the_same_spans_each_time() -> None:
    builder = make_builder()
    (first,) = builder.batches(Text(), [5, 6])
    assert rows(builder, [6, 5], None) == first.inputs.tolist()[::-1]
    assert builder.targets(Text(), 5).tolist() == first.labels[0][first.mask[0] > 0].tolist()
    assert rows(builder, [5], None) != rows(builder, [5], [5])


def test_made_up_text_becomes_batches() -> None:
    lengths = sample_lengths(DENOISING, 64, 20)
    (batch,) = make_builder().batches(MockSource(lengths.raw, 200, 1), [0, 1], [0, 1])
    assert isinstance(batch, T5Batch)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(UserError, match=r"the data hold token 2\d\d, but the vocabulary .* ends at 199"):
        list(make_builder().batches(Text(highest=299), [0, 1], [0, 1]))


def test_tokens_below_zero_are_refused() -> None:
    check_tokens(np.array([0, 9]), 10)
    with pytest.raises(UserError, match="the data hold token -1, but"):
        check_tokens(np.array([3, -1, 2]), 10)


@pytest.mark.parametrize(
    ("changes", "lengths", "message"),
    [
        ({}, (512, 113), r"model\.data\.seq_length_dec=113: expected at least 114"),
        ({"sentinels": 27}, (512, 128), r"num_sentinel_tokens=27: expected at least 28"),
        ({"density": 0.9, "mean_span": 1.0}, (64, 500), "no room for text between"),
        ({}, (2, 10), "no room for text between"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(changes: Any, lengths: tuple[int, int], message: str) -> None:
    values = {"density": 0.15, "mean_span": 3.0, "sentinels": 100, **changes}
    with pytest.raises(UserError, match=message):
        sample_lengths(Denoising(**values), *lengths)


def test_berts_vocabulary_has_tokens_for_start_end_and_padding(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    tokens = ["[PAD]", "[UNK]", "\u2028", "[CLS]", "[SEP]", "##s"]
    path.write_text("\n".join(tokens) + "\n", encoding="utf-8")
    cased = Tokenizer(name="BertWordPieceCase", vocab_file=path)
    vocabulary = read_vocabulary(cased, mock=False)
    assert (vocabulary.size, vocabulary.start, vocabulary.end_of_text, vocabulary.padding) == (6, 3, 4, 0)
    assert (vocabulary.add_sentinels(100).size, vocabulary.add_sentinels(100).sentinels) == (106, 100)
    path.write_text("[PAD]\n[CLS]\n")
    with pytest.raises(UserError, match=r"not BERT's vocab\.txt: it lacks the token \[SEP\]"):
        read_vocabulary(cased, mock=False)
    absent = Tokenizer(name="BertWordPieceCase", vocab_file=tmp_path / "absent")
    assert read_vocabulary(absent, mock=True).size == 28996
    with pytest.raises(UserError, match="there is no such file"):
        read_vocabulary(absent, mock=False)
