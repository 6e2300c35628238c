"""The detectors on a reduced set of the benchmark's curves: rates, not times."""

from __future__ import annotations

from benchmarks.watch.__main__ import find_leads, score
from benchmarks.watch.curves import make_curves
from benchmarks.watch.rules import find_llm_foundry, find_olmo_core, find_ours, merge


def test_detectors_see_faults_soon_and_cry_wolf_rarely() -> None:
    """Recorded and synthetic trainings; the rules of OLMo-core and llm-foundry on the same ones."""
    curves = make_curves(seed=7, length=1000, count=120)
    ours = {curve.name: find_ours(curve) for curve in curves}
    assert len(ours) == len(curves)
    total = score(curves, {name: merge(alarms) for name, alarms in ours.items()})
    assert total.steps > 80_000
    assert total.false <= 2
    assert len(total.latencies) >= 0.95 * total.faults
    assert total.latency <= 10
    leads = find_leads(curves, ours)
    assert len(leads) >= 12
    assert sum(lead > 0 for lead in leads.values()) >= 0.8 * len(leads)
    for find in (find_olmo_core, find_llm_foundry):
        theirs = score(curves, {curve.name: find(curve) for curve in curves})
        assert theirs.false_rate > total.false_rate or len(theirs.latencies) < len(total.latencies)
