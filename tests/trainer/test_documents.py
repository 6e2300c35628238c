"""Documents in one window: their positions, and that none sees another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.trainer

END = 9


class ListedWindows:
    """A source of the listed windows, one after another."""

    def __init__(self, *rows: list[int]) -> None:
        self._rows = rows
        self.windows = len(rows)

    def window(self, index: int) -> Any:
        return np.array(self._rows[index], dtype=np.int64)


def batch_of(
    *rows: list[int],
    positions: bool = True,
    attention: bool = True,
    lengths: bool = False,
    same_kernel: bool = False,
) -> Any:
    from slipway.trainer.data.batches import GPTBatchBuilder, Resets

    batch_builder = GPTBatchBuilder(
        10, None, len(rows), "cpu", Resets(END, positions, attention, lengths, same_kernel)
    )
    return next(batch_builder.batches(ListedWindows(*rows), list(range(len(rows)))))


def forbidden(batch: Any) -> Any:
    return batch.arguments()["attention_mask"]


def by_megatrons_loop(tokens: list[int]) -> tuple[list[int], list[list[bool]]]:
    """Return positions and mask by Megatron's loop: an end restarts positions and hides earlier tokens."""
    count = len(tokens)
    positions, forbidden = (
        list(range(count)),
        [[key > query for key in range(count)] for query in range(count)],
    )
    for position, token in enumerate(tokens):
        if token == END:
            for later in range(position + 1, count):
                positions[later] = later - (position + 1)
                for before in range(position + 1):
                    forbidden[later][before] = True
    return positions, forbidden


def test_documents_are_kept_apart() -> None:
    rows = [[1, 2, END, 3, 4, 5], [END, END, 1, 2, 3, END], [1, 2, 3, 4, END, 5], [1, 2, 3, 4, 5, END]]
    batch = batch_of(*rows)
    mask = forbidden(batch)
    assert mask.shape == (4, 1, 5, 5)
    for number, row in enumerate(rows):
        positions, expected = by_megatrons_loop(row[:-1])
        assert batch.positions[number].tolist() == positions
        assert mask[number, 0].tolist() == expected


def test_mask_is_made_on_the_device_from_the_numbers_of_the_documents() -> None:
    import torch

    from slipway.trainer.data.prefetch import move_to_device

    batch = batch_of([1, 2, END, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    # All tensors that are made ahead, pinned and copied are as long as a window, never its square.
    prepared = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert {tuple(tensor.shape) for tensor in prepared} == {(2, 5)}
    assert len(prepared) == 5
    assert forbidden(move_to_device(batch, torch.device("meta"))).device.type == "meta"


def test_each_reset_is_independent() -> None:
    row = [1, END, 2, 3]
    only_positions = batch_of(row, attention=False)
    assert (only_positions.positions.tolist(), forbidden(only_positions)) == ([[0, 1, 0]], None)
    only_attention = batch_of(row, positions=False)
    assert only_attention.positions.tolist() == [[0, 1, 2]]
    assert forbidden(only_attention)[0, 0].tolist() == by_megatrons_loop(row[:-1])[1]


def test_one_document_needs_no_mask() -> None:
    # The end itself is the document's, and the last token of a window is a label alone.
    batch = batch_of([1, 2, 3, END], [4, 5, END, END])
    assert forbidden(batch) is None
    assert batch.positions.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("rows", "begins"),
    [
        ([[1, END, 2, 3, 4, 5], [1, 2, 3, 4, END, 5]], [0, 2, 5]),
        ([[END, END, END, 1, END, 2]], [0, 1, 2, 3]),
        ([[END] * 31] * 2, range(60)),
    ],
)
def test_bounds_of_documents_end_with_each_window(rows: list[list[int]], begins: Any) -> None:
    """Single tokens are documents too, and a document never goes on in the next window."""
    batch = batch_of(*rows, lengths=True)
    bounds, tokens = batch.arguments()["attention_mask"], len(rows) * (len(rows[0]) - 1)
    assert str(bounds.dtype) == "torch.int32"
    assert bounds.tolist() == [*begins, *[tokens] * (len(bounds) - len(begins))]
    assert len(bounds) == (16 if len(begins) < 16 else 64) > len(begins)
    assert forbidden(batch_of([1, 2, 3, END], lengths=True)) is None


def test_mask_is_always_made_with_attention_dropout() -> None:
    row = [1, 2, 3, END]
    batch = batch_of(row, same_kernel=True)
    assert forbidden(batch)[0, 0].tolist() == by_megatrons_loop(row[:-1])[1]


def test_no_two_elements_share_memory() -> None:
    # Memory is pinned as it lies, and a copy into what is expanded is an error.
    from slipway.trainer.data.batches import GPTBatchBuilder

    batch = next(GPTBatchBuilder(10, None, 2, "cpu").batches(ListedWindows([1, 2, 3], [4, 5, 6]), [0, 1]))
    assert all(tensor.is_contiguous() for tensor in (batch.tokens, batch.labels, batch.mask, batch.positions))
