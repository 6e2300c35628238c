"""Fixtures of the tests of composing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shipped_files import compose_anew


@pytest.fixture(scope="module")
def composed_anew() -> Iterator[None]:
    """Compose from the beginning in each test, as one launch does."""
    with pytest.MonkeyPatch.context() as patch:
        compose_anew(patch)
        yield
