"""The samples of a training, and their order."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.trainer.data.heldout import entropy, heldout_windows, unigram_entropy
from slipway.trainer.data.order import Order, Permutation, rank_share
from slipway.trainer.data.seeds import HELDOUT, sample_seed
from slipway.trainer.data.source import MockSource, Tokens, loss_mask, select_targets

pytestmark = pytest.mark.trainer


class Counting:
    """Window `i` holds the tokens ``[i, i, i]``."""

    def __init__(self, windows: int | None = 10) -> None:
        self.windows = windows

    def window(self, index: int) -> Tokens:
        return np.full(3, index, dtype=np.int64)


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63), stream=st.integers(0, 2**64 - 1))
def test_a_permutation_takes_every_value_once(size: int, seed: int, stream: int) -> None:
    permutation = Permutation(size, seed, stream)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))


def test_a_permutation_of_a_hundred_million_is_there_at_once() -> None:
    permutation = Permutation(10**8, 1234, 0)
    values = [permutation[index] for index in range(2000)]
    assert len(set(values)) == 2000
    # Uniform over the range: the mean of 2,000 draws is within five standard errors.
    assert abs(np.mean(values) / 10**8 - 0.5) < 5 / math.sqrt(12 * 2000)


def test_seeds_and_epochs_differ() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return [Permutation(1000, seed, epoch)[index] for index in range(20)]

    assert len({tuple(first(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_the_first_data_generation_is_the_order_of_earlier_versions() -> None:
    """They were recorded before there were generations, so that a run continues with unseen samples."""
    order = Order(1000, seed=1234)
    samples = [0, 1, 2, 3, 999, 1000, 1001, 123456789]
    assert [order.window(sample) for sample in samples] == [186, 126, 98, 514, 545, 358, 548, 330]
    order = Order(5_000_000, seed=7)
    assert [order.window(sample) for sample in (0, 4_999_999)] == [1340068, 3225190]


def test_another_data_generation_is_another_order_of_all_windows() -> None:
    orders = [Order(50, seed, generation) for seed in (1, 2) for generation in (0, 1, 2)]
    epochs = [tuple(order.window(sample) for sample in range(50)) for order in orders]
    assert len(set(epochs)) == 6
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)


def test_seed_of_a_sample_depends_on_all_three_numbers() -> None:
    seeds = {sample_seed(s, g, n) for s in (0, 1, 2**32) for g in (0, 1, HELDOUT) for n in (0, 1, 2**32)}
    assert len(seeds) == 27
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_each_epoch_sees_every_window_once() -> None:
    order = Order(7, seed=5)
    epochs = [[order.window(sample) for sample in range(7 * e, 7 * e + 7)] for e in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [order.epoch(sample) for sample in (0, 6, 7, 20)] == [0, 0, 1, 2]
    # Going back, as after a restart, gives the same again.
    assert order.window(3) == epochs[0][3]


@given(ranks=st.sampled_from([1, 2, 3, 4, 6, 12]), consumed=st.integers(0, 500), windows=st.integers(1, 60))
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(
    ranks: int, consumed: int, windows: int
) -> None:
    order = Order(windows, seed=1234)
    alone = [order.window(sample) for sample in rank_share(consumed, 12, 0, 1)]
    shared = [
        Order(windows, seed=1234).window(sample)
        for rank in range(ranks)
        for sample in rank_share(consumed, 12, rank, ranks)
    ]
    assert shared == alone


def test_mock_samples_depend_on_seed_and_number_only() -> None:
    source = MockSource(16, 512, seed=1)
    assert np.array_equal(source.window(7), MockSource(16, 512, seed=1).window(7))
    assert not np.array_equal(source.window(7), source.window(8))
    assert not np.array_equal(source.window(7), MockSource(16, 512, 2).window(7))
    assert not np.array_equal(source.window(7), MockSource(16, 512, 1, generation=1).window(7))
    assert not np.array_equal(source.window(7), MockSource(16, 512, 1, HELDOUT).window(7))
    assert source.window(7).shape == (17,)
    assert source.window(7).max() < 512
    steps = {int(source.window(number)[1] - source.window(number)[0]) % 512 for number in range(100)}
    assert steps == {1, 2, 3, 4}


def test_held_out_windows_are_the_same_in_every_world() -> None:
    def real(multiple: int) -> list[int]:
        batches = heldout_windows(Counting(25), 3, 8, multiple, seed=1)
        assert all(len(batch) % multiple == 0 for batch in batches)
        return [window for batch in batches for window in batch if window is not None]

    assert real(2) == real(8) == real(16)
    assert len(set(real(2))) == 24
    few = heldout_windows(Counting(5), 3, 8, 4, seed=1)
    assert [len(batch) for batch in few] == [8]
    assert sorted(window for window in few[0] if window is not None) == list(range(5))


def test_the_entropy_is_of_the_evaluated_targets() -> None:
    batches: list[list[int | None]] = [[1, 2, None, None]]

    def targets(masked: int | None) -> Callable[[int], Tokens]:
        return lambda window: select_targets(Counting().window(window), masked)

    assert unigram_entropy(targets(None), batches, 10) == (4, pytest.approx(math.log(2)))
    # Window 2's loss does not count: only ones are left.
    assert unigram_entropy(targets(2), batches, 10) == (2, 0.0)
    assert entropy(np.array([3, 1])) == (4, pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4)))


def test_the_loss_after_an_end_of_text_does_not_count() -> None:
    window = np.array([5, 0, 6, 7])
    assert loss_mask(window, 0).tolist() == [1, 0, 1]
    assert loss_mask(window, None).tolist() == [1, 1, 1]
