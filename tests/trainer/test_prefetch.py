"""Micro batches made ahead: their order and their errors do not change."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slipway.common.errors import UserError
from slipway.trainer.data.prefetch import Prefetcher

pytestmark = pytest.mark.trainer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Numbered:
    number: Any
    name: str = ""


def steps(count: int, size: int, wrong: int | None = None) -> Iterator[Iterator[Numbered]]:
    """Yield `count` steps of `size` micro batches; making number `wrong` fails."""
    numbers = itertools.count()

    def step() -> Iterator[Numbered]:
        for number in itertools.islice(numbers, size):
            if number == wrong:
                raise UserError(f"token {number} is foreign", found_by="rank")
            yield Numbered(torch.tensor([number]), str(number))

    for _ in range(count):
        yield step()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_the_order_is_that_of_the_steps(depth: int) -> None:
    feed = Prefetcher(steps(5, 4), depth, CPU)
    numbers = []
    for step in range(5):
        batches = feed.step()
        # megatron-core takes as many as there are, and never asks for the end; the third step takes fewer.
        numbers += [int(next(batches).number) for _ in range(2 if step == 2 else 4)]
    assert numbers == [number for number in range(20) if number not in (10, 11)]
    assert list(feed.step()) == []
    assert list(feed.step()) == []
    assert feed.waited > 0
    feed.close()
    assert "prefetch" not in threads()


@pytest.mark.parametrize("depth", [0, 8])
def test_error_is_raised_unchanged_at_its_micro_batch(depth: int) -> None:
    feed = Prefetcher(steps(3, 2, wrong=3), depth, CPU)
    assert [batch.name for batch in feed.step()] == ["0", "1"]
    batches = feed.step()
    assert next(batches).name == "2"
    with pytest.raises(UserError, match="token 3 is foreign") as error:
        next(batches)
    assert error.value.found_by == "rank"
    feed.close()


def test_close_ends_the_thread_while_its_queue_is_full() -> None:
    feed = Prefetcher(steps(1000, 4), 2, CPU)
    next(feed.step())
    assert "prefetch" in threads()
    feed.close()
    assert "prefetch" not in threads()


def test_prefetcher_makes_no_more_than_its_depth() -> None:
    produced = []

    def endless() -> Iterator[list[Numbered]]:
        for number in itertools.count():
            produced.append(number)
            yield [Numbered(torch.tensor(number))]

    feed = Prefetcher(endless(), 4, CPU)
    next(feed.step())
    feed.close()
    # Two entries for each step: its micro batch and its end.
    assert len(produced) <= 1 + 4 // 2 + 2
