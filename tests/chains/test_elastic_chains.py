"""The links of a chain may have other numbers of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chains.chain_training import Training
from tests.chains.elastic_scenarios import BOTH, FEWER, FIXED, NAMESAKE, STAYS, STEPS, TOLD

pytestmark = [pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(2400)]


def test_each_rank_is_told_how_many_there_are(chains: Any) -> None:
    """NeMo is told the number of nodes besides, by its last argument."""
    runs = chains.ended(FEWER)
    lines = sorted(line for line in runs.log(TOLD).splitlines() if line.startswith("link "))
    assert lines == [
        *(f"link 1: rank {rank} of 2, trainer.num_nodes=2" for rank in range(2)),
        "link 2: rank 0 of 1, trainer.num_nodes=1",
    ], runs.told(TOLD)
    assert [attempt.nodes for attempt in runs.attempts(TOLD)] == [BOTH, STAYS]


def test_a_training_goes_on_with_fewer_nodes(chains: Any) -> None:
    """The same samples in the same order: the same losses, but for the order in which sums are taken."""
    runs = chains.ended(FEWER)
    training, expected = Training(runs, FEWER), Training(runs, FIXED).numbers()
    assert [attempt.verdict for attempt in runs.attempts(FEWER)] == ["continue", "done"], runs.told(FEWER)
    starts = training.events("start")
    sizes = [(start["world_size"], start["tensor"], start["data"]) for start in starts]
    assert sizes == [(4, 2, 2), (2, 2, 1)]
    assert starts[1]["step"] == training.reached()[0] > 0
    assert {step for kind, step in expected if kind == "train"} == set(range(1, STEPS + 1))
    assert training.numbers().keys() == expected.keys()
    for step, values in training.numbers().items():
        (one,), (other,) = values, expected[step]
        assert one == pytest.approx(other, rel=1e-5), step


def test_two_jobs_of_one_name_do_not_meet(chains: Any) -> None:
    """Both at once, on one host."""
    runs = chains.ended(FEWER)
    met = {path.name: path.read_text() for path in runs.work(NAMESAKE).glob("*.met-*")}
    tags = {name.partition(".met-")[0] for name in met}
    assert len(tags) == 2
    assert met == {f"{tag}.met-{rank}": tag for tag in tags for rank in (0, 1)}
