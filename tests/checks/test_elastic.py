"""A range of nodes fits at every number of nodes, or is refused with those that fit."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.checks.findings import Finding
from launcher.checks.registry import run_checks
from launcher.checks.rules.training import count_problems
from launcher.estimates.parallelism import read_parallel_config
from launcher.estimates.values import Values
from launcher.plan import Plan
from slipway.arithmetic.layout import fits
from tests.checks.plans import GPT, KNOWN, changed, plan_of

BATCH = "model.global_batch_size"
P = "model.pipeline_model_parallel_size"


def plan_on(least: int, most: int, changes: dict[str, Any] | None = None, **resources: Any) -> Plan:
    """Return the plan of a GPT on nodes of eight GPUs: micro batch 4, global batch 256."""
    requested = {"nodes": least, "max_nodes": most, **resources}
    return plan_of(changed(GPT, {"trainer.num_nodes": None, **(changes or {})}), resources=requested)


def elastic_findings(plan: Plan) -> list[Finding]:
    return [finding for finding in run_checks(plan, KNOWN) if finding.id.startswith(("elastic", "batch"))]


@pytest.mark.parametrize(
    ("least", "most", "changes"),
    [
        (1, 2, {}),
        # 32 × 3 × 5 × 7 at micro batch 4 on eight GPUs of each of 1 to 8 nodes.
        (1, 8, {BATCH: 32 * 840}),
        (2, 3, {BATCH: 192, "model.tensor_model_parallel_size": 8}),
        (1, 2, {"model.rampup_batch_size": [64, 64, 1000]}),
    ],
)
def test_ranges_that_fit_have_no_findings(least: int, most: int, changes: dict[str, Any]) -> None:
    assert elastic_findings(plan_on(least, most, changes)) == []


def test_count_within_the_range_that_does_not_fit_is_an_error() -> None:
    (finding,) = elastic_findings(plan_on(1, 6))
    assert finding.id == "elastic.counts"
    assert finding.key == "resilience.nodes"
    assert finding.message.startswith("resilience.nodes={min: 1, max: 6}: with 3 nodes")
    assert "not a multiple of micro batch 4 × data parallel 24 = 96" in finding.message
    assert finding.fix == (
        "counts of 1-6 that fit: 1, 2, 4\n"
        "'resilience.nodes={min: 1, max: 2}'\n"
        "training.model.global_batch_size=1920, which fits every count"
    )
    assert finding.also == ("training.model.global_batch_size", "training.model.micro_batch_size")


def test_named_batch_fits_every_count() -> None:
    changes = {P: 4, "model.virtual_pipeline_model_parallel_size": 2}
    (finding,) = elastic_findings(plan_on(1, 5, {**changes, BATCH: 250}))
    assert finding.fix is not None
    assert "that fit: none" in finding.fix
    batch = int(finding.fix.partition("global_batch_size=")[2].partition(",")[0])
    shape = read_parallel_config(Values(changed(GPT, {**changes, BATCH: batch})))
    assert shape is not None
    assert all(fits(shape, nodes) for nodes in range(1, 6))
    assert batch >= 250
    assert elastic_findings(plan_on(1, 5, {**changes, BATCH: batch})) == []


def test_model_that_does_not_fit_the_minimum_is_an_error() -> None:
    (finding,) = elastic_findings(plan_on(1, 4, {"model.tensor_model_parallel_size": 8, P: 2}))
    assert "with 1 node" in finding.message
    assert "does not divide 1 node × 8 GPUs = 8" in finding.message
    # No batch makes half a model fit.
    assert finding.fix == ("counts of 1-4 that fit: 2, 4\nresilience.nodes=null training.trainer.num_nodes=4")


def test_ramp_up_that_one_count_cannot_divide_is_an_error() -> None:
    (finding,) = elastic_findings(plan_on(1, 2, {"model.rampup_batch_size": [32, 32, 1000]}))
    assert finding.id == "elastic.counts"
    assert "with 2 nodes" in finding.message
    assert "training.model.rampup_batch_size=[32, 32, 1000]" in finding.message
    assert finding.fix == ("counts of 1-2 that fit: 1\nresilience.nodes=null training.trainer.num_nodes=1")


def test_gpus_per_task_need_a_known_number_of_tasks() -> None:
    (finding,) = elastic_findings(plan_on(1, 2, gpus_per_node=None, gpus_per_task=1))
    assert finding.id == "elastic.gpus"
    assert finding.fix == "cluster.gpus_per_task=null cluster.gpus_per_node=8"


def test_a_fixed_number_is_left_to_the_other_checks() -> None:
    plan = plan_of(changed(GPT, {"trainer.num_nodes": 3}))
    assert list(count_problems(plan)) == []
    assert [finding.id for finding in elastic_findings(plan)] == ["batch.global"]
