"""Groups of ranks on CPUs: what gloo need not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.conftest import environment, free_port
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer


def test_groups_share_one_thread_and_reduce_as_before(pool: WarmPool, tmp_path: Path) -> None:
    port = free_port()
    ranks = tuple(environment(rank, 2, port) for rank in range(2))
    result = run_probe(pool, "tests.trainer.probe_groups", [], tmp_path, ranks)
    assert result["sums"] == {"alone": 1.5, "pair": 4.0, "world": 4.0}
    assert result["handed_over"] == {"alone": 0, "pair": 1, "world": 1}
    assert result["gloo_threads"] == 1
