"""Every size of the tree, on the nodes that it ships with."""

from __future__ import annotations

import pytest

from launcher.config.compose import compose, list_options
from launcher.preflight.findings import Severity
from launcher.preflight.registry import run_checks
from launcher.preflight.summary import summarize
from launcher.stages.planning import plan_launch
from tests.preflight.plans import KNOWN


@pytest.mark.parametrize("size", list_options("training"))
def test_a_shipped_size_passes_on_its_stock_node_count(size: str) -> None:
    plan = plan_launch(compose([f"training={size}"]).config, number=1, tag="tag")
    found = run_checks(plan, KNOWN)
    assert [finding.message for finding in found if finding.severity is Severity.ERROR] == []
    # The measuring sizes do fewer steps than their schedule was made for.
    assert {finding.id for finding in found} <= {"schedule.warmup"}
    assert plan.job.config is not None
    summary = summarize(plan.job.config, plan.job.resources.nodes)
    assert summary is not None
    assert summary.world == plan.job.resources.tasks


@pytest.mark.parametrize(("nodes", "fits"), [(2, False), (3, False), (4, True), (48, False), (128, True)])
def test_175b_at_other_node_counts(nodes: int, fits: bool) -> None:
    overrides = ["training=gpt3/175b", f"training.trainer.num_nodes={nodes}"]
    plan = plan_launch(compose(overrides).config, number=1, tag="tag")
    ids = [finding.id for finding in run_checks(plan, KNOWN)]
    assert ids == ([] if fits else ["layout.world"] if nodes < 4 else ["batch.global"])
