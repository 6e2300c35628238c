"""Blends: valid configurations, the source of each sample, and the held-out windows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipway.common.errors import UserError
from slipway.trainer.config.data import Blend, read_data
from slipway.trainer.config.resume import Resume
from slipway.trainer.config.values import Values
from slipway.trainer.data.batches import Batch, GPTBatchBuilder, Resets
from slipway.trainer.data.heldout import heldout_windows
from slipway.trainer.data.index import SampleIndex, Split
from slipway.trainer.data.interleave import Interleaving
from slipway.trainer.data.order import BlendedOrder, Order, rank_share
from slipway.trainer.data.source import BlendedSource, IndexedSource
from slipway.trainer.data.training_data import make_order, open_heldout
from tests.trainer import indexed_files

pytestmark = pytest.mark.trainer

PREFIX = "model.data.data_prefix"
WEIGHTS = st.lists(st.fractions(min_value=Fraction(1, 10**6), max_value=10**3), min_size=1, max_size=9)


def read(flat: dict[str, Any]) -> Any:
    return read_data(Values(flat), t5=False)


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        (["/a"], Blend((Path("/a"),), None)),
        ("/a", Blend((Path("/a"),), None)),
        ([1.0, "/a"], Blend((Path("/a"),), (Fraction(1),))),
        (["/a", "/b", "/c"], Blend((Path("/a"), Path("/b"), Path("/c")), None)),
        (["/a", " /b "], Blend((Path("/a"), Path("/b")), None)),
        ([0.1, "/a", 0.2, "/b"], Blend((Path("/a"), Path("/b")), (Fraction(1, 10), Fraction(1, 5)))),
        (["30", "/a", " 7e1", "/b"], Blend((Path("/a"), Path("/b")), (Fraction(30), Fraction(70)))),
    ],
)
def test_each_form_of_a_blend_is_read(prefixes: Any, expected: Blend) -> None:
    data = read({PREFIX: prefixes})
    assert data.training == data.heldout == expected
    assert data.splits == (900, 50, 50)


def test_blend_for_each_split_takes_whole_data_sets() -> None:
    flat = {f"{PREFIX}.train": [3, "/a", 1, "/b"], f"{PREFIX}.validation": ["/c"], f"{PREFIX}.test": ["/d"]}
    data = read(flat)
    assert str(data.training) == "75 % /a, 25 % /b"
    assert str(data.heldout) == "/c"
    assert data.splits is None


def test_missing_held_out_data_are_refused_only_where_they_are_opened() -> None:
    data = read({f"{PREFIX}.train": ["/a"]})
    assert data.heldout is None
    with pytest.raises(UserError, match=r"data_prefix\.validation is missing.*limit_val_batches=0"):
        open_heldout(data, {}, 8)


def test_mock_data_need_no_prefix() -> None:
    data = read({"model.data.data_impl": "mock", PREFIX: []})
    assert data.training is data.heldout is None


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({PREFIX: []}, "[prefix]"),
        ({}, "[prefix]"),
        ({PREFIX: [0.5, "/a", "/b"]}, "weights and prefixes in pairs"),
        ({PREFIX: ["/a", 0.5]}, "weights and prefixes in pairs"),
        ({PREFIX: [0.5, 0.5, "/a", "/b"]}, "weights and prefixes in pairs"),
        ({PREFIX: [0.5]}, "weights and prefixes in pairs"),
        ({PREFIX: [0, "/a", 1, "/b"]}, "weights above 0"),
        ({PREFIX: [-1, "/a", 1, "/b"]}, "weights above 0"),
        ({PREFIX: ["nan", "/a", 1, "/b"]}, "weights above 0"),
        ({PREFIX: [float("inf"), "/a"]}, "weights above 0"),
        ({PREFIX: [True, "/a"]}, "[prefix]"),
        ({PREFIX: [["/a"]]}, "[prefix]"),
        ({PREFIX: [""]}, "[prefix]"),
        ({f"{PREFIX}.validation": ["/a"]}, f"{PREFIX}.train=None"),
        ({f"{PREFIX}.train": ["/a"], f"{PREFIX}.validation": [0, "/b"]}, f"{PREFIX}.validation="),
    ],
)
def test_invalid_blends_are_refused(flat: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"model\.data\.data_prefix") as error:
        read(flat)
    assert message in str(error.value)


def counts_of(interleaving: Interleaving, first: int, last: int, samples: int) -> list[int]:
    """Return how many of the first samples of a branch come from each of its sources."""
    if last - first == 1:
        return [samples]
    middle = (first + last) // 2
    left = interleaving._count_left(first, middle, last, samples)
    right = counts_of(interleaving, middle, last, samples - left)
    return [*counts_of(interleaving, first, middle, left), *right]


@given(weights=WEIGHTS, samples=st.integers(1, 200))
def test_every_prefix_of_a_run_follows_the_weights(weights: list[Fraction], samples: int) -> None:
    interleaving = Interleaving(weights)
    bound = Fraction(math.ceil(math.log2(len(weights))), 2)
    counts = [0] * len(weights)
    for sample in range(samples):
        source, number = interleaving.place(sample)
        assert number == counts[source]
        counts[source] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - (sample + 1) * weight / sum(weights)) <= bound
    assert counts_of(interleaving, 0, len(weights), samples) == counts


@given(weights=WEIGHTS, sample=st.integers(0, 10**15))
def test_any_sample_of_a_long_run_is_found_at_once(weights: list[Fraction], sample: int) -> None:
    interleaving = Interleaving(weights)
    source, number = interleaving.place(sample)
    before, after = (counts_of(interleaving, 0, len(weights), count) for count in (sample, sample + 1))
    assert number == before[source]
    assert [new - old for new, old in zip(after, before, strict=True)] == [
        int(index == source) for index in range(len(weights))
    ]
    bound = Fraction(math.ceil(math.log2(len(weights))), 2)
    assert abs(before[source] - sample * weights[source] / sum(weights)) <= bound


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), epoch=st.integers(0, 10**9))
def test_data_sets_without_weights_are_each_seen_once_in_an_epoch(sizes: list[int], epoch: int) -> None:
    total = sum(sizes)
    order = BlendedOrder(Interleaving(sizes), sizes, seed=3)
    windows = [order.window(sample) for sample in range(epoch * total, (epoch + 1) * total)]
    assert sorted(windows) == list(range(total))
    assert order.epoch(epoch * total) == order.epoch((epoch + 1) * total - 1) == epoch


def test_each_source_of_a_blend_sees_its_windows_once_in_each_of_its_own_epochs() -> None:
    sizes, weights = [5, 11, 3], [Fraction(7, 10), Fraction(1, 10), Fraction(1, 5)]
    order = BlendedOrder(Interleaving(weights), sizes, seed=9)
    starts = list(itertools.accumulate([0, *sizes]))
    windows_of_source: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for sample in range(600):
        window = order.window(sample)
        source = sum(window >= start for start in starts[1:])
        windows_of_source[source].append(window - starts[source])
    assert {source: len(windows) for source, windows in windows_of_source.items()} == {0: 420, 1: 60, 2: 120}
    for source, size in enumerate(sizes):
        full_epochs = len(windows_of_source[source]) // size
        epochs = [tuple(windows_of_source[source][at * size : (at + 1) * size]) for at in range(full_epochs)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(epochs)) > 1


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    order = BlendedOrder(Interleaving([1, 1]), [100, 100], seed=1)
    windows = [order.window(sample) for sample in range(200)]
    first, second = ([w % 100 for w in windows if (w >= 100) == late] for late in (False, True))
    assert first != second
    assert first == [Order(100, 1).window(sample) for sample in range(100)]
    later = BlendedOrder(Interleaving([1, 1]), [100, 100], seed=1, generation=1)
    assert [later.window(sample) for sample in range(200)] != windows


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> BlendedSource:
    """Return three data sets whose tokens show their source: from 1000, 2000 and 3000; 0 ends a document."""
    directory, sources = tmp_path_factory.mktemp("blend"), []
    for number, length in enumerate((700, 90, 400), start=1):
        stream = [0 if at % 13 == 12 else 1000 * number + at for at in range(length)]
        indexed_files.write(directory / str(number), [[stream]], "uint16")
        index = SampleIndex("uint16", length, (Split(1, 0, length),))
        sources.append(IndexedSource(directory / str(number), index, 0, 8))
    return BlendedSource(sources, [Fraction(1, 2), Fraction(2, 5), Fraction(1, 10)])


def test_a_blended_source_counts_through_its_sources(blend: BlendedSource) -> None:
    assert blend.sizes == [87, 11, 49]
    assert (blend.windows, blend.tokens, blend.documents) == (147, 1190, 3)
    heads = [int(blend.window(number)[0]) for number in (0, 85, 87, 97, 98, 146)]
    assert heads == [1000, 1000 + 85 * 8, 2000, 2000 + 10 * 8, 3000, 3000 + 48 * 8]
    for outside in (-1, 147):
        with pytest.raises(IndexError):
            blend.window(outside)


def _tensors(batch: Batch) -> list[Any]:
    """Return all tensors; no mask stands for one that forbids only later tokens."""
    rows, length = batch.tokens.shape
    later = torch.ones(length, length, dtype=torch.bool).triu(1).expand(rows, 1, length, length)
    mask = batch.arguments()["attention_mask"]
    forbidden = later if mask is None else mask
    return [batch.tokens, batch.labels, batch.mask, batch.positions, forbidden]


def _steps(source: Any, batches: list[int], ranks: int, micro: int, consumed: int) -> list[list[Any]]:
    """Return the tensors of each global batch, put together from those of all ranks' micro batches."""
    resets = Resets(end_of_text=0, positions=True, attention=True)
    steps = []
    for batch in batches:
        parts = []
        for rank in range(ranks):
            # Each rank makes everything anew from the seed and the number of consumed samples.
            order = make_order(source, 1234, Resume(data_generation=1))
            builder = GPTBatchBuilder(5000, 0, micro, torch.device("cpu"), resets)
            share = rank_share(consumed, batch, rank, ranks)
            windows: list[int | None] = [order.window(sample) for sample in share]
            parts += [_tensors(micro_batch) for micro_batch in builder.batches(source, windows)]
        steps.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
        consumed += batch
    return steps


