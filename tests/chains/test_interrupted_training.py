"""One training, interrupted once by each kind of failure, and the same training without interruption."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chains.chain_training import EVERY, STAGES_AFTER, STEPS, Training

pytestmark = [pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(2400)]


def test_one_training_survives_each_kind_of_failure(chains: Any) -> None:
    runs = chains.wait_for("tried")
    tried, calm = Training(runs, "tried"), Training(runs, "calm")
    attempts = runs.attempts("tried")
    assert [attempt.verdict for attempt in attempts][-1] == "done", runs.report("tried")
    assert [attempt.link for attempt in attempts] == [1, 2, 3, 4, 5]
    assert [attempt.exit_code for attempt in attempts[:2]] == [75, 75], runs.report("tried")
    assert {attempts[3].nodes, attempts[4].nodes} == {"n9", "n10"}
    tried_values, expected = tried.values_by_step(), calm.values_by_step()
    assert {step for kind, step in expected if kind == "train"} == set(range(1, STEPS + 1))
    # A validation that is under way at the end of a link is given up, and not repeated.
    assert len(tried_values) > STEPS
    assert tried_values == {
        key: values for key, values in expected.items() if key[0] == "train" or key in tried_values
    }

    starts = [event["step"] for event in tried.events("start")]
    reached, saved = tried.last_steps(), tried.saved_steps()
    # After a save at the end no step is repeated; else only those since the last checkpoint, which may have
    # been complete before its event was written.
    assert starts[1:3] == saved[:2] == reached[:2]
    for link in (2, 3):
        assert starts[link] < saved[link] <= starts[link + 1] <= reached[link]
        assert starts[link + 1] % EVERY == 0
    (row,) = runs.ask_json("status", "tried")
    assert (row["state"], row["step"]) == ("COMPLETED", STEPS)
    verdict = runs.ask_json("verify", "tried")
    assert verdict["verdict"] == "verified", verdict


def test_conversion_and_evaluation_follow_the_chain_once_and_in_order(chains: Any) -> None:
    runs = chains.wait_for("tried")
    results = runs.directory / "results"
    (conversion,), (evaluation,) = (runs.attempts(f"tried_{stage}") for stage in STAGES_AFTER)
    assert (conversion.verdict, evaluation.verdict) == ("done", "done"), runs.report("tried_conversion")
    order = [runs.attempts("tried")[-1].ended, conversion.started, conversion.ended, evaluation.started]
    assert order == sorted(order)
    last = results / f"tried_conversion/huggingface/step-{STEPS}"
    assert {"config.json", "model.safetensors"} <= {path.name for path in last.iterdir()}
    measured = json.loads((results / f"tried/evaluations/step-{STEPS}.json").read_text())
    assert measured["step"] == STEPS and measured["perplexity"]["loss"] > 0
    for stage in STAGES_AFTER:
        run = f"tried_{stage}"
        (row,) = runs.ask_json("status", run)
        assert row["state"] == "COMPLETED"
        (launch,) = runs.ask_json("history", run)
        assert (launch["state"], [launch["job_id"]]) == ("COMPLETED", runs.links(run))
        assert runs.ask_json("verify", run)["verdict"] == "verified"
        assert "all is done" in runs.slipway("logs", run).stdout


def test_a_training_that_went_back_gets_on_in_its_chain(chains: Any) -> None:
    """The links save lower steps than the launch before did; none of them may fail."""
    runs = chains.wait_for("rewound")
    training = Training(runs, "rewound")
    first, second = runs.attempts("rewound")
    assert (first.verdict, first.checkpoint, first.failures) == ("continue", 8, 0), runs.report("rewound")
    assert (second.verdict, second.failures) == ("done", 0), runs.report("rewound")
    assert second.checkpoint is not None and 2 < second.checkpoint < 8
    assert [events[0]["step"] for events in training.events_by_link()] == [2, second.checkpoint]
