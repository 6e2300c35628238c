"""A training whose newest checkpoint is damaged before each job: it loses that one and nothing else."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tests.chains.chain_runs import ChainRuns
from tests.chains.spoilt_training import COUNT, MAX_STEPS, SEED, SPOILT, UNSPOILT, damaged, events, record

pytestmark = [pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(2400)]


def test_each_job_continues_from_the_newest_whole_checkpoint(chains: Any) -> None:
    print(f"SLIPWAY_TEST_SEED={SEED}")
    check(chains.ended(SPOILT))


def check(runs: ChainRuns) -> None:
    """Hold the training against the one whose checkpoints are whole."""
    found = record(runs, SPOILT)
    assert len(found) == COUNT, runs.told(SPOILT)
    starts = [event["step"] for event in events(runs, SPOILT, "start")]
    assert starts == [0, *(one["step"] for one in found)], found
    fields = ("loss", "grad_norm", "lr", "consumed_samples")
    expected = {
        event["step"]: tuple(event[name] for name in fields) for event in events(runs, UNSPOILT, "train")
    }
    assert set(expected) == set(range(1, MAX_STEPS + 1))
    trained = events(runs, SPOILT, "train")
    assert {event["step"] for event in trained} == set(expected)
    for event in trained:
        assert tuple(event[name] for name in fields) == expected[event["step"]], (event, found)

    aside = [name for one in found for name in one["aside"]]
    # A name may be taken by one that was set aside before.
    assert len(damaged(runs, SPOILT)) == len(aside)
    launches = runs.told_by("history", SPOILT)
    told = [damage for launch in launches for damage in launch["damaged_checkpoints"]]
    names = iter([damage["path"].rpartition("/")[2] for damage in told])
    for one in found:
        # Of two that one job finds, that with a damaged marker is seen first: all markers are read at once.
        assert sorted(islice(names, len(one["aside"]))) == sorted(one["aside"]), (one, told)
    assert list(names) == []
    assert launches[-1]["state"] == "COMPLETED"
    links = [damage for attempt in launches[0]["lives"] for damage in attempt["damaged_checkpoints"]]
    assert links == launches[0]["damaged_checkpoints"]
    (row,) = runs.told_by("status", SPOILT)
    assert row["damaged_checkpoints"] == launches[-1]["damaged_checkpoints"]
    assert runs.told_by("verify", SPOILT)["verdict"] == "verified"