@pytest.mark.parametrize("blended", [True, False])
def test_global_batches_are_bitwise_those_of_one_rank_when_four_become_two_and_then_one(
    blend: BlendedSource, blended: bool
) -> None:
    source = blend if blended else blend.sources[0]
    growing = [4, 8, 8]
    alone = _steps(source, [*growing, 8, 8, 8, 8, 8, 8], 1, 4, 40)
    resumed = _steps(source, growing, 4, 1, 40)
    resumed += _steps(source, [8, 8, 8], 2, 2, 60) + _steps(source, [8, 8, 8], 1, 8, 84)
    assert len(alone[0]) == 5
    for expected, actual in zip(alone, resumed, strict=True):
        for left, right in zip(expected, actual, strict=True):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)
    if blended:
        origins = Counter(int(row.max()) // 1000 for step in alone for row in step[0])
        assert set(origins) == {1, 2, 3}


def _heldout(source: Any, batches: int) -> list[int]:
    heldout = heldout_windows(source, batches, 4, 4, seed=5)
    return [window for batch in heldout for window in batch if window is not None]


def test_validation_blends_by_the_weights_with_every_source_represented(blend: BlendedSource) -> None:
    def sources(windows: list[int]) -> list[int]:
        return [sum(low <= w < high for w in windows) for low, high in ((0, 87), (87, 98), (98, 147))]

    assert sources(_heldout(blend, 5)) == [10, 8, 2]
    # A tenth of four samples is none; it takes the place of the largest.
    assert sources(_heldout(blend, 1)) == [1, 2, 1] or sources(_heldout(blend, 1)) == [2, 1, 1]
    assert _heldout(blend, 5) == _heldout(blend, 5)
    # The small source is repeated, no more than it takes to see the others whole.
    windows_of_all = _heldout(blend, 10_000)
    assert set(windows_of_all) == set(range(147))
    counts = sources(windows_of_all)
    assert counts[2] == 49
    assert abs(counts[0] / len(windows_of_all) - 0.5) < 0.01
    first = [window for window in windows_of_all if 87 <= window < 98]
    assert first[:11] == first[11:22]


def test_validating_more_windows_than_exist_takes_no_more_memory(blend: BlendedSource) -> None:
    assert _heldout(blend, 10**15) == _heldout(blend, 10_000)


def test_training_reads_a_blend_for_each_split(trainings: Any, tokenized: Any, tmp_path: Path) -> None:
    prefix = str(tokenized.prefix)
    prefixes = {"train": [3, prefix, 1, prefix], "validation": [prefix]}
    changes = {"model.data.data_prefix": prefixes, "model.data.index_mapping_dir": str(tmp_path / "indices")}
    outcome = trainings("blend", {**changes, "trainer.max_steps": 2, "trainer.limit_val_batches": 1})
    assert outcome.codes == [0], outcome.stdout[0] + outcome.stderr[0]
    assert f"data: 75 % {prefix}, 25 % {prefix} | training" in outcome.stdout[0]
    assert "taken whole, not by model.data.splits_string" in outcome.stdout[0]
    assert f"warning: held out and trained on: {prefix}\n" in outcome.stdout[0]
    assert [line["consumed_samples"] for line in outcome.lines("train")] == [8, 16]
    assert [path for path in (tmp_path / "indices").iterdir() if path.name.startswith("sample-index-")]


def test_validation_of_one_source_repeats_nothing() -> None:
    class Ten:
        windows: int | None = 10

        def window(self, index: int) -> Any:
            return np.zeros(3, dtype=np.int64)

    assert sorted(_heldout(Ten(), 9)) == list(range(10))
