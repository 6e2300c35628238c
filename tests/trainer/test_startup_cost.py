"""The needless work that a start skips, and the state that it restores."""

from __future__ import annotations

import gc

import pytest

from slipway.trainer.startup_cost import pause_garbage_collection


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_collection_is_on_afterwards_if_it_was_on_before(is_on: bool) -> None:
    assert gc.isenabled()
    try:
        if not is_on:
            gc.disable()
        with pause_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
        gc.unfreeze()
