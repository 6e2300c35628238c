"""One training, interrupted once by each kind of failure, and the same one that nothing interrupts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chains.chain_training import EVERY, STAGES_AFTER, STEPS, Training

pytestmark = [pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(2400)]


def test_one_training_survives_each_kind_of_failure(chains: Any) -> None:
    runs = chains.ended("tried")
    tried, calm = Training(runs, "tried"), Training(runs, "calm")
    attempts = runs.attempts("tried")
    assert [attempt.verdict for attempt in attempts][-1] == "done", runs.told("tried")
    assert [attempt.link for attempt in attempts] == [1, 2, 3, 4, 5]
    assert [attempt.exit_code for attempt in attempts[:2]] == [75, 75], runs.told("tried")
    assert {attempts[3].nodes, attempts[4].nodes} == {"n9", "n10"}
    numbers, expected = tried.numbers(), calm.numbers()
    assert {step for kind, step in expected if kind == "train"} == set(range(1, STEPS + 1))
    # A validation that is under way when the end comes is given up, and is not made up for.
    assert len(numbers) > STEPS
    assert numbers == {key: values for key, values in expected.items() if key[0] == "train" or key in numbers}

    starts = [event["step"] for event in tried.events("start")]
    reached, saved = tried.reached(), tried.saved()
    # After a save before the end no step is done again; else none but those since the last checkpoint, which
    # may have been complete before that could be told.
    assert starts[1:3] == saved[:2] == reached[:2]
    for link in (2, 3):
        assert starts[link] < saved[link] <= starts[link + 1] <= reached[link]
        assert starts[link + 1] % EVERY == 0
    (row,) = runs.told_by("status", "tried")
    assert (row["state"], row["step"]) == ("COMPLETED", STEPS)
    verdict = runs.told_by("verify", "tried")
    assert verdict["verdict"] == "verified", verdict


def test_conversion_and_evaluation_follow_the_chain_once_and_in_order(chains: Any) -> None:
    runs = chains.ended("tried")
    results = runs.directory / "results"
    (conversion,), (evaluation,) = (runs.attempts(f"tried_{stage}") for stage in STAGES_AFTER)
    assert (conversion.verdict, evaluation.verdict) == ("done", "done"), runs.told("tried_conversion")
    order = [runs.attempts("tried")[-1].ended, conversion.started, conversion.ended, evaluation.started]
    assert order == sorted(order)
    last = results / f"tried_conversion/huggingface/step-{STEPS}"
    assert {"config.json", "model.safetensors"} <= {path.name for path in last.iterdir()}
    measured = json.loads((results / f"tried/evaluations/step-{STEPS}.json").read_text())
    assert measured["step"] == STEPS and measured["perplexity"]["loss"] > 0
    for stage in STAGES_AFTER:
        run = f"tried_{stage}"
        (row,) = runs.told_by("status", run)
        assert row["state"] == "COMPLETED"
        (launch,) = runs.told_by("history", run)
        assert (launch["state"], [launch["job_id"]]) == ("COMPLETED", runs.links(run))
        assert runs.told_by("verify", run)["verdict"] == "verified"
        assert "all is done" in runs.slipway("logs", run).stdout


def test_a_training_that_went_back_gets_on_in_its_chain(chains: Any) -> None:
    """Its links save lower steps than the launch before did; none of them may fail."""
    runs = chains.ended("rewound")
    training = Training(runs, "rewound")
    first, second = runs.attempts("rewound")
    assert (first.verdict, first.checkpoint, first.failures) == ("continue", 8, 0), runs.told("rewound")
    assert (second.verdict, second.failures) == ("done", 0), runs.told("rewound")
    assert second.checkpoint is not None and 2 < second.checkpoint < 8
    assert [events[0]["step"] for events in training.by_link()] == [2, second.checkpoint]
