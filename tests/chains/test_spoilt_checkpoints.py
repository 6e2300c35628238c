"""A training whose newest checkpoint is damaged before each job: it loses that one and nothing else."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tests.chains.chain_yard import Yard
from tests.chains.spoilt_training import COUNT, MAX_STEPS, SEED, SPOILT, UNSPOILT, damaged, events, record

pytestmark = [pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(2400)]


def test_each_job_continues_from_the_newest_whole_checkpoint(chains: Any) -> None:
    print(f"SLIPWAY_TEST_SEED={SEED}")
    check(chains.ended(SPOILT))


def check(yard: Yard) -> None:
    """Hold the training against the one whose checkpoints are whole."""
    found = record(yard, SPOILT)
    assert len(found) == COUNT, yard.told(SPOILT)
    starts = [event["step"] for event in events(yard, SPOILT, "start")]
    assert starts == [0, *(one["step"] for one in found)], found
    fields = ("loss", "grad_norm", "lr", "consumed_samples")
    expected = {
        event["step"]: tuple(event[name] for name in fields) for event in events(yard, UNSPOILT, "train")
    }
    assert set(expected) == set(range(1, MAX_STEPS + 1))
    trained = events(yard, SPOILT, "train")
    assert {event["step"] for event in trained} == set(expected)
    for event in trained:
        assert tuple(event[name] for name in fields) == expected[event["step"]], (event, found)

    aside = [name for one in found for name in one["aside"]]
    # A name may be taken by one that was set aside before.
    assert len(damaged(yard, SPOILT)) == len(aside)
    launches = yard.told_by("history", SPOILT)
    told = [damage for launch in launches for damage in launch["damaged_checkpoints"]]
    names = iter([damage["path"].rpartition("/")[2] for damage in told])
    for one in found:
        # Of two that one job finds, that with a damaged marker is seen first: all markers are read at once.
        assert sorted(islice(names, len(one["aside"]))) == sorted(one["aside"]), (one, told)
    assert list(names) == []
    assert launches[-1]["state"] == "COMPLETED"
    links = [damage for life in launches[0]["lives"] for damage in life["damaged_checkpoints"]]
    assert links == launches[0]["damaged_checkpoints"]
    (row,) = yard.told_by("status", SPOILT)
    assert row["damaged_checkpoints"] == launches[-1]["damaged_checkpoints"]
    assert yard.told_by("verify", SPOILT)["verdict"] == "verified"
