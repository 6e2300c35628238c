"""Every size of the tree, on the nodes that it ships with and the GPUs that it is for."""

from __future__ import annotations

import pytest

from launcher.checks.findings import Severity
from launcher.checks.registry import run_checks
from launcher.cli.check import layout_numbers
from launcher.config.compose import compose, list_options
from launcher.stages.planning import plan_launch
from tests.checks.plans import KNOWN
from tests.checks.stock import gpu_for


@pytest.mark.parametrize("size", list_options("training"))
def test_a_shipped_size_passes_on_its_stock_node_count(size: str) -> None:
    overrides = [f"training={size}", f"cluster.gpu={gpu_for(size) or 'null'}"]
    plan = plan_launch(compose(overrides).config, number=1, tag="tag")
    findings = run_checks(plan, KNOWN)
    assert [finding.message for finding in findings if finding.severity is Severity.ERROR] == []
    # The measuring sizes do fewer steps than their schedule was made for; how fast experts are is not known.
    ids = {finding.id for finding in findings if finding.severity is not Severity.SKIPPED}
    assert ids <= {"schedule.warmup"}
    assert {finding.id for finding in findings} - ids <= {"time.training"}
    assert plan.job.config is not None
    layout = layout_numbers(plan.job.config, plan.job.resources.nodes)
    assert layout is not None
    assert layout["world"] == plan.job.resources.tasks


# On 4 nodes its layout can be divided; it has no room there, and would take two years.
@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (2, ["layout.world"]),
        (3, ["layout.world"]),
        (4, ["memory.fits", "time.training"]),
        (48, ["batch.global"]),
        (128, []),
    ],
)
def test_findings_of_175b_depend_on_the_node_count(nodes: int, expected: list[str]) -> None:
    overrides = ["training=gpt3/175b", f"training.trainer.num_nodes={nodes}"]
    plan = plan_launch(compose(overrides).config, number=1, tag="tag")
    assert [finding.id for finding in run_checks(plan, KNOWN)] == expected
