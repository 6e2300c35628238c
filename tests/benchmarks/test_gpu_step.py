"""The benchmark of a step on a GPU: all of it on a CPU, and the arithmetic of its rows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring import Kernel, speed, summarize_kernels, take_turns
from tests.trainer.conftest import REPOSITORY

PERF = REPOSITORY / "benchmarks/perf"

pytestmark = pytest.mark.trainer


def test_all_cases_run_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(PERF / "gpu_step.py"), "--smoke", "--directory", str(tmp_path / "new")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "new/gpu_step-cpu.json").read_text())
    assert (report["skipped"], report["failed"]) == ([], {})
    for case in ("gpt, dropout 0.1", "llama"):
        rows = report["cases"][case]["rows"]
        assert {"by hand", "ours"} <= rows.keys()
        assert len({row["parameters"] for row in rows.values()}) == 1
        for row in rows.values():
            assert row["losses"][0] == pytest.approx(6.24, abs=0.05)  # ln 512
            assert row["profile"]["kernels"] > 0
            assert len(row["profile"]["longest"]) == 10
    assert "by hand" in result.stdout


def test_cases_without_time_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PERF))
    import gpu_step

    report: dict[str, Any] = {"cases": {}, "skipped": [], "failed": {}}
    case = gpu_step.CASES["llama 8b, 4 layers"]
    gpu_step._run_case("llama", case, time.monotonic() + 1, report, smoke=False)
    assert report == {"cases": {}, "skipped": ["llama (by hand)", "llama (ours)"], "failed": {}}
    tiny = gpu_step.SMOKE_CASES["llama"].shape
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_step._run_process(tiny, ["ours"], 0.1, smoke=True)


def test_failed_case_is_reported_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PERF))
    import gpu_step

    report: dict[str, Any] = {"cases": {}, "skipped": [], "failed": {}}
    tiny = gpu_step.SMOKE_CASES["llama"].shape
    case = gpu_step.Case(replace(tiny, heads=3), (("ours",), ("by hand",)))
    gpu_step._run_case("odd", case, time.monotonic() + 300, report, smoke=True)
    assert list(report["failed"]) == ["odd (ours)", "odd (by hand)"]
    assert "model.num_attention_heads" in report["failed"]["odd (ours)"]


def test_kernels_are_summarized() -> None:
    ms = 1e-3
    profile = summarize_kernels(
        [
            ("gemm", 0.0, 2 * ms),
            ("gemm", 4 * ms, 5 * ms),
            # Beside the second one, on another stream, and in part after it.
            ("flash_fwd_kernel", 4.5 * ms, 6 * ms),
            ("Memcpy DtoH (Device -> Pinned)", 7 * ms, 7.5 * ms),
        ]
    )
    assert profile.kernels == 3
    assert profile.busy_seconds == pytest.approx(4.5 * ms)
    assert profile.longest[0] == Kernel("gemm", 2, pytest.approx(3 * ms))
    assert profile.attention == ["flash_fwd_kernel"]


def test_speed_is_the_median_with_shares_of_the_peak() -> None:
    pace = speed([0.2, 0.1, 0.5], 1000, (0.1, 0.08))
    assert (pace.step_seconds, pace.fastest, pace.slowest, pace.tokens_per_second) == (0.2, 0.1, 0.5, 5000)
    assert (pace.mfu, pace.mfu_causal) == (pytest.approx(0.5), pytest.approx(0.4))
    assert speed([0.2], 1000, None).mfu is None


def test_programs_take_turns() -> None:
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in "ab"}
    costs = take_turns(steps, 2, {"a": 1, "b": 2}, lambda: order.append("|"))
    assert "".join(order) == "|a||bb|" * 2
    assert {name: len(runs) for name, runs in costs.items()} == {"a": 2, "b": 2}
