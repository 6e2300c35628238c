"""A training whose newest checkpoint is damaged before each job loses that checkpoint and nothing else."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tests.chains.chain_runs import ChainRuns
from tests.chains.spoilt_training import (
    COUNT,
    MAX_STEPS,
    SEED,
    SPOILT,
    UNSPOILT,
    damage_records,
    damaged_names,
    events,
)

pytestmark = [pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(2400)]


def test_each_job_continues_from_the_newest_whole_checkpoint(chains: Any) -> None:
    print(f"SLIPWAY_TEST_SEED={SEED}")
    check(chains.wait_for(SPOILT))


def check(runs: ChainRuns) -> None:
    """Compare the training with the one whose checkpoints are whole."""
    records = damage_records(runs, SPOILT)
    assert len(records) == COUNT, runs.report(SPOILT)
    starts = [event["step"] for event in events(runs, SPOILT, "start")]
    assert starts == [0, *(record["step"] for record in records)], records
    fields = ("loss", "grad_norm", "lr", "consumed_samples")
    expected = {
        event["step"]: tuple(event[name] for name in fields) for event in events(runs, UNSPOILT, "train")
    }
    assert set(expected) == set(range(1, MAX_STEPS + 1))
    trained = events(runs, SPOILT, "train")
    assert {event["step"] for event in trained} == set(expected)
    for event in trained:
        assert tuple(event[name] for name in fields) == expected[event["step"]], (event, records)

    aside = [name for record in records for name in record["aside"]]
    # A name may be taken by a checkpoint that was set aside before.
    assert len(damaged_names(runs, SPOILT)) == len(aside)
    launches = runs.ask_json("history", SPOILT)
    damages = [damage for launch in launches for damage in launch["damaged_checkpoints"]]
    names = iter([damage["path"].rpartition("/")[2] for damage in damages])
    for record in records:
        # The checkpoint with a damaged marker is seen first: all markers are read at once.
        assert sorted(islice(names, len(record["aside"]))) == sorted(record["aside"]), (record, damages)
    assert list(names) == []
    assert launches[-1]["state"] == "COMPLETED"
    links = [damage for attempt in launches[0]["attempts"] for damage in attempt["damaged_checkpoints"]]
    assert links == launches[0]["damaged_checkpoints"]
    (row,) = runs.ask_json("status", SPOILT)
    assert row["damaged_checkpoints"] == launches[-1]["damaged_checkpoints"]
    assert runs.ask_json("verify", SPOILT)["verdict"] == "verified"
