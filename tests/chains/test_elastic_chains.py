"""Chains whose links run on different numbers of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chains.chain_training import Training
from tests.chains.elastic_scenarios import BOTH, FEWER, FIXED, NAMESAKE, PRINTING, STAYS, STEPS

pytestmark = [pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(2400)]


def test_each_rank_is_told_the_number_of_ranks(chains: Any) -> None:
    """NeMo also gets the number of nodes, by its last argument."""
    runs = chains.wait_for(FEWER)
    lines = sorted(line for line in runs.log(PRINTING).splitlines() if line.startswith("link "))
    assert lines == [
        *(f"link 1: rank {rank} of 2, trainer.num_nodes=2" for rank in range(2)),
        "link 2: rank 0 of 1, trainer.num_nodes=1",
    ], runs.report(PRINTING)
    assert [attempt.nodes for attempt in runs.attempts(PRINTING)] == [BOTH, STAYS]


def test_a_training_goes_on_with_fewer_nodes(chains: Any) -> None:
    """Samples come in the same order: losses agree up to the order of summation."""
    runs = chains.wait_for(FEWER)
    training, expected = Training(runs, FEWER), Training(runs, FIXED).values_by_step()
    assert [attempt.verdict for attempt in runs.attempts(FEWER)] == ["continue", "done"], runs.report(FEWER)
    starts = training.events("start")
    sizes = [(start["world_size"], start["tensor"], start["data"]) for start in starts]
    assert sizes == [(4, 2, 2), (2, 2, 1)]
    assert starts[1]["step"] == training.last_steps()[0] > 0
    assert {step for kind, step in expected if kind == "train"} == set(range(1, STEPS + 1))
    assert training.values_by_step().keys() == expected.keys()
    for step, values in training.values_by_step().items():
        (value,), (expected_value,) = values, expected[step]
        assert value == pytest.approx(expected_value, rel=1e-5), step


def test_two_jobs_of_one_name_do_not_meet(chains: Any) -> None:
    """Both jobs run at once, on one host."""
    runs = chains.wait_for(FEWER)
    met = {path.name: path.read_text() for path in runs.work(NAMESAKE).glob("*.met-*")}
    tags = {name.partition(".met-")[0] for name in met}
    assert len(tags) == 2
    assert met == {f"{tag}.met-{rank}": tag for tag in tags for rank in (0, 1)}
