"""The order of samples that an intervention changes: ranges passed over, other weights of the data sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.arithmetic.interventions import find_rewritten
from slipway.trainer.config.rampup import Rampup
from slipway.trainer.config.resume import Resume
from slipway.trainer.config.settings import Settings
from slipway.trainer.data.audit import samples_of_step
from slipway.trainer.data.interleave import Interleaving, Mixture
from slipway.trainer.data.order import BlendedOrder, Order, rank_share

pytestmark = pytest.mark.trainer

Changes = list[tuple[int, list[int]]]
RAMP = Rampup(start=2, increment=2, samples=40, end=8)
SKIPS = st.lists(st.integers(0, 150), max_size=8, unique=True).map(
    lambda ends: tuple(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)
WEIGHTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)
CHANGES = st.dictionaries(st.integers(1, 200), WEIGHTS, max_size=4).map(
    lambda changes: sorted(changes.items())
)


class Batches(SimpleNamespace):
    """The part of the settings from which the samples of a step follow."""

    batch_after, samples_after = Settings.batch_after, Settings.samples_after


def batches(batch: int, skips: Sequence[tuple[int, int]], ramp: Rampup | None) -> Settings:
    parts = {"global_batch": batch, "rampup": ramp, "resume": Resume(skip_samples=tuple(skips))}
    return cast(Settings, Batches(**parts, max_steps=10**6))


@given(
    skips=SKIPS,
    is_growing=st.booleans(),
    ranks=st.lists(st.sampled_from([1, 2]), min_size=30, max_size=30),
    sizes=st.lists(st.sampled_from([2, 4, 6, 8]), min_size=30, max_size=30),
)
def test_samples_are_passed_over_whatever_the_batches_and_ranks(
    skips: tuple[tuple[int, int], ...], is_growing: bool, ranks: list[int], sizes: list[int]
) -> None:
    trained: list[int] = []
    consumed = 0
    # Each step is that of a launch of its own, with another batch and other ranks.
    for batch, world in zip(sizes, ranks, strict=True):
        settings = batches(8 if is_growing else batch, skips, RAMP if is_growing else None)
        samples = settings.samples_after(consumed)
        for rank in range(world):
            own = rank_share(0, len(samples), rank, world)
            trained += samples[own.start : own.stop]
        consumed = samples[-1] + 1
    passed = {sample for first, end in skips for sample in range(first, end)}
    kept = [sample for sample in range(consumed) if sample not in passed]
    assert trained == kept


@given(skips=SKIPS, is_growing=st.booleans(), at=st.integers(0, 20))
def test_the_samples_of_any_step_are_known_at_once_from_any_state(
    skips: tuple[tuple[int, int], ...], is_growing: bool, at: int
) -> None:
    settings = batches(8, skips, RAMP if is_growing else None)
    consumed, states, steps = 0, [0], []
    for _ in range(30):
        steps.append(list(settings.samples_after(consumed)))
        consumed = steps[-1][-1] + 1
        states.append(consumed)
    for step in range(at + 1, 31):
        assert list(samples_of_step(settings, step, at, states[at])) == steps[step - 1]


@given(first=WEIGHTS, changes=CHANGES, seed=st.integers(0, 9))
def test_data_sets_go_on_where_they_were_when_their_weights_change(
    first: list[int], changes: Changes, seed: int
) -> None:
    windows = [40, 90, 7]
    mixture = Mixture(Interleaving(first), changes)
    order = BlendedOrder(mixture, windows, seed)
    counts = [0, 0, 0]
    starts = [0, *(start for start, _ in changes), 10**9]
    seen: list[list[int]] = [[], [], []]
    for sample in range(260):
        assert mixture.counts(sample) == counts
        source, number = mixture.place(sample)
        # None is lost, none comes twice, in each data set.
        assert number == counts[source]
        counts[source] += 1
        window = order.window(sample)
        seen[source].append(window - sum(windows[:source]))
        part = sum(start <= sample for start in starts) - 1
        weights = [first, *(weights for _, weights in changes)][part]
        assert weights[source] > 0
        # The weights of the part are followed from its first sample on.
        length = sample + 1 - starts[part]
        begun = mixture.counts(starts[part])
        for source, weight in enumerate(weights):
            share = Fraction(weight, sum(weights)) * length
            assert abs(counts[source] - begun[source] - share) <= Fraction(math.ceil(math.log2(3)), 2)
    for shown, size in zip(seen, windows, strict=True):
        for epoch in range(0, len(shown), size):
            own = shown[epoch : epoch + size]
            assert len(set(own)) == len(own)


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=4), sample=st.integers(0, 10**12))
def test_a_data_set_that_is_added_later_changes_nothing_before(weights: list[int], sample: int) -> None:
    before = BlendedOrder(Interleaving(weights), [100] * len(weights), 5)
    added = Mixture(Interleaving([*weights, 0]), [(sample + 1, [*weights, 3])])
    after = BlendedOrder(added, [100] * (len(weights) + 1), 5)
    assert after.window(sample) == before.window(sample)
    if len(weights) == 1:
        assert after.window(sample) == Order(100, 5).window(sample)
    assert added.counts(sample + 1) == [*Interleaving(weights).counts(sample + 1), 0]


SKIPPED = {"skip_samples": [[10, 20], [40, 60]]}
MIXED = {"data_weights": [[10, [1, 3]], [40, [1, 1]]]}


@pytest.mark.parametrize(
    ("now", "recorded", "consumed", "key"),
    [
        ({}, {}, 50, None),
        (SKIPPED, {}, 10, None),
        (SKIPPED, {}, 11, "skip_samples"),
        ({}, SKIPPED, 10, None),
        ({}, SKIPPED, 30, "skip_samples"),
        (SKIPPED, {"skip_samples": [[10, 20]]}, 40, None),
        (SKIPPED, {"skip_samples": [[10, 20]]}, 41, "skip_samples"),
        ({"skip_samples": [[10, 20], [40, 80]]}, SKIPPED, 60, None),
        ({"skip_samples": [[10, 20], [40, 80]]}, SKIPPED, 61, "skip_samples"),
        (MIXED, {}, 10, None),
        (MIXED, {}, 11, "data_weights"),
        ({}, MIXED, 11, "data_weights"),
        (MIXED, {"data_weights": [[10, [1, 3]]]}, 40, None),
        # A data set that was added since.
        ({"data_weights": [[10, [1, 3, 0]], [40, [1, 1, 2]]]}, MIXED, 40, None),
        ({"data_weights": [[10, [1, 3, 1]]]}, MIXED, 40, "data_weights"),
        ({"data_weights": [[10, [3, 0]]]}, {"data_weights": [[10, [0, 3]]]}, 40, "data_weights"),
    ],
)
def test_the_samples_of_a_checkpoint_cannot_be_changed(
    now: dict[str, Any], recorded: dict[str, Any], consumed: int, key: str | None
) -> None:
    assert find_rewritten(now, recorded, consumed) == key


def test_weights_are_those_that_are_written() -> None:
    (change,) = replace(Resume(), data_weights=((9, (0.1, 0.2)),)).exact_weights()
    assert change == (9, [Fraction(1, 10), Fraction(1, 5)])
